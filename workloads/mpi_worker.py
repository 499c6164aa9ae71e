"""sshd of an MPI worker: what a launcher reaches, as the image's user and with the environment of the pod.

Runs in worker pods, as `python3 -c` of this text, with SSH_PORT and SSH_KEYS (the folder that holds `authorized_keys`).
sshd gives a session an environment of its own; here it is the container's, so that mpirun finds its other half, and
training finds Neuron's and EFA's settings, as in any other pod. It needs the image's packages only.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

SESSION_ONLY = {"HOME", "LOGNAME", "MAIL", "PWD", "SHELL", "SHLVL", "USER", "_"}
"""What sshd sets itself, or means one process."""


def configuration(environment: Mapping[str, str], host_key: Path) -> str:
    """sshd_config: one user, by key, for commands."""
    return "\n".join(
        [
            f"Port {environment['SSH_PORT']}",
            f"HostKey {host_key}",
            f"AuthorizedKeysFile {environment['SSH_KEYS']}/authorized_keys",
            # The keys are a Secret's: links of root's in a folder that all may write to.
            "StrictModes no",
            "PidFile none",
            "AuthenticationMethods publickey",
            "DisableForwarding yes",
            "PrintMotd no",
            # A probe of the kubelet is a connection that ends at once, which sshd would log every time.
            "LogLevel ERROR",
            # All variables on one line: of several lines only the first counts.
            f"SetEnv {' '.join(_quoted(environment))}",
            "",
        ]
    )


def _quoted(environment: Mapping[str, str]) -> list[str]:
    found = []
    for name, value in environment.items():
        if name not in SESSION_ONLY and value.isprintable():
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            found.append(f'"{name}={escaped}"')
    return found


def main() -> None:
    """Make a host key of this pod's own and become sshd."""
    folder = Path(tempfile.mkdtemp())
    key = folder / "host_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    (folder / "config").write_text(configuration(os.environ, key))
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin") or "/usr/sbin/sshd"
    os.execv(sshd, [sshd, "-D", "-e", "-f", str(folder / "config")])  # sshd wants its whole path


if __name__ == "__main__":
    main()

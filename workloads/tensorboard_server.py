"""TensorBoard that asks for a password. Runs in the TensorBoard pod, which has this file from a ConfigMap:

    PASSWORD_HASH_FILE=/etc/tensorboard/hash HEALTH_PATH=/healthz python3 server.py --logdir DIR --port 6006

TensorBoard has no passwords; it takes a server class, though, and this one wraps the application. The file holds a hash
as `werkzeug.security` writes it, and is read again when it changes. The user's name does not matter. It needs the
training image's packages only, and nothing of this repository.
"""

from __future__ import annotations

import hmac
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tensorboard import program  # type: ignore[import-untyped]
from werkzeug.security import check_password_hash
from werkzeug.wrappers import Request, Response

App = Callable[[dict[str, Any], Any], Iterable[bytes]]


class Password:
    """Whether a password is the one whose hash is in a file."""

    def __init__(self, hash_file: Path) -> None:
        self._file = hash_file
        self._key = secrets.token_bytes(32)
        self._accepted: bytes | None = None
        self._one_at_a_time = threading.Lock()

    def accepts(self, password: str) -> bool:
        """Check `password`. One that was right is known again at once: a page makes a hundred requests, and a check
        takes 32 MiB and a tenth of a second on purpose. For the same reason only one runs at a time."""
        expected = self._file.read_text().strip()
        seen = hmac.digest(self._key, f"{expected}\n{password}".encode(), "sha256")
        if self._accepted is not None and hmac.compare_digest(seen, self._accepted):
            return True
        with self._one_at_a_time:
            right = check_password_hash(expected, password)
        if right:
            self._accepted = seen
        return right


def protected(app: App, password: Password, health: str) -> App:
    """The WSGI application `app` behind HTTP's basic authentication. The path `health` only says that it is up."""

    def guarded(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ.get("PATH_INFO") == health:
            return Response("ok\n")(environ, start_response)
        given = Request(environ).authorization
        if given is not None and given.type == "basic" and password.accepts(given.password or ""):
            return app(environ, start_response)
        asks = {"WWW-Authenticate": 'Basic realm="TensorBoard", charset="UTF-8"'}
        return Response("a password is needed\n", 401, asks)(environ, start_response)

    return guarded


def main(arguments: list[str]) -> int:
    """Serve until SIGTERM."""
    password, health = Password(Path(os.environ["PASSWORD_HASH_FILE"])), os.environ["HEALTH_PATH"]

    def server(app: App, flags: Any) -> program.WerkzeugServer:
        return program.WerkzeugServer(protected(app, password, health), flags)

    tensorboard = program.TensorBoard(server_class=server)
    tensorboard.configure(["tensorboard", *arguments])
    return int(tensorboard.main())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

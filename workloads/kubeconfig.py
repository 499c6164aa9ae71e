"""Is there a cluster behind a context of the kubeconfig? Asked in preview, before anything is made in it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import yaml

from training.messages import expected_one_of, shown

TIMEOUT = 5.0
"""Seconds for a connection: a cluster that needs longer for one would take an hour for the stack."""


def unreachable(context: str | None) -> str | None:
    """Why no API server answers in `context` (None: the current one), as a line; None when one takes connections."""
    files = [Path(name).expanduser() for name in os.environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    files = files or [Path.home() / ".kube" / "config"]
    where = os.pathsep.join(map(str, files))
    contexts: dict[str, Any] = {}
    clusters: dict[str, Any] = {}
    current: Any = None
    for file in files:
        found = _read(file)
        current = current or found.get("current-context")
        contexts = _named(found, "contexts", "context") | contexts
        clusters = _named(found, "clusters", "cluster") | clusters
    name = context or current
    if not isinstance(name, str) or name not in contexts:
        wanted = expected_one_of(str(name or ""), sorted(contexts)) if contexts else ", expected one with a context"
        return f"context: {shown(name)}, not in the kubeconfig {shown(where)}{wanted}"
    server = str(clusters.get(contexts[name].get("cluster"), {}).get("server", ""))
    proxy = clusters.get(contexts[name].get("cluster"), {}).get("proxy-url")
    try:
        _connect(server, proxy)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error) or "no answer"
        return f"context: {shown(name)}, expected a cluster that answers: {shown(server)} does not ({why})"
    return None


def _connect(server: str, proxy: str | None) -> None:
    """Open a connection to `server`, or to the proxy on the way. Raises OSError, or ValueError where that is no URL."""
    url = urlsplit(server)
    if not url.hostname:
        raise ValueError("not an address")
    if proxy is None and not proxy_bypass(url.hostname):
        proxy = getproxies().get(url.scheme)
    way = urlsplit(proxy) if proxy else url
    default = 443 if way.scheme == "https" else 80
    socket.create_connection((way.hostname or "", way.port or default), TIMEOUT).close()


def _read(file: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _named(found: dict[str, Any], key: str, inner: str) -> dict[str, Any]:
    entries = found.get(key)
    return {
        str(entry.get("name")): entry[inner]
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and isinstance(entry.get(inner), dict)
    }

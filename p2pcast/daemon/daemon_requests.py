"""Sends requests to a daemon's HTTP server, from commands and programs on any machine.

Guarantee: a bearer token is sent only to the daemon that it belongs to. After a daemon dies, another user's process may
bind its port; that process never gets the token.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from p2pcast.ground.addresses import http_url, is_loopback
from p2pcast.ground.errors import LocalError, RefusedError, RetryableError, UsageError
from p2pcast.ground.plain_text import shown_text, written_text
from p2pcast.process.daemon_process import state_home
from p2pcast.trust import bearer_tokens

DEFAULT_URL = "http://127.0.0.1:7078"
TIMEOUT_S = 10.0
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTEN = "0A"
_LOCALHOST = ("127.0.0.1", "::1")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def daemon_url(url: str | None, state: Path | None) -> str:
    """Return the URL of the daemon's HTTP server: ``url``, or the one in its state folder. Raises UsageError if both
    are given, and RetryableError if no daemon is running with the state folder.
    """
    if url is not None and state is not None:
        raise UsageError("give --hub or --state, not both")
    if state is None:
        return (url or DEFAULT_URL).rstrip("/")
    try:
        return str(json.loads((state / "daemon.json").read_text())["http"])
    except (OSError, ValueError, KeyError):
        raise RetryableError(f"no daemon runs on the state folder {state}") from None


def bearer_token(url: str, state: Path | None = None, file: Path | None = None) -> str | None:
    """Find the bearer token for a daemon's HTTP server. Sources in order: ``file``, the ``state`` folder, the
    environment, the state folder in the default place whose daemon answers at ``url``. Never argv: others can read it.

    Raises LocalError; RefusedError when another user's process listens in place of the state folder's daemon.
    """
    if file is not None:
        try:
            return written_text(file.read_bytes()).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise LocalError(
                f"cannot read the bearer file {file}: {getattr(error, 'strerror', None) or error}"
            ) from None
    given = os.environ.get(bearer_tokens.VARIABLE, "").strip() or None
    if state is None and given is not None:
        return given
    for folder in [state] if state is not None else _folders_of(url):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            path = folder / bearer_tokens.FILE
            text, owner = path.read_text().strip(), path.stat().st_uid
            if (other := foreign_listener(url, owner)) is not None:
                if state is None:
                    continue  # daemon.json is left from a daemon that was killed
                raise RefusedError(
                    f"{url}: a process of user {other} listens there, not the daemon of {folder}; no token was sent"
                )
            return text
    return given


def _folders_of(url: str) -> Iterator[Path]:
    """Yield the state folders in the default place whose daemon.json contains ``url``."""
    for path in sorted(state_home().glob("*/daemon.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads(path.read_text())["http"] == url:
                yield path.parent


def ask(
    url: str,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    state: Path | None = None,
    token: str | None = None,
    bearer_file: Path | None = None,
) -> dict[str, Any]:
    """Send a request and return its JSON answer. The bearer token is ``token``, or found by ``bearer_token``. Raises
    RetryableError (unreachable, or not done in time), RefusedError, UsageError, LocalError.
    """
    url = http_url(url, "the daemon's URL")
    headers = {"Content-Type": "application/json"}
    if found := token or bearer_token(url, state, bearer_file):
        headers["Authorization"] = f"Bearer {found}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers)
    # No proxy gets a bearer token for a daemon of this machine.
    near = state is not None or is_loopback(urlsplit(url).hostname or "")
    proxies = urllib.request.ProxyHandler({} if near else None)
    try:
        with urllib.request.build_opener(proxies).open(request, timeout=timeout_s) as response:
            document = json.load(response)
    except urllib.error.HTTPError as error:
        try:
            why = json.load(error)["error"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError, http.client.HTTPException):
            why = error.reason
        kinds = {
            400: UsageError, 401: RefusedError, 408: RetryableError, 409: RefusedError, 503: RetryableError,
            504: RetryableError,
        }  # fmt: skip
        raise kinds.get(error.code, LocalError)(f"{url}: {shown_text(why)}") from None
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise RetryableError(
            f"cannot reach the daemon at {url}: {shown_text(getattr(reason, 'strerror', None) or reason)}"
        ) from None
    if not isinstance(document, dict):
        raise LocalError(f"{url}: the answer is no JSON object; is this a p2pcast daemon's address?")
    return document


def foreign_listener(url: str, owner: int) -> int | None:
    """Return the id of the user whose process listens at ``url``; None if that user is ``owner`` or root, or if the
    listener cannot be seen, for instance because it is on another machine.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
        wanted = {ipaddress.ip_address(text) for text in (_LOCALHOST if host == "localhost" else (host,))}
    except ValueError:
        return None
    users = {user for address, at, user in _listening() if at == port and (address in wanted or address.is_unspecified)}
    return min(users - {0, owner}, default=None)


def _listening() -> Iterator[tuple[Address, int, int]]:
    """Address, port and user id of each listening socket, from /proc/net (``proc_net_tcp`` in the kernel's
    documentation).
    """
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN:
                    address, _, port = fields[1].partition(":")
                    yield _address(address), int(port, 16), int(fields[7])


def _address(text: str) -> Address:
    """An address from /proc/net: 32-bit words in hex, each in host order. All supported ones are little-endian."""
    words = bytes.fromhex(text)
    return ipaddress.ip_address(b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4)))

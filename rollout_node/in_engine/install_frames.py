"""Frames on the Unix socket between a peer and the engine's ranks on its host.

Guarantee: a frame is a u32 length (little-endian) and a msgpack map; file descriptors, if any, are sent with the
length. Lengths are checked before any allocation. The rank sends requests, and the peer sends one answer to each:

    {"op": "layout"}                                    -> {"layout": bin}
    {"op": "patches", "from": "b.s" | nil, "to": "b.s"} -> {"dense": bool, "schedule": bin | nil} and descriptors: patch
                                                           files in order, or the shadow alone. Also
                                                           "config": bin | nil, the version's config.json
    {"op": "adapters", "version": "b.s"}                -> {"configs": {path: bin}}, each adapter_config.json
    {"op": "report", "engine", "rank", "phase", "version", "nonce", "error", …} -> {}
                                                           (phase "alive": the process runs)
    any request                                         -> {"error": message, "kind": wire code} if it fails

This module is the rank's blocking side; the peer's side is ``rollout_node.installers.install_socket``.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from types import TracebackType
from typing import Any

import msgpack

from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, LocalError, P2PCastError, RemoteError, RetryableError
from p2pcast.ground.version import Version

ALIVE = "alive"
"""Phase of a report that does not answer a command."""
LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")


def pack(message: dict[str, Any], cap: int) -> bytes:
    """Return a whole frame. Raises RemoteError if it exceeds ``cap`` bytes."""
    body: bytes = msgpack.packb(message, unicode_errors="backslashreplace")
    if len(body) > cap:
        raise RemoteError(f"a message of {len(body)} bytes is over the install socket's limit of {cap}")
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> dict[str, Any]:
    """Return the map in a frame's body. Raises RemoteError."""
    try:
        message = msgpack.unpackb(body)
    except (ValueError, msgpack.exceptions.UnpackException):
        raise RemoteError("a frame on the install socket is not msgpack") from None
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise RemoteError("a frame on the install socket is not a map with names as keys")
    return message


class Descriptors:
    """Received file descriptors, which are closed when the ``with`` block exits. ``schedule``: the version's
    ``budget_schedule`` file; None for dense attention. ``config``: its ``config.json``, if it has one.
    """

    def __init__(self, fds: list[int], dense: bool, schedule: bytes | None = None, config: bytes | None = None) -> None:
        self.fds, self.dense, self.schedule, self.config = fds, dense, schedule, config

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []


class InstallClient:
    """A rank's client of its peer. Each request opens a new connection, so it finds a restarted peer again.

    Every call blocks for at most ``timeout_s`` between bytes. It raises RetryableError if the peer cannot be reached,
    or the kind of error given in the peer's answer.
    """

    def __init__(self, path: Path, timeout_s: float = 30.0) -> None:
        self.path, self.timeout_s = path, timeout_s

    def layout_document(self) -> bytes:
        answer, _ = self._ask({"op": "layout"}, limits.MAX_LAYOUT_BYTES + limits.KIB)
        document = answer.get("layout")
        if not isinstance(document, bytes):
            raise RemoteError("the peer's answer holds no layout document")
        return document

    def patches(self, base: Version | None, to: Version) -> Descriptors:
        """Return the patch files from ``base`` to ``to``, or the shadow (``dense``)."""
        request = {"op": "patches", "from": str(base) if base else None, "to": str(to)}
        answer, fds = self._ask(request, limits.MAX_LAYOUT_BYTES + limits.KIB)
        schedule, config = (v if isinstance(v := answer.get(key), bytes) else None for key in ("schedule", "config"))
        found = Descriptors(fds, bool(answer.get("dense")), schedule, config)
        if not fds or (found.dense and len(fds) != 1):
            with found:
                raise RemoteError(f"the peer sent {len(fds)} files for {to}")
        return found

    def adapter_configs(self, version: Version) -> dict[str, bytes]:
        """Return path → contents of each of the version's ``adapter_config.json`` files."""
        answer, _ = self._ask({"op": "adapters", "version": str(version)}, limits.MAX_LAYOUT_BYTES + limits.KIB)
        configs = answer.get("configs")
        if not isinstance(configs, dict) or not all(
            isinstance(k, str) and isinstance(v, bytes) for k, v in configs.items()
        ):
            raise RemoteError("the peer's answer holds no configurations of adapters")
        return configs

    def report(self, report: dict[str, Any]) -> None:
        self._ask({"op": "report", **report}, limits.KIB * 64)

    def _ask(self, request: dict[str, Any], cap: int) -> tuple[dict[str, Any], list[int]]:
        frame = pack(request, limits.MAX_INSTALL_REQUEST_BYTES)
        fds: list[int] = []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(self.timeout_s)
                sock.connect(str(self.path))
                if (user := other_user(sock)) is not None:
                    raise LocalError(
                        f"the socket {self.path} belongs to a process of user {user}, which could serve other weights: "
                        "start peer and engine as the same user"
                    )
                sock.sendall(frame)
                head, fds, _, _ = socket.recv_fds(sock, LENGTH.size, limits.MAX_INSTALL_FILES)
                head += _receive(sock, LENGTH.size - len(head))
                (length,) = LENGTH.unpack(head)
                if length > cap:
                    raise RemoteError(f"the peer's answer of {length} bytes is over the limit of {cap}")
                answer = unpack(_receive(sock, length))
            if "error" in answer:
                raise _error(answer)
            return answer, fds
        except BaseException as error:
            for fd in fds:
                os.close(fd)
            if isinstance(error, OSError):
                raise RetryableError(
                    f"peer at {self.path}: {error.strerror or error}; is `p2pcast join` running with this socket?"
                ) from None
            raise


def other_user(sock: socket.socket) -> int | None:
    """Return the user id of the process at the other end of a Unix socket; None for this process's user and root."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user = int(_CREDENTIALS.unpack(credentials)[1])
    return None if user in (0, os.geteuid()) else user


def _receive(sock: socket.socket, n: int) -> bytes:
    data = bytearray(n)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise ConnectionResetError("it closed the connection in the middle of its answer")
        view = view[got:]
    return bytes(data)


def _error(answer: dict[str, Any]) -> P2PCastError:
    text = f"peer: {str(answer['error'])[:2000]}"
    kinds: tuple[type[P2PCastError], ...] = (IntegrityError, RetryableError)
    return next((kind(text) for kind in kinds if kind.wire_code == answer.get("kind")), RemoteError(text))

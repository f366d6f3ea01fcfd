from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, LocalError, P2PCastError, RemoteError, RetryableError
from p2pcast.ground.version import Version
from rollout_node.in_engine.install_frames import InstallClient, pack, unpack
from rollout_node.installers import install_socket as module
from rollout_node.installers.install_socket import InstallSocket

ANSWER_S = 600.0
REPORT = {"engine": "e", "rank": 0, "phase": "commit", "version": "0.1", "error": None}


class Files:
    """A provider of real files."""

    def __init__(self, folder: Path) -> None:
        self.files = [folder / name for name in ("a", "b", "c")]
        for path in self.files:
            path.write_bytes(path.name.encode() * 10)
        self.reports: list[Any] = []
        self.asked: list[tuple[Version | None, Version]] = []
        self.refusal: P2PCastError | None = None

    def layout_document(self) -> bytes:
        return b"x" * 300_000

    def patches(self, base: Version | None, to: Version) -> list[Path] | Path:
        self.asked.append((base, to))
        if self.refusal:
            raise self.refusal
        return self.files if base else self.files[0]

    def schedule(self, version: Version) -> bytes | None:
        return b"{}" if version == Version(1, 7) else None

    def config(self, version: Version) -> bytes | None:
        return b'{"a": 1}' if version == Version(1, 7) else None

    def report(self, report: Any) -> None:
        self.reports.append(report)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
async def server(tmp_path: Path, files: Files) -> AsyncIterator[InstallSocket]:
    found = InstallSocket(tmp_path / "sock", files)
    await found.start()
    yield found
    await found.close()


async def call(server: InstallSocket, work: Callable[[InstallClient], Any]) -> Any:
    return await asyncio.to_thread(work, InstallClient(server.path, timeout_s=ANSWER_S))


def contents(client: InstallClient, base: Version | None) -> tuple[bool, list[bytes]]:
    with client.patches(base, Version(1, 7)) as found:
        assert (found.schedule, found.config) == (b"{}", b'{"a": 1}')
        return found.dense, [os.pread(fd, 100, 0) for fd in found.fds]


async def test_patches_come_as_descriptors_in_order(server: InstallSocket, files: Files) -> None:
    assert await call(server, lambda c: contents(c, Version(1, 4))) == (False, [b"a" * 10, b"b" * 10, b"c" * 10])
    assert await call(server, lambda c: contents(c, None)) == (True, [b"a" * 10])
    assert files.asked == [(Version(1, 4), Version(1, 7)), (None, Version(1, 7))]


def descriptors_after_settling(most: int) -> int:
    """Connections may still be closing at the other end."""
    deadline = time.monotonic() + 60
    while (count := len(os.listdir("/proc/self/fd"))) > most and time.monotonic() < deadline:
        time.sleep(0.01)
    return count


async def test_no_descriptor_leaks(server: InstallSocket) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await call(server, lambda c: contents(c, Version(1, 4)))
    assert await asyncio.to_thread(descriptors_after_settling, before) <= before


async def test_a_long_layout_document_arrives_whole(server: InstallSocket) -> None:
    assert await call(server, lambda c: c.layout_document()) == b"x" * 300_000


async def test_reports_reach_matching_expectations(server: InstallSocket, files: Files) -> None:
    with server.expect(lambda r: r["phase"] == "commit", 2) as expectation:
        await call(server, lambda c: c.report({**REPORT, "phase": "prepare"}))
        await call(server, lambda c: c.report({**REPORT, "rank": 1}))
        with pytest.raises(TimeoutError):
            await expectation.wait(0)
        assert expectation.missing == 1
        await call(server, lambda c: c.report(REPORT))
        assert [r["rank"] for r in await expectation.wait(ANSWER_S)] == [0, 1]
    assert len(files.reports) == 3
    assert "op" not in files.reports[0]


@pytest.mark.parametrize("kind", [IntegrityError, RetryableError, LocalError])
async def test_refusals_keep_their_kind(server: InstallSocket, files: Files, kind: type[P2PCastError]) -> None:
    files.refusal = kind("not staged here")
    with pytest.raises(RemoteError if kind is LocalError else kind, match="not staged here"):
        await call(server, lambda c: contents(c, None))


async def test_a_vanished_file_is_named(server: InstallSocket, files: Files) -> None:
    files.files[2].unlink()
    with pytest.raises(RemoteError, match="c: No such file"):
        await call(server, lambda c: contents(c, Version(0, 0)))


async def test_too_many_files_are_refused(server: InstallSocket, files: Files) -> None:
    files.files *= limits.MAX_INSTALL_FILES
    with pytest.raises(RemoteError, match="at most"):
        await call(server, lambda c: contents(c, Version(0, 0)))


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"op": "open", "path": "/etc/passwd"},
        {"op": "patches", "to": 3},
        {"op": "patches", "from": "../x", "to": "0.1"},
        {"op": "report", **REPORT, "rank": "0"},
        {"op": "report", **REPORT, "error": 1},
        {"op": "report", "engine": "e"},
    ],
)
async def test_nonsense_gets_an_error_and_the_socket_lives_on(
    server: InstallSocket, files: Files, request_: Any
) -> None:
    with pytest.raises(P2PCastError):
        await call(server, lambda c: c._ask(request_, limits.KIB))
    await call(server, lambda c: c.report(REPORT))
    assert len(files.reports) == 1


def raw(path: Path, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(ANSWER_S)
        sock.connect(str(path))
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        found = b""
        while got := sock.recv(65536):
            found += got
        return found


@pytest.mark.parametrize("data", [b"", b"\0", struct.pack("<I", 0xFFFFFFFF), struct.pack("<I", 100) + b"abc"])
async def test_broken_frames_end_the_connection_alone(server: InstallSocket, data: bytes) -> None:
    assert await asyncio.to_thread(raw, server.path, data) == b""
    await call(server, lambda c: c.report(REPORT))


async def test_a_frame_may_come_byte_by_byte(server: InstallSocket, files: Files) -> None:
    def drip() -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(ANSWER_S)
            sock.connect(str(server.path))
            for byte in pack({"op": "report", **REPORT}, limits.KIB):
                sock.sendall(bytes([byte]))
            return sock.recv(100)

    assert (await asyncio.to_thread(drip))[4:] == msgpack.packb({})
    assert len(files.reports) == 1


async def test_only_the_owner_may_open_the_socket(server: InstallSocket) -> None:
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
async def test_other_users_get_nothing(server: InstallSocket) -> None:
    server.path.chmod(0o666)
    for folder in server.path.parents:
        if folder.is_relative_to(tempfile.gettempdir()) and folder != Path(tempfile.gettempdir()):
            folder.chmod(folder.stat().st_mode | 0o111)
    script = (
        "import os,socket,sys; os.setuid(65534); s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "s.sendall(b'\\x0b\\0\\0\\0\\x81\\xa2op\\xa6layout'); print(s.recv(10))"
    )
    process = await asyncio.create_subprocess_exec(
        "python3", "-c", script, str(server.path), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert out.strip() == b"b''" or b"ConnectionResetError" in err or b"BrokenPipe" in err, (out, err)


async def test_a_socket_left_by_a_dead_peer_is_replaced(tmp_path: Path, files: Files) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(tmp_path / "s"))
    found = InstallSocket(tmp_path / "s", files)
    await found.start()
    with pytest.raises(LocalError, match="in use"):
        await InstallSocket(tmp_path / "s", files).start()
    await call(found, lambda c: c.report(REPORT))
    await found.close()
    assert not (tmp_path / "s").exists()
    with pytest.raises(RetryableError, match="p2pcast join"):
        await call(found, lambda c: c.report(REPORT))


async def test_closing_ends_open_connections(server: InstallSocket) -> None:
    reader, writer = await asyncio.open_unix_connection(str(server.path))
    await server.close()
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


@given(
    st.dictionaries(st.text(max_size=5), st.one_of(st.none(), st.integers(0, 2**63), st.binary(max_size=9)), max_size=4)
)
def test_frames_round_trip(message: dict[str, Any]) -> None:
    frame = pack(message, limits.KIB)
    assert unpack(frame[4:]) == message
    assert struct.unpack("<I", frame[:4])[0] == len(frame) - 4


@given(st.binary(max_size=60))
def test_any_bytes_are_a_map_or_a_remote_error(body: bytes) -> None:
    try:
        assert isinstance(unpack(body), dict)
    except RemoteError:
        pass


async def test_without_descriptors_a_listener_waits_and_continues(
    server: InstallSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stays queued and the socket readable; accept is retried only after a pause."""
    monkeypatch.setattr(module, "EXHAUSTED_S", 3600.0)
    real = server._sock
    assert real is not None

    class Short:
        """A listening socket of a process that has no descriptor left, until ``spare``."""

        def __init__(self) -> None:
            self.looks, self.spare = 0, False
            self.looked = asyncio.Event()

        def accept(self) -> Any:
            self.looks += 1
            self.looked.set()
            if not self.spare:
                raise OSError(errno.EMFILE, "too many open files")
            return real.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    asyncio.get_running_loop().remove_reader(real)
    server._sock = short = Short()  # type: ignore[assignment]
    server._attend(short)  # type: ignore[arg-type]
    calling = asyncio.create_task(call(server, lambda c: c.report(REPORT)))
    await short.looked.wait()
    for _ in range(100):
        await asyncio.sleep(0)
    assert short.looks == 1
    short.spare = True
    assert server._again is not None
    server._again._run()  # as when its time has come
    await calling
    assert short.looks == 2

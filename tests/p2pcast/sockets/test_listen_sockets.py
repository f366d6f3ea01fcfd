"""Listening in both families, in one, and at addresses that are not available."""

from __future__ import annotations

import asyncio
import socket

import pytest

from p2pcast.ground.errors import LocalError
from p2pcast.page.replay import RunReplay
from p2pcast.sockets.listen_sockets import advertised_hosts, listening, own_hosts


def reaches(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 5).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "v4", "v6"),
    [("", True, True), ("::", True, True), ("0.0.0.0", True, False), ("127.0.0.1", True, False), ("::1", False, True)],
)
def test_which_addresses_a_listener_answers(host, v4, v6) -> None:
    (sock,) = listening(host, 0, "--listen")
    with sock:
        sock.listen()
        port = sock.getsockname()[1]
        assert (reaches("127.0.0.1", port), reaches("::1", port)) == (v4, v6)


def test_a_name_with_several_addresses_has_one_port() -> None:
    made = listening("localhost", 0, "--listen")
    try:
        assert len({sock.getsockname()[1] for sock in made}) == 1
    finally:
        for sock in made:
            sock.close()


def test_a_port_in_use_and_a_foreign_host_are_errors() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(LocalError, match="in use; choose another with --http"),
    ):
        listening("127.0.0.1", taken.getsockname()[1], "--http")
    with pytest.raises(LocalError, match="choose another"):
        listening("192.0.2.1", 0, "--listen")
    with pytest.raises(LocalError, match="choose another"):
        listening("no.such.name.invalid", 0, "--listen")


def test_only_own_addresses_with_a_listener_are_advertised() -> None:
    own = ["fd00::7", "10.0.0.7"]
    assert advertised_hosts(("", 1), own) == advertised_hosts(("::", 1), own) == own
    assert advertised_hosts(("0.0.0.0", 1), own) == ["10.0.0.7"]
    assert advertised_hosts(("10.0.0.9", 1), own) == ["10.0.0.9"]
    assert advertised_hosts(("fe80::1", 1), own) == []
    for host in own_hosts():
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
            sock.bind((host, 0))


async def test_http_on_both_families_knows_loopback_in_either() -> None:
    server = RunReplay([], 1.0, "run").http
    await server.start("::", 0)
    try:
        for host in ("127.0.0.1", "::1"):
            reader, writer = await asyncio.open_connection(host, server.address[1])
            writer.write(b"GET /status HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"200"
            writer.close()
    finally:
        await server.stop()

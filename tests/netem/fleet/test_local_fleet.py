"""Ends of a fleet's processes, in the moment in which another end is asked for; diallers of encrypted connections."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from netem.emulation.loopback import Net
from netem.fleet.local_fleet import LocalFleet, dialler
from netem.fleet.processes import FleetError


async def ended_with(tmp_path: Path, code: int) -> LocalFleet:
    fleet = LocalFleet(tmp_path, Net(1e6), 1, 1, 1, 60.0)
    words = f'import sys; print("the peer\'s last words"); sys.exit({code})'
    fleet._processes.start("p1", [sys.executable, "-c", words]).process.wait()
    return fleet


async def test_a_peer_without_a_hub_may_end_before_its_signal(tmp_path: Path) -> None:
    fleet = await ended_with(tmp_path, 4)
    fleet.send("p1", signal.SIGSTOP)
    await fleet.leave("p1", 60.0)
    assert fleet.pid("p1") is None
    fleet = await ended_with(tmp_path, 4)
    await fleet.kill("p1")
    assert fleet.pid("p1") is None


@pytest.mark.parametrize(("code", "joined"), [(1, False), (4, True), (1, True)])
async def test_any_other_end_of_a_leaving_peer_is_an_error(tmp_path: Path, code: int, joined: bool) -> None:
    fleet = await ended_with(tmp_path, code)
    if joined:
        fleet.core.state("p1").mkdir(parents=True)
        (fleet.core.state("p1") / "daemon.json").touch()
    with pytest.raises(FleetError, match=rf"(?s)p1 ended with {code} on SIGTERM.*the peer's last words"):
        await fleet.leave("p1", 60.0)


def test_dialler_of_an_encrypted_link_is_identified() -> None:
    """By the ports of a connection: this process, under the given name."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
        port, to = (address[1] for address in (mine.getsockname(), server.getsockname()))
        assert dialler(port, to, {"nobody": 1 << 30, "a": os.getpid()}) == "a"
        assert dialler(port, to, {"nobody": 1 << 30}) is None
        assert dialler(to, port + 1, {"a": os.getpid()}) is None

"""Networks with rates: the request, real traffic apart from this machine's own network, and their removal."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from netem.emulation import namespaces
from netem.emulation.description import EmulatedLink, EmulatedNetwork, Host, star
from netem.emulation.rate import rate_network
from netem.emulation.shaping import shaping
from p2pcast.ground.errors import LocalError, UsageError


def test_invalid_networks_are_refused() -> None:
    with pytest.raises(UsageError, match="the same name"):
        EmulatedNetwork((Host("a"), Host("a")))
    with pytest.raises(UsageError, match="0 hosts"):
        EmulatedNetwork(())
    with pytest.raises(UsageError, match="above 0"):
        EmulatedNetwork((Host("a", EmulatedLink(up_bps=0)),))


def test_rate_backend_refuses_delay_and_loss() -> None:
    with (
        pytest.raises(UsageError, match="neither delay nor loss"),
        rate_network(EmulatedNetwork((Host("a", EmulatedLink(delay_s=0.1)),))),
    ):
        pass


def test_holder_outside_a_new_namespace_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise devices would be made on this machine itself."""
    script = tmp_path / "setpriv"
    script.write_text("#!/bin/sh\nexec sleep infinity\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(namespaces, "COMMAND_S", 0.05)
    with pytest.raises(LocalError, match="still in this machine's namespace"), namespaces.namespace():
        pass


def test_each_host_has_an_address_of_its_own() -> None:
    network = star(EmulatedLink(), 300, EmulatedLink())
    assert len({network.address(host.name) for host in network.hosts}) == 301


def test_a_link_without_a_rate_is_left_alone() -> None:
    assert shaping("eth0", None, EmulatedLink(), 0.05) == []
    (line,) = shaping("eth0", 100e6, EmulatedLink(), 0.05)
    assert line == "qdisc add dev eth0 root tbf rate 100000000bit burst 50000 limit 675000"


def interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


@pytest.mark.root
def test_bytes_go_from_host_to_host_through_both_buckets() -> None:
    before = interfaces()
    fast, slow = EmulatedLink(80e6, 80e6), EmulatedLink(40e6, 40e6)
    with rate_network(star(fast, 1, slow)) as net:
        assert interfaces() == before
        code = (
            "import socket; s = socket.create_server(('', 7000)); print(1, flush=True); c, _ = s.accept(); "
            "c.sendall(bytes(1 << 19))"
        )
        server = subprocess.Popen([*net.inside("hub"), sys.executable, "-c", code], stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            server.stdout.readline()
            with net.connect("p1", (net.network.address("hub"), 7000), 600) as sock:
                assert sock.getsockname()[0] == net.network.address("p1")
                assert sum(iter(lambda: len(sock.recv(1 << 16)), 0)) == 1 << 19
            assert server.wait(600) == 0
        finally:
            server.kill()
            server.communicate()
        shown = subprocess.run(
            [*net.inside("p1"), "tc", "qdisc", "show", "dev", "eth0"], capture_output=True, text=True, check=True
        )
        assert "tbf" in shown.stdout
        assert "rate 40Mbit" in shown.stdout
    assert interfaces() == before


HELD = """
import sys
from netem.emulation.description import EmulatedLink, star
from netem.emulation.rate import rate_network
with rate_network(star(EmulatedLink(), 2, EmulatedLink())) as net:
    print(*[words.split("/")[2] for words in (net.inside(host.name)[1] for host in net.network.hosts)], flush=True)
    sys.stdin.read()
"""


@pytest.mark.root
def test_killed_network_leaves_nothing() -> None:
    """After SIGKILL only the kernel can clean up."""
    maker = subprocess.Popen([sys.executable, "-c", HELD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    holders = [int(pid) for pid in maker.stdout.readline().split()]
    assert len(holders) == 3
    watched = [os.pidfd_open(pid) for pid in holders]
    try:
        maker.send_signal(signal.SIGKILL)
        maker.communicate()
        for pidfd in watched:
            assert select.select([pidfd], [], [], 30.0)[0], "a holder of a namespace still runs"
    finally:
        for pidfd in watched:
            os.close(pidfd)


@pytest.mark.root
def test_a_network_leaves_the_calling_thread_in_its_namespace() -> None:
    with rate_network(star(EmulatedLink(), 1, EmulatedLink())) as net:
        ours = Path("/proc/thread-self/ns/net").readlink()
        with pytest.raises(OSError):
            net.connect("p1", ("127.0.0.1", 1), 5)
        assert Path("/proc/thread-self/ns/net").readlink() == ours

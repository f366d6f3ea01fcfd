"""Real daemons on a network with limited reachability: NATs of nftables, IPv6 alone, IPv4 alone. All peers end bit for
bit, over forward or reverse links.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from nat_network import NatNetwork, Site, nat_network

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("nft") is None, reason="there is no nft command: apt-get install nftables"),
]

DEADLINE_S = 600.0
POLL_S = 0.05
WORDS = 1 << 19


class Cast:
    """Daemons at the hosts of a network."""

    def __init__(self, net: NatNetwork, folder: Path, *links: str) -> None:
        self.net = net
        self.folder = folder
        self._links = links
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.sums: dict[int, str] = {}

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _start(self, name: str, *words: object) -> None:
        common = ["--state", self.folder / name, "--shadow", self.folder / f"{name}-shadow", *self._links]
        common += ["--token-file", self.folder / "token"]
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [*self.net.inside(name), sys.executable, "-m", "p2pcast.cli", *map(str, (*words, *common))],
                stdout=log,
                stderr=log,
            )

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def seed(self) -> None:
        self._start("hub", "seed", self.folder / "checkpoints", "--chains", 1, "--codec", "flat")
        self.until(lambda: self.status("hub") is not None, "the hub's answer")

    def join(self, name: str, family: int = 4, *, version: str) -> dict[str, Any]:
        """The peer's row in the hub's status, once the peer has installed ``version`` and reports the kind of its
        parent's link.
        """
        host = self.net.public("hub", family)
        hub = f"[{host}]:7077" if family == 6 else f"{host}:7077"
        target = f"safetensors:{self.folder / f'{name}-out'}"
        self._start(name, "join", hub, "--name", name, "--install", target, "--listen", ":7000", "--stripes", 2)
        return self.fed(name, version)

    def fed(self, name: str, version: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def look() -> bool:
            found.clear()
            found.update(self.rows().get(name, {}))
            return found.get("committed") == version and found.get("link") is not None and found["settled"]

        self.until(look, f"{name} at {version}")
        return found

    def rows(self) -> dict[str, dict[str, Any]]:
        """Peers by name, as the hub shows them. ``settled``: the parent is that of the plan."""
        peers = (self.status("hub") or {"peers": []})["peers"]
        names = {p["node"]: p["name"] for p in peers}
        for peer in peers:
            own = self.status(peer["name"])
            peer["settled"] = (
                own is not None and own["link"] == peer["link"] and names.get(own["parent"], "hub") == peer["parent"]
            )
        return {p["name"]: p for p in peers}

    def status(self, name: str) -> dict[str, Any] | None:
        def ask() -> dict[str, Any] | None:
            try:
                url = json.loads((self.folder / name / "daemon.json").read_text())["http"]
                with urllib.request.urlopen(f"{url}/status", timeout=5) as answer:
                    document: dict[str, Any] = json.load(answer)
                    return document
            except (OSError, ValueError):
                return None

        return self.net.at(name, ask)

    def publish(self, step: int) -> str:
        draw = np.random.default_rng(7)
        words = draw.integers(0, 1 << 16, WORDS, dtype=np.uint16)
        for _ in range(step):
            words[draw.random(WORDS) < 0.2] += 1
        part = self.folder / "checkpoints" / f".step_{step}"
        part.mkdir(parents=True)
        spec = safetensors.TensorSpec(
            dtype="bfloat16", shape=[WORDS], data_ptr=words.ctypes.data, data_len=words.nbytes
        )
        safetensors.serialize_file({"w": spec}, part / "model.safetensors")
        (part / "STABLE").touch()
        part.rename(part.with_name(f"step_{step}"))
        self.sums[step] = hashlib.sha256(words.data).hexdigest()
        return f"0.{step}"

    def exact(self, name: str, step: int) -> bool:
        file = self.folder / f"{name}-out" / f"step_{step}" / "model.safetensors"
        return hashlib.sha256(safetensors.deserialize(file.read_bytes())[0][1]["data"]).hexdigest() == self.sums[step]

    def until(self, look: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not look():
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- {n}\n{(self.folder / f'{n}.log').read_text()[-3000:]}" for n in self._processes)
                pytest.fail(f"not within {DEADLINE_S:.0f} s: {what}\n{json.dumps(self.rows(), indent=1)}\n{logs}")
            time.sleep(POLL_S)


@pytest.fixture
def cast() -> Iterator[Callable[..., Cast]]:
    with tempfile.TemporaryDirectory(prefix="p2pcast-test-", dir="/dev/shm") as folder:
        made: list[Cast] = []
        nets: list[Any] = []

        def make(*sites: Site, links: tuple[str, ...] = ()) -> Cast:
            nets.append(nat_network([Site("hub", families=(4, 6)), *sites]))
            made.append(Cast(nets[-1].__enter__(), Path(folder), *links))
            return made[-1]

        try:
            yield make
        finally:
            for one in made:
                one.close()
            for net in nets:
                net.__exit__(None, None, None)


def test_behind_nats_of_either_kind_on_either_side_and_on_both(cast) -> None:
    run = cast(
        Site("n1", "restricted"),
        Site("open"),
        Site("n2", "restricted"),
        Site("cone", "full cone"),
        Site("n3", "restricted"),
        Site("n4", "restricted"),
    )
    version = run.publish(0)
    run.seed()
    n1 = run.join("n1", version=version)
    assert (n1["parent"], n1["link"]["dialled_by"]) == ("hub", "child")
    # The parent's NAT blocks incoming connections: the parent dials.
    opened = run.join("open", version=version)
    assert (opened["parent"], opened["link"]["dialled_by"]) == ("n1", "parent")
    run.until(lambda: run.rows()["n1"]["reachable"] is False, "the hub knows that n1 cannot be dialled")
    assert run.rows()["open"]["reachable"]
    # The peer is itself behind a NAT: the peer dials.
    n2 = run.join("n2", version=version)
    assert (n2["parent"], n2["link"]["dialled_by"]) == ("open", "child")
    run.until(lambda: run.rows()["n2"]["reachable"] is False, "the hub knows that n2 cannot be dialled")
    # Both are behind a NAT, and the child's forwards a port.
    cone = run.join("cone", version=version)
    assert (cone["parent"], cone["link"]["dialled_by"]) == ("n2", "parent")
    assert cone["reachable"]
    # Both are behind a NAT, and the parent's forwards a port.
    n3 = run.join("n3", version=version)
    assert (n3["parent"], n3["link"]["dialled_by"]) == ("cone", "child")
    run.until(lambda: run.rows()["n3"]["reachable"] is False, "the hub knows that n3 cannot be dialled")
    # Both are behind a NAT without a forwarded port: the peer gets a parent that can be linked.
    n4 = run.join("n4", version=version)
    assert n4["parent"] in ("hub", "open", "cone")
    assert n4["link"]["dialled_by"] == "child"

    version = run.publish(1)
    for name in ("n1", "open", "n2", "cone", "n3", "n4"):
        assert run.fed(name, version)["bytes_duplicate"] == 0
        assert run.exact(name, 1)

    # The dead peer's children have no linkable ancestor except the hub.
    run.kill("open")
    version = run.publish(2)
    for name in ("n1", "n2", "cone", "n3", "n4"):
        assert run.fed(name, version)["bytes_duplicate"] == 0
        assert run.exact(name, 2)


def test_ipv6_only_and_ipv4_only_peers_meet_through_a_dual_stack_peer(cast) -> None:
    run = cast(Site("six", families=(6,)), Site("four"), Site("both", families=(4, 6)), links=("--plaintext",))
    version = run.publish(0)
    run.seed()
    assert run.join("six", 6, version=version)["parent"] == "hub"
    # No link to the only other peer is possible in either direction.
    assert run.join("four", version=version)["parent"] == "hub"
    both = run.join("both", version=version)
    assert both["parent"] in ("six", "four")
    assert (
        both["link"]["address"]
        == {"six": f"[{run.net.public('six', 6)}]:7000", "four": f"{run.net.public('four')}:7000"}[both["parent"]]
    )
    version = run.publish(1)
    for name in ("six", "four", "both"):
        assert run.fed(name, version)["bytes_duplicate"] == 0
        assert run.exact(name, 1)

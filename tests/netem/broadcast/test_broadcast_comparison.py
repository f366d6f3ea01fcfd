"""`bench broadcast`: the rows, the rivals' processes, and the whole command on a small network."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from netem.broadcast.emulated_fleet import BroadcastFleet, FleetSetup
from netem.broadcast.rivals import RIVALS, RivalMissingError
from netem.broadcast.rows import BroadcastSeries, MeasuredBroadcast, left_out, quantile, row
from netem.emulation.description import HUB, EmulatedLink, star
from netem.emulation.rate import rate_network
from netem.fleet.fleet import check_same
from netem.fleet.processes import ChildProcess, Processes
from netem.fleet.workspace import PREFIX, own_folder
from p2pcast.ground.errors import IntegrityError

KEYS = {"system", "peers", "payload_bytes", "ideal_s", "p90_s", "all_s", "all_over_ideal"}


def test_a_row_has_medians_over_the_ideal() -> None:
    rounds = [
        MeasuredBroadcast([1.0, last], {"hub": 0.5, "p1": cpu}, 0.5, last + 1)
        for last, cpu in ((4.0, 1.0), (2.0, 3.0), (3.0, 2.0))
    ]
    made = row(BroadcastSeries("p2pcast", 12_500_000, rounds, {"chains": 1}), 2, 100e6)
    assert made.keys() > KEYS
    assert (made["ideal_s"], made["all_s"], made["p90_s"], made["staged_s"]) == (1.0, 3.0, 3.0, 4.0)
    assert made["all_over_ideal"] == 3.0
    assert made["every_over_ideal"] == [4.0, 2.0, 3.0]
    assert (made["cpu_s"], made["busiest_cpu_s"]) == (2.5, 2.0)


def test_quantiles() -> None:
    assert [quantile([4.0, 1.0, 3.0, 2.0], share) for share in (0.0, 0.25, 0.5, 0.9, 1.0)] == [1.0, 1.0, 2.0, 4.0, 4.0]


def test_skipped_row_has_a_reason() -> None:
    assert left_out("libtorrent", 8, "not installed") == {
        "system": "libtorrent",
        "peers": 8,
        "skipped": "not installed",
    }


def test_folders_of_the_dead_are_swept_and_ours_goes(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / f"{PREFIX}{dead.pid}" / "state").mkdir(parents=True)
    (tmp_path / f"{PREFIX}1").mkdir()
    with own_folder(tmp_path) as folder:
        assert {path.name for path in tmp_path.iterdir()} == {folder.name, f"{PREFIX}1"}
    assert [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}1"]


def test_folder_of_an_earlier_process_with_our_id_is_removed(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}{os.getpid()}" / "logs").mkdir(parents=True)
    with own_folder(tmp_path) as folder:
        assert list(folder.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
@pytest.mark.parametrize("rival", ["chain", "star"])
def test_a_rival_reaches_every_peer(rival: str, tmp_path: Path) -> None:
    with rate_network(star(EmulatedLink(200e6, 200e6), 3, EmulatedLink(100e6, 100e6))) as net:
        ran = RIVALS[rival](net, 300_001, 2, 2, tmp_path)
    assert len(ran.rounds) == 2
    assert all(len(r.times_s) == 3 and min(r.times_s) > 0 for r in ran.rounds)
    # A bucket lets 50 kB through at once; the rest is limited by the rate.
    assert all(max(r.times_s) > (300_001 - 50_000) * 8 / 100e6 for r in ran.rounds)


def test_missing_rival_package_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RivalMissingError, match="pip install"):
        RIVALS["libtorrent"](None, 1, 1, 1, tmp_path)  # type: ignore[arg-type]


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for the sockets of daemons."""
    with tempfile.TemporaryDirectory(prefix="p2pcast-") as name:
        yield Path(name)


def ours(below: Path) -> list[str]:
    """Processes and folders that remain of a bench working ``below``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if os.fsencode(below) in words:
            found.append(words.replace(b"\0", b" ").decode(errors="replace"))
    return found + [str(path) for path in below.iterdir() if path.name.startswith(PREFIX)]


@pytest.mark.root
def test_the_command_broadcasts_bit_exact_and_leaves_nothing(p2pcast, tmp_path: Path, short: Path) -> None:
    """Exit code 0 means that each peer's installed weights were compared with the published ones."""
    names = ["--peers", 2, "--payload", 1, "--rounds", 2, "--late", 1, "--rival", "chain", "--dir", short]
    done = p2pcast("bench", "broadcast", *names, "--json", "-o", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said == json.loads((tmp_path / "out.json").read_text())
    assert [(r["system"], r["peers"]) for r in said["rows"]] == [
        ("p2pcast", 2),
        ("p2pcast, 1 late", 2),
        ("bare chain", 2),
    ]
    assert all(r.keys() > KEYS and r["all_over_ideal"] > 0.9 for r in said["rows"])
    assert said["rows"][0]["payload_bytes"] == pytest.approx(1 << 20, rel=0.05)
    assert ours(short) == []


def test_wrong_installed_bytes_are_found(tmp_path: Path) -> None:
    saved, installed = tmp_path / "saved", tmp_path / "installed"
    for folder, last in ((saved, 0.0), (installed, -0.0)):
        folder.mkdir()
        save_file({"w": np.array([1.0, last], np.float16)}, folder / "model.safetensors")
    check_same(saved, saved)
    with pytest.raises(IntegrityError, match="installed"):
        check_same(saved, installed)


class Sleepers(Processes):
    """Processes that only sleep: the set of awaited peers does not depend on their work."""

    def fork(
        self, name: str, words: Sequence[str | Path], space: str | None = None, *, entry: str | None = None
    ) -> ChildProcess:
        return self.start(name, ["sleep", "infinity"])


@pytest.fixture
def sleepers(tmp_path: Path) -> Iterator[Sleepers]:
    with Sleepers(tmp_path) as found:
        yield found


def test_stopped_peer_is_not_awaited_after_its_link_heals(tmp_path: Path, sleepers: Sleepers) -> None:
    net: Any = SimpleNamespace(network=star(EmulatedLink(), 5, EmulatedLink()), space=lambda host: None)
    peers = [host.name for host in net.network.hosts if host.name != HUB]
    late, killed, frozen, struck, usual = peers
    fleet = BroadcastFleet(net, sleepers, tmp_path, tmp_path, FleetSetup(1, absent=frozenset([late])))
    for peer in (killed, frozen, struck, usual):
        fleet.join(peer)
    for peer in peers:
        fleet.expect(peer, there=False)
    assert fleet.there == []
    fleet.kill(killed)
    fleet.freeze(frozen)
    fleet.freeze(struck)
    fleet.kill(struck)
    for peer in peers:
        fleet.expect(peer, there=True)
    assert fleet.there == [usual]
    assert {name for name, child in sleepers.children.items() if child.expected} == {killed, frozen, struck}
    fleet.thaw(struck)
    fleet.thaw(frozen)
    assert fleet.there == [frozen, usual]
    assert {name for name, child in sleepers.children.items() if child.expected} == {killed, struck}
    fleet.expect(late, there=False)
    fleet.join(late)
    assert late not in fleet.there, "a reachable peer is awaited"
    fleet.expect(late, there=True)
    assert fleet.there == [late, frozen, usual]

"""Records that peers show to a restarted hub: only signed records count, and each unknown record makes the hub continue
above its version.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from p2pcast.artifact.run_key import RunKey
from p2pcast.artifact.signed_records import Durable, Open, run_id
from p2pcast.ground.errors import LocalError
from p2pcast.ground.version import Version
from trainer_node import restart_recovery
from trainer_node.publish.version_numbers import VersionNumbers
from trainer_node.restart_recovery import Recovery, Roster

V = Version
KEY = RunKey(bytes([7]) * 32)
RUN = run_id(KEY.public)
HASH = bytes([1]) * 32


def durable(version: Version, manifest: bytes = HASH, key: RunKey = KEY, run: bytes = RUN) -> bytes:
    return Durable(bytes(16), manifest, run, version).to_signed(key)


def opened(version: Version, key: RunKey = KEY) -> bytes:
    return Open(bytes(16), V(0, 0), "delta", bytes(32), 1024, run_id(key.public), version).to_signed(key)


def no_rewrite(work, name) -> None:
    raise AssertionError(name)


class Kept:
    """A store that holds a chain of versions, each with a hash of its own."""

    run_key = KEY.public

    def __init__(self, *versions: Version, legacy: bool = False) -> None:
        bases = [None, *versions]
        self.artifacts = {
            bytes([n]): SimpleNamespace(
                version=v, base=bases[n], manifest=SimpleNamespace(identity=None if legacy else HASH)
            )
            for n, v in enumerate(versions)
        }

    def newest(self):
        return max((s.version for s in self.artifacts.values()), default=None)

    def identity(self, version):
        return next((s.manifest.identity for s in self.artifacts.values() if s.version == version), None)


@pytest.fixture
def recall(tmp_path: Path):
    def make(store: Kept, *, restarted: bool = True, roster: Roster | None = None):
        numbers = VersionNumbers(tmp_path / "versions.log", "boot")
        unlike: list[tuple[str, Version]] = []
        made = Recovery(
            store,
            numbers,
            roster or Roster(tmp_path / "peers.log", no_rewrite),
            restarted=restarted,
            unlike=lambda *what: unlike.append(what),
        )
        return made, numbers, unlike

    return make


@pytest.mark.parametrize(
    ("shown", "branch"),
    [
        (durable(V(0, 3)), 0),
        (durable(V(0, 3), bytes(32)), 1),
        (durable(V(0, 9)), 1),
        (durable(V(4, 1)), 5),
        (durable(V(0, 1), bytes(32)), 1),
        (durable(V(0, 9), key=RunKey(bytes([8]) * 32)), 0),
        (durable(V(0, 9), run=bytes(16)), 0),
        (b"", 0),
        (durable(V(0, 9))[:-1], 0),
        (opened(V(0, 9)), 0),
    ],
    ids=[
        "known",
        "other bytes",
        "newer",
        "newer branch",
        "old, other bytes",
        "forged",
        "another run",
        "empty",
        "cut",
        "no durable",
    ],
)
def test_a_proved_version_that_the_hub_lacks_opens_a_higher_branch(recall, shown, branch) -> None:
    made, numbers, unlike = recall(Kept(V(0, 1), V(0, 2), V(0, 3)))
    made.learn("aa", "name", [shown], [])
    assert numbers.next(V(0, 3), 10).branch == branch
    assert bool(unlike) == bool(branch)


def test_a_gap_contradicts_unless_retention_made_the_gap(recall) -> None:
    made, numbers, _ = recall(Kept(V(0, 3), V(0, 5), V(0, 7)))
    made.learn("aa", "name", [durable(V(0, 2))], [])
    assert numbers.floor == 0
    made.learn("aa", "name", [durable(V(0, 6))], [])
    assert numbers.floor == 0, "only the first report after joining is looked at"
    made.joined("aa")
    made.learn("aa", "name", [durable(V(0, 6))], [])
    assert numbers.floor == 1


def test_states_of_release_0_1_contradict_nothing(recall) -> None:
    made, numbers, _ = recall(Kept(V(0, 1), V(0, 2), legacy=True))
    made.learn("aa", "name", [durable(V(0, 2))], [])
    assert numbers.floor == 0


def test_numbers_that_were_only_opened_are_skipped_without_a_branch_of_their_own(recall) -> None:
    made, numbers, _ = recall(Kept(V(0, 1), V(0, 2)))
    made.learn("aa", "name", [], [opened(V(0, 3)), opened(V(0, 1)), opened(V(9, 9), RunKey(bytes([8]) * 32))])
    assert numbers.next(V(0, 2), 3) == V(1, 3)
    assert numbers.next(V(0, 2), 4) == V(0, 4)


def test_each_contradicting_version_is_reported_once(recall) -> None:
    made, _, unlike = recall(Kept(V(0, 1)))
    for peer in ("aa", "bb", "aa"):
        made.learn(peer, peer, [durable(V(0, 9))], [])
    assert unlike == [("aa", V(0, 9))]


async def test_versions_open_once_the_peers_of_the_last_process_have_reported(recall, tmp_path: Path) -> None:
    before = Roster(tmp_path / "peers.log", no_rewrite)
    for peer in ("aa", "bb", "cc"):
        before.joined(peer)
    before.left("bb")
    before.close()
    made, _, _ = recall(Kept(V(0, 1)), roster=Roster(tmp_path / "peers.log", no_rewrite))
    waiting = asyncio.ensure_future(made.run(60.0))
    made.joined("aa")
    made.learn("aa", "a", [], [])
    await asyncio.sleep(0)
    assert not made.done.is_set()
    made.learn("cc", "c", [], [])
    await waiting
    assert made.done.is_set()


async def test_where_no_peer_is_known_the_time_runs_out(recall) -> None:
    made, _, _ = recall(Kept(V(0, 1)))
    made.learn("aa", "a", [], [])
    assert not made.done.is_set()
    await made.run(0.001)
    assert made.done.is_set()


def test_a_first_start_waits_for_no_peer(recall) -> None:
    assert recall(Kept(), restarted=False)[0].done.is_set()


async def test_the_roster_is_rewritten_in_a_thread_and_loses_no_change(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(restart_recovery, "MOST_IDLE_RECORDS", 4)
    path, works = tmp_path / "peers.log", []
    roster = Roster(path, lambda work, name: works.append(work))
    for _ in range(3):
        roster.joined("flaps")
        roster.left("flaps")
    roster.joined("stays")
    [work] = works
    roster.joined("comes")
    roster.left("stays")
    assert Roster(path, no_rewrite).peers == {"flaps"}, "changes wait while the file is rewritten"
    await work
    assert Roster(path, no_rewrite).peers == {"comes"}
    assert len(path.read_text().splitlines()) == 3
    roster.joined("later")
    assert Roster(path, no_rewrite).peers == {"comes", "later"}


async def test_a_roster_closed_during_a_rewrite_keeps_its_peers(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(restart_recovery, "MOST_IDLE_RECORDS", 1)
    path, works = tmp_path / "peers.log", []
    roster = Roster(path, lambda work, name: works.append(work))
    for peer in "abcd":
        roster.joined(peer)
        roster.left(peer) if peer == "a" else None
    roster.close()
    roster.left("d")
    for work in works:
        await work
    assert Roster(path, no_rewrite).peers == {"b", "c", "d"}


async def test_a_roster_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch, caplog) -> None:
    works = []
    roster = Roster(tmp_path / "peers.log", lambda work, name: works.append(work))

    def full(*_: object, **__: object) -> None:
        raise LocalError("no space is left")

    monkeypatch.setattr(restart_recovery, "MOST_IDLE_RECORDS", 0)
    roster.joined("a")
    roster.left("a")
    monkeypatch.setattr(roster._log, "rewrite", full)
    roster.joined("b")
    for work in works:
        await work
    monkeypatch.setattr(roster._log, "append", full)
    monkeypatch.setattr(restart_recovery, "MOST_IDLE_RECORDS", 1000)
    roster.joined("c")
    assert caplog.text.count("no space is left") == 2

"""Single rules of the ledger, each on a database of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2pcast.ground.errors import RefusedError, UsageError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.worker_api import Registration
from tests.trainer_node.ledger.crash_run import TASK_HASH, bounded, group, manifest, played, third
from trainer_node.ledger.database.body_segments import Segments
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.ledger import Ledger
from trainer_node.ledger.ledger_rows import BEARER, MAX_NAMES, CapReachedError
from trainer_node.ledger.ledger_states import TABLES, validate

ZERO = Version(0, 0)


class Clock:
    now_s = 1e9


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(tmp_path: Path, clock: Clock) -> Iterator[Ledger]:
    made = Ledger(LedgerStore(tmp_path), bounded(3), now=lambda: clock.now_s, shared_commits=True)
    made.resume(0, 0, None, [])
    made.publish(ZERO, manifest(ZERO))
    made.add_groups([group(1), group(2)])
    yield made
    made.close()


@pytest.fixture
def join(ledger: Ledger) -> Callable[[str], bytes]:
    return lambda name: ledger.register(name, Registration(name, 8, "sums", TASK_HASH)).session


def test_same_result_gets_same_verdict_and_another_is_refused(ledger: Ledger, join: Callable[[str], bytes]) -> None:
    session = join("a")
    leased = ledger.grant(session, 1, ZERO, manifest(ZERO)).leases
    result = played(leased[0], ZERO)
    first = ledger.results(session, [result], third)
    assert first[0].verdict == "accepted"
    assert ledger.results(session, [result], third) == first
    with pytest.raises(RefusedError):
        ledger.results(session, [dataclasses.replace(result, reward=1.0)], third)


def slowly_played(ledger: Ledger, clock: Clock, session: bytes) -> None:
    """A first result, after which heartbeats may prolong leases: it came at a low rate."""
    leased = ledger.grant(session, 1, ZERO, manifest(ZERO)).leases[0]
    clock.now_s += 8
    assert ledger.results(session, [played(leased, ZERO)], third)[0].verdict == "accepted"


def test_worker_cannot_settle_another_workers_lease(ledger: Ledger, clock: Clock, join: Callable[[str], bytes]) -> None:
    mine, others = join("a"), join("b")
    slowly_played(ledger, clock, mine)
    leased = ledger.grant(mine, 1, ZERO, manifest(ZERO)).leases[0]
    result = played(leased, ZERO)
    assert ledger.results(others, [result], third)[0].reason == "unknown lease"
    ledger.give_back(others, [result.lease])
    clock.now_s += 1
    assert ledger.heartbeat(others, {result.lease: 5})[0].state == "unknown"
    held = ledger.heartbeat(mine, {result.lease: 0})[0]
    assert (held.state, held.expires_in_s) == ("held", pytest.approx(leased.expires_in_s - 1))
    assert ledger.results(mine, [result], third)[0].verdict == "accepted"


def test_certificate_has_a_bounded_number_of_workers(ledger: Ledger) -> None:
    for number in range(MAX_NAMES):
        ledger.register("aa", Registration(str(number), 8, "sums", TASK_HASH))
    with pytest.raises(CapReachedError, match="with this certificate"):
        ledger.register("aa", Registration("one more", 8, "sums", TASK_HASH))
    ledger.register("aa", Registration("0", 8, "sums", TASK_HASH))
    ledger.register("bb", Registration("0", 8, "sums", TASK_HASH))
    for number in range(MAX_NAMES + 1):
        ledger.register(BEARER, Registration(str(number), 8, "sums", TASK_HASH))


def test_heartbeat_renews_only_a_lease_whose_tokens_grow(
    ledger: Ledger, clock: Clock, join: Callable[[str], bytes]
) -> None:
    session = join("a")
    slowly_played(ledger, clock, session)
    one, other = ledger.grant(session, 2, ZERO, manifest(ZERO)).leases
    clock.now_s += 1
    states = ledger.heartbeat(session, {one.lease: 5, other.lease: 0})
    assert states[0].expires_in_s == pytest.approx(one.expires_in_s)
    assert states[1].expires_in_s == pytest.approx(other.expires_in_s - 1)
    clock.now_s += 1
    states = ledger.heartbeat(session, {one.lease: 5, other.lease: 1})
    assert states[0].expires_in_s == pytest.approx(one.expires_in_s - 1)
    assert states[1].expires_in_s == pytest.approx(other.expires_in_s)


def test_first_result_of_a_job_counts_though_late(ledger: Ledger, clock: Clock, join: Callable[[str], bytes]) -> None:
    mine, others = join("a"), join("b")
    late = ledger.grant(mine, 1, ZERO, manifest(ZERO)).leases[0]
    clock.now_s += 1000
    again = ledger.grant(others, 1, ZERO, manifest(ZERO)).leases[0]
    assert again.job.job == late.job.job
    assert ledger.results(mine, [played(late, ZERO)], third)[0].verdict == "accepted"
    assert ledger.results(others, [played(again, ZERO)], third)[0].reason == "duplicate"


def test_reward_is_the_ledgers_and_not_the_workers(ledger: Ledger, join: Callable[[str], bytes]) -> None:
    session = join("a")
    leased = ledger.grant(session, 3, ZERO, manifest(ZERO)).leases
    results = [played(one, ZERO) for one in leased]
    ledger.results(session, results, third)
    assert ledger.group(leased[0].job.id).rewards == [float(r.token_ids[-1] % 3) for r in results]


def test_replaced_learner_is_refused(ledger: Ledger) -> None:
    ledger.resume(0, 0, None, [])
    with pytest.raises(RefusedError, match="epoch"):
        ledger.take(1, 0, 0)


def test_second_ledger_on_a_folder_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="another ledger"):
        LedgerStore(tmp_path)


def test_torn_body_is_cut_off(tmp_path: Path) -> None:
    segments = Segments(tmp_path)
    place = segments.append(b"whole")
    segments.sync()
    segments.close()
    path = tmp_path / "0.seg"
    size = path.stat().st_size
    with open(path, "ab") as file:
        file.write(b"\x05\0\0\0torn")
    reopened = Segments(tmp_path)
    assert path.stat().st_size == size
    assert reopened.read(place) == b"whole"


def test_tables_of_states_are_closed() -> None:
    for kind, table in TABLES.items():
        for old, targets in table.items():
            assert targets <= set(table)
            for new in targets:
                validate(kind, old, new)

"""No engine is ready before its weights were audited, and one that differs is filled again."""

from __future__ import annotations

import pytest
from scripted_target import ONE, THREE, TWO, Target

from p2pcast.ground.errors import RefusedError, RetryableError
from p2pcast.ground.version import Version
from rollout_node.engine import runner as module
from rollout_node.installers.installer import Audit
from tests.support.until import until


async def test_an_engine_that_claims_the_version_is_audited_first(owner, run):
    target = Target()
    target.committed, target.ready = ONE, True
    runner = run(target)
    assert (runner.ready, runner.committed) == (False, None)
    owner.move(ONE)
    await until(lambda: runner.ready)
    assert target.done == [("start", None), ("stage", ONE), ("commit", ONE), ("audit", ONE)]


async def test_an_engine_that_fails_its_audit_is_filled_again(owner, run):
    target = Target()
    target.wrong = [f"t{n}" for n in range(5)]
    runner = run(target)
    seen: list[tuple[bool, Version | None]] = []
    target.on_call = lambda what: seen.append((runner.ready, runner.committed))
    owner.move(ONE)
    await until(lambda: runner.ready)
    assert target.done == [("start", None), *[("stage", ONE), ("commit", ONE), ("audit", ONE)] * 2]
    assert set(seen) == {(False, None)}
    assert runner.versions == [ONE]


async def test_an_error_names_the_tensors_that_differ(owner, run, monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 3600.0)
    target = Target()
    target.wrong = [f"t{n}" for n in range(5)]
    runner = run(target)
    owner.move(ONE)
    await until(lambda: runner.error is not None)
    assert "t0, t1, t2 and 2 more" in runner.error
    assert not runner.ready


async def test_a_dense_commit_into_an_engine_in_use_is_audited_a_sparse_one_is_not(owner, run):
    target = Target()
    runner = run(target)
    for version, dense in ((ONE, False), (TWO, True), (THREE, False)):
        target.dense = dense
        owner.move(version)
        await until(lambda v=version: runner.holds(v))
    assert [c for c in target.calls if c[0] == "audit"] == [("audit", ONE), ("audit", TWO)]


async def test_an_audit_that_could_not_be_made_is_made_before_the_engine_is_ready(owner, run):
    target = Target()
    target.faults = [("audit", RetryableError("no answer"))]
    runner = run(target)
    owner.move(ONE)
    await until(lambda: runner.ready)
    assert target.calls.count(("audit", ONE)) == 2


async def test_on_demand_an_engine_is_audited_and_mended(owner, run):
    target = Target()
    runner = run(target)
    with pytest.raises(RefusedError, match="no version is in use"):
        await runner.audit()
    owner.move(ONE)
    await until(lambda: runner.ready)
    owner.manual = True
    owner.move(TWO)
    await until(lambda: runner.staged == TWO)
    found, state = await runner.audit()
    assert (found, state) == (Audit(ONE, [], []), 1)  # the digests of what is in use, though the shadow is further
    assert runner.committed == ONE
    await until(lambda: runner.staged == TWO)
    owner.manual = False
    target.wrong = ["t"]
    assert (await runner.audit())[0].wrong == ["t"]
    assert owner.doubts == 1  # the shadow itself may be wrong
    await until(lambda: runner.holds(TWO))
    assert target.calls.count(("stage", TWO)) == 3  # the staged version may have been lost


async def test_an_engine_that_switched_while_staging_has_no_version_before_its_audit(owner, run, monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 3600.0)
    target = Target()
    runner = run(target)
    owner.move(ONE)
    await until(lambda: runner.ready)
    target.switches_while_staging, target.dense = True, True
    owner.manual = True
    owner.move(TWO)
    await until(lambda: runner.staged == TWO)
    assert (target.committed, runner.committed, runner.ready) == (TWO, None, False)
    with pytest.raises(RefusedError, match="no version is in use"):
        await runner.audit()

    # A commit that fails once and is not needed again takes no engine into use unaudited.
    target.faults = [("commit", RetryableError("no answer"))]
    owner.target = TWO
    runner.wake()
    await until(lambda: runner.error is not None)
    assert (runner.committed, runner.ready) == (None, False)
    runner.wake()
    await until(lambda: runner.ready)
    assert target.done[-2:] == [("commit", TWO), ("audit", TWO)]

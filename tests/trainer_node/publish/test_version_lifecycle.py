"""The steps around the encoding of a version."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from parts import Background, Encoder, emitted, write_checkpoint

from p2pcast.ground import limits
from p2pcast.ground.errors import LocalError
from p2pcast.ground.version import Version
from trainer_node.publish.publish_history import PublishHistory
from trainer_node.publish.version_lifecycle import VersionLifecycle

V = Version


class Parts:
    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.calls: list[Any] = []
        self.recovered, self.near = asyncio.Event(), asyncio.Event()
        self.history = PublishHistory(encoder.folder / "published.log", set)
        self.retains = self._retain
        self.lifecycle = VersionLifecycle(
            encoder.pipeline, self.history, encoder.staging, encoder.sizes, encoder.events, self, encoder.sealer,
            holdings=encoder.node.holdings, recovered=self.recovered, until_caught_up=self.near.wait,
            announce=encoder.announcer.announce, retain=lambda: self.retains(), on_published=(self._published,),
        )  # fmt: skip

    def begin(self, version: Version) -> None:
        self.calls.append(("begin", version))

    def end(self) -> None:
        self.calls.append("end")

    def _published(self) -> None:
        self.calls.append("published")

    async def _retain(self) -> None:
        self.calls.append("retain")


@pytest.fixture
async def parts(encoder: Encoder) -> Parts:
    return Parts(encoder)


async def test_a_version_may_begin_once_the_hub_has_recovered_and_peers_are_near(parts: Parts) -> None:
    waiting = asyncio.ensure_future(parts.lifecycle.until_may_begin())
    await asyncio.sleep(0)
    parts.near.set()
    await asyncio.sleep(0)
    assert not waiting.done()
    parts.recovered.set()
    await waiting


async def test_a_version_that_begins_is_reported_with_its_branch(parts: Parts) -> None:
    await parts.encoder.publish(5)
    parts.lifecycle.begin(V(0, 6))
    parts.lifecycle.begin(V(1, 3))
    assert emitted(parts.encoder.events, "opened") == [{"version": "0.6"}, {"version": "1.3"}]
    assert emitted(parts.encoder.events, "branch") == [{"version": "1.3", "after": "0.5"}]
    assert parts.calls == [("begin", V(0, 6)), ("begin", V(1, 3))]


async def test_a_whole_state_is_announced_and_a_delta_was_announced_before(
    parts: Parts, background: Background
) -> None:
    await parts.lifecycle.finish(await parts.encoder.publish(0))
    assert parts.encoder.announcer.announced == [(V(0, 0), True)]
    assert parts.calls == ["published", "retain"]
    assert '"reserved"' in (parts.encoder.folder / "versions.log").read_text()
    parts.encoder.announcer.announced.clear()
    done = await parts.encoder.publish(1)
    await background.settle()
    parts.encoder.announcer.announced.clear()
    await parts.lifecycle.finish(done)
    assert parts.encoder.announcer.announced == []
    assert parts.lifecycle.published is done
    assert list(parts.encoder.sizes._newest) == [done.bytes]
    assert [e["version"] for e in emitted(parts.encoder.events, "sealed")] == ["0.0", "0.1"]
    assert not parts.lifecycle.failed


async def test_a_base_is_only_the_first_version(parts: Parts, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base")
    await parts.lifecycle.publish_base(None)
    parts.recovered.set()
    await parts.lifecycle.publish_base(base)
    assert parts.lifecycle.published.version == V(0, 0)
    assert parts.encoder.announcer.announced == [(V(0, 0), True)]
    await parts.lifecycle.publish_base(base)
    assert parts.encoder.pipeline.head == V(0, 0)


async def test_base_does_not_follow_versions_that_were_lost(
    parts: Parts, background: Background, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines would go back to the weights of the run's beginning."""
    base = write_checkpoint(tmp_path / "base")
    parts.recovered.set()
    for step in (0, 6):
        await parts.encoder.publish(step)
        await background.settle()
    parts.encoder.pipeline.hub_shadow.close()
    await parts.lifecycle.publish_base(base)
    assert parts.encoder.pipeline.head == V(0, 6)
    assert "is not published: the run has had versions to 0.6" in caplog.text


async def test_base_that_is_not_used_is_named(parts: Parts, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    base = write_checkpoint(tmp_path / "base")
    await parts.encoder.publish(5)
    await parts.lifecycle.publish_base(base)
    assert f"--base {base} is not used: the run is at version 0.5" in caplog.text


async def test_skipped_folders_are_named_once_for_each_reason_and_the_newest_stay(parts: Parts, monkeypatch) -> None:
    monkeypatch.setattr(limits, "MAX_SKIPPED", 2)
    lifecycle = parts.lifecycle
    for name, why in (("step_1", "bad"), ("step_1", "bad"), ("step_2", "bad"), ("step_1", "worse"), ("step_3", "bad")):
        lifecycle.skip(name, why)
    assert lifecycle.skipped == {"step_1": "worse", "step_3": "bad"}
    assert len(emitted(parts.encoder.events, "skipped")) == 4
    lifecycle.unskip("step_3")
    lifecycle.unskip("step_9")
    assert lifecycle.skipped == {"step_1": "worse"}


async def test_a_version_from_ranks_is_remembered_and_clears_failed_steps(parts: Parts) -> None:
    parts.lifecycle.skip("step_8", "a folder")
    parts.lifecycle.fail_from_ranks(7, "a rank is gone")
    assert parts.lifecycle.skipped == {"step_8": "a folder", "step_7 from ranks": "a rank is gone"}
    assert parts.calls == ["end"]
    await parts.lifecycle.finish_from_ranks(await parts.encoder.publish(7))
    assert parts.lifecycle.skipped == {"step_8": "a folder"}
    assert parts.history[7].mark == parts.encoder.pipeline.mark_of(V(0, 7))
    assert parts.history[7].folder is None


async def test_an_error_after_a_version_from_ranks_is_logged(parts: Parts, caplog) -> None:
    async def full() -> None:
        raise LocalError("no space is left")

    parts.retains = full
    await parts.lifecycle.finish_from_ranks(await parts.encoder.publish(7))
    assert "after version 0.7: no space is left" in caplog.text


async def test_overdue_ranks_are_reported(parts: Parts) -> None:
    parts.lifecycle.ranks_overdue("rank 1 of 2", "too late")
    assert emitted(parts.encoder.events, "ranks_overdue") == [{"ranks": "rank 1 of 2", "why": "too late"}]

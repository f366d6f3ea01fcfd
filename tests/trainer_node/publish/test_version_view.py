"""Versions in /status, /wait and the metrics, beside a real store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3
from parts import Background, Encoder

from p2pcast.ground.version import Version
from p2pcast.sparse.budget_schedule import BudgetSchedule
from trainer_node.membership.broadcast_progress import BroadcastProgress
from trainer_node.publish.version_view import VersionView

V = Version


@pytest.fixture
async def view(encoder: Encoder) -> VersionView:
    lifecycle = SimpleNamespace(published=None, skipped={"step_9": "its header is damaged"})
    return VersionView(encoder.pipeline, lifecycle, encoder.store, BroadcastProgress())


async def published(view: VersionView, encoder: Encoder, step: int) -> None:
    view.lifecycle.published = await encoder.publish(step)


def samples(view: VersionView) -> dict[str, float]:
    return {sample.name: sample.value for family in view.families() for sample in family.samples}


async def test_before_the_first_version_there_is_nothing_to_show(view: VersionView) -> None:
    assert view.head is None
    assert view.skipped == {"step_9": "its header is damaged"}
    assert view.status() == {
        "layout_id": None, "digests": {}, "artifacts": [], "last": None, "skipped": {"step_9": "its header is damaged"},
    }  # fmt: skip
    assert view.manifests() == {}
    assert view.published(V(0, 0), None) == (False, {"newest": None})
    assert samples(view) == {}


async def test_every_artifact_in_the_store_is_shown_in_order(view: VersionView, encoder: Encoder) -> None:
    for step in (0, 1, 2):
        await published(view, encoder, step)
    assert view.head == "0.2"
    status = view.status()
    assert [(row["version"], row["base"], row["kind"]) for row in status["artifacts"]] == [
        ("0.0", None, "anchor"), ("0.1", "0.0", "delta"), ("0.2", "0.1", "delta"),
    ]  # fmt: skip
    stored = encoder.store.artifacts.values()
    assert {row["bytes"] for row in status["artifacts"]} == {s.manifest.log for s in stored}
    assert status["digests"] == {str(s.version): f"{s.manifest.state:016x}" for s in stored}
    assert status["layout_id"] == encoder.shadow.shadow.layout.layout_id.hex()


async def test_manifests_and_schedules_take_one_look_at_the_artifacts_each(view: VersionView, encoder: Encoder) -> None:
    """Ledgers ask every half a second, and a hub may keep thousands of versions."""

    class Counted(dict[Any, Any]):
        looks = 0

        def values(self) -> Any:
            self.looks += 1
            return super().values()

    for step in (0, 1, 2):
        await published(view, encoder, step)
    counted = encoder.store.artifacts = Counted(encoder.store.artifacts)
    assert list(view.manifests()) == ["0.0", "0.1", "0.2"]
    assert counted.looks == 1
    view.schedules()
    assert counted.looks == 2


async def test_a_version_is_named_by_the_hash_of_its_manifest(view: VersionView, encoder: Encoder) -> None:
    await published(view, encoder, 0)
    await published(view, encoder, 1)
    assert view.manifests() == {str(v): encoder.store.identity(v).hex() for v in (V(0, 0), V(0, 1))}


async def test_each_version_has_the_schedule_of_its_files(view: VersionView, encoder: Encoder) -> None:
    """An unchanged file is no part of a delta, and still belongs to the version."""
    assert view.schedules() == {}
    one, other = BudgetSchedule((29, 61)).to_bytes(), BudgetSchedule((40, 80)).to_bytes()
    for step, schedule in enumerate((None, one, one, other, None)):
        await encoder.publish(step, schedule=schedule)
    names = {"0.1": blake3(one), "0.2": blake3(one), "0.3": blake3(other)}
    assert view.schedules() == {version: name.hexdigest() for version, name in names.items()}
    assert view.schedules().keys() < view.manifests().keys()


@pytest.mark.parametrize(("asked", "there"), [(V(0, 0), True), (V(0, 1), True), (V(0, 2), False), (V(1, 0), False)])
async def test_a_wait_ends_with_that_version_or_a_newer_one(
    view: VersionView, encoder: Encoder, asked: Version, there: bool
) -> None:
    await published(view, encoder, 0)
    await published(view, encoder, 1)
    assert view.published(asked, None) == (there, {"newest": "0.1"})


async def test_the_last_version_is_shown_with_its_codec_and_its_arrival(
    view: VersionView, encoder: Encoder, background: Background
) -> None:
    await published(view, encoder, 0)
    assert _last(view)["codec"] is None, "a whole state has no codec"
    assert _last(view)["time_to_last_s"] is None
    await published(view, encoder, 1)
    done = view.lifecycle.published
    view.progress.begin(V(0, 1), ["a"], 10.0)
    view.progress.settled({"a": V(0, 1)}, 12.00004)
    last = _last(view)
    assert (last["version"], last["kind"], last["changed"], last["params"]) == ("0.1", "delta", 10, 64 * 65)
    assert (last["codec"], last["codec_why"]) == (done.choice.codec, done.choice.why)
    assert last["time_to_last_s"] == 2.0
    assert samples(view) == {
        "p2pcast_hub_version_step": 1.0,
        "p2pcast_hub_delta_bytes": done.bytes,
        "p2pcast_hub_delta_ratio": done.dense_bytes / done.bytes,
        "p2pcast_hub_encode_seconds": done.encode_s,
        "p2pcast_hub_time_to_last_seconds": pytest.approx(2.00004),
    }


def _last(view: VersionView) -> dict[str, Any]:
    last = view.status()["last"]
    assert last is not None
    return last

"""The hub's status and metrics, from its parts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from blake3 import blake3
from parts import Background, Encoder

from p2pcast.ground.version import Version
from p2pcast.process.background_tasks import Tasks
from p2pcast.sparse.budget_schedule import BudgetSchedule
from topology.hub_uplink import Uplink
from trainer_node.hub_config import HubConfig
from trainer_node.hub_view import HubView
from trainer_node.membership.fleet_timeline import FleetTimeline
from trainer_node.membership.fleet_view import FleetView
from trainer_node.membership.membership import Membership
from trainer_node.publish.version_view import VersionView
from trainer_node.rollout_summary import RolloutSummary


@pytest.fixture
async def hub(encoder: Encoder, tmp_path: Path) -> SimpleNamespace:
    membership, lifecycle = Membership(1, 1e9), SimpleNamespace(published=None, skipped={"step_1": "bad"})
    (tmp_path / "shadow").mkdir(exist_ok=True)
    config = HubConfig(state=tmp_path, shadow=tmp_path / "shadow")
    target = SimpleNamespace(version=Version(0, 1))
    commits = SimpleNamespace(mode="auto", target=target, status=lambda: None, outcomes=Counter(failed=2))
    view = HubView(
        config, Tasks(encoder.events), encoder.events, encoder.node, {},
        SimpleNamespace(token=SimpleNamespace(run=b"run"), evicted={b"b", b"a"}, clock_trouble=lambda: None),
        membership, Uplink(), FleetView(membership, list), FleetTimeline(encoder.events),
        SimpleNamespace(invalid_reports=3), commits,
        VersionView(encoder.pipeline, lifecycle, encoder.store, SimpleNamespace(time_to_last_s=0.5)),
        SimpleNamespace(present="1 of 2"), SimpleNamespace(waiting_for=["b", "a"], not_waited_for={}),
        SimpleNamespace(busy=None, made_bytes=7, gap=lambda: None), None, RolloutSummary(),
    )  # fmt: skip
    return SimpleNamespace(view=view, lifecycle=lifecycle, encoder=encoder)


async def test_status_before_the_first_version(hub: SimpleNamespace) -> None:
    status = hub.view.status()
    assert hub.view.ready() == (False, "no version has been published yet")
    assert (status["version"], status["last"], status["layout_id"]) == (None, None, None)
    assert status["evicted"] == ["61", "62"]
    assert status["target"] == "0.1"
    assert status["uplink"] == {"bps": 10**9, "from": "assumed", "measured_bps": None, "windows": 0}
    assert status["waiting_for"] == ["a", "b"]
    assert status["peers"] == []


async def test_status_names_the_newest_version_and_all_artifacts(hub: SimpleNamespace, background: Background) -> None:
    hub.lifecycle.published = await hub.encoder.publish(0)
    hub.lifecycle.published = await hub.encoder.publish(1)
    status = hub.view.status()
    assert hub.view.ready() == (True, "")
    assert status["version"] == "0.1"
    assert [(a["version"], a["base"], a["kind"]) for a in status["artifacts"]] == [
        ("0.0", None, "anchor"), ("0.1", "0.0", "delta"),
    ]  # fmt: skip
    assert status["last"]["changed"] == 10
    assert status["last"]["time_to_last_s"] == 0.5
    assert status["digests"].keys() == {"0.0", "0.1"}
    waits = hub.view.waits()
    assert waits["published"](Version(0, 1), None) == (True, {"newest": "0.1"})
    assert waits["published"](Version(0, 2), None)[0] is False
    assert waits.keys() == {"live", "staged", "published"}


async def test_ledger_hears_of_versions_with_their_schedules(hub: SimpleNamespace, background: Background) -> None:
    schedule = BudgetSchedule((29,)).to_bytes()
    await hub.encoder.publish(0)
    await hub.encoder.publish(1, schedule=schedule)
    found = hub.view.weights()
    assert found["manifests"].keys() == {"0.0", "0.1"}
    assert found["schedules"] == {"0.1": blake3(schedule).hexdigest()}


async def test_metrics_cover_all_parts(hub: SimpleNamespace) -> None:
    hub.lifecycle.published = await hub.encoder.publish(0)
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in hub.view.families()
        for sample in family.samples
    }
    assert values["p2pcast_hub_odd_reports_total",] == 3
    assert values["p2pcast_hub_skipped_folders",] == 1
    assert values["p2pcast_hub_kept_bytes_total",] == 7
    assert values["p2pcast_hub_barrier_outcomes_total", "failed"] == 2
    assert values["p2pcast_hub_version_step",] == 0
    assert values["p2pcast_hub_peers",] == 0

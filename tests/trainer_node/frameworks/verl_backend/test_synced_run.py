"""Weights from verl's real FSDP2 actors to verl's real rollout workers, by a real hub and a real peer for each."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path

import pytest

from netem.fleet.processes import Processes
from tests.trainer_node.frameworks.verl_backend.two_machines import Document, Stage


def assert_exact(syncs: list[Document]) -> None:
    """Both engines hold the actors' weights after each sync, and each sync changed them."""
    for sync in syncs:
        sent = sync["sent"]
        assert sent["lm_head.weight"] == sent["model.embed_tokens.weight"]
        for digests, steps in sync["received"]:
            assert digests == sent, f"step {sync['step']}"
            assert steps[-1] == sync["step"]
    changed = [earlier["sent"] != later["sent"] for earlier, later in itertools.pairwise(syncs)]
    assert all(changed)


def test_rollout_workers_hold_the_actors_weights_after_each_sync(places: tuple[Path, Path, Processes]) -> None:
    report = Stage(*places).run(["staging", "plain", "staging"])
    syncs = report["syncs"]
    assert_exact(syncs)
    versions = [f"{sync['figures']['p2pcast/branch']}.{sync['figures']['p2pcast/step']}" for sync in syncs]
    assert versions == ["1.0", "1.1", "1.2"]
    # verl's own manager pauses first; the adapter's pauses once the version is at every machine.
    assert [set(sync["staged_at_pause"]) for sync in syncs] == [{"1.0"}, {"1.0"}, {"1.2"}]
    assert syncs[-1]["figures"]["p2pcast/lag_steps"] == 2
    refusals = report["refusals"]
    assert refusals.pop("none") == ""
    assert "has not staged version 1.3 or a newer one within 1 s" in refusals.pop("never")
    assert "has staged version 1.2, and this sync needs version of step 3" in refusals.pop("wrong step")
    assert "has staged version 1.2, and this sync needs version 1.1" in refusals.pop("newer")
    assert "no daemon runs on the state folder /nowhere" in refusals.pop("no peer")
    assert "names a variable that this machine's worker does not have" in refusals.pop("no variable")
    assert "engine_kwargs.p2pcast.hub is missing or no text" in refusals.pop("no hub")
    assert refusals == {}


@pytest.mark.prove
def test_twenty_syncs_are_exact_and_hold_no_second_model(places: tuple[Path, Path, Processes]) -> None:
    stage = Stage(*places, hidden=520, layers=24, vocabulary=8009)
    report = stage.run(["staging", "plain"] * 10, naive=20)
    syncs = report["syncs"]
    assert_exact(syncs)
    later = syncs[2:]
    # Every rank gathers the same tensors, one by one; rank 0 publishes them, too.
    publisher, other = (statistics.median(sync["growth"][rank] for sync in later) for rank in (0, 1))
    figures = {
        "model_bytes": stage.bytes,
        "growth_in_a_sync": [publisher / stage.bytes, other / stage.bytes],
        "resident_beyond_rank_1": (report["resident"][0] - report["resident"][1]) / stage.bytes,
        "naive_s": statistics.median(report["naive_s"]),
    }
    for manager in ("staging", "plain"):
        for key in ("sync_s", "pause_s"):
            figures[f"{manager}_{key}"] = statistics.median(sync[key] for sync in later if sync["manager"] == manager)
    print(json.dumps(figures))
    assert publisher - other < stage.bytes / 2


@pytest.mark.prove
@pytest.mark.parametrize("side", ["actor", "rollout"])
def test_a_death_in_a_sync_leaves_no_half_installed_weights(places: tuple[Path, Path, Processes], side: str) -> None:
    report = Stage(*places).run(["staging"] * 2, kill=side)
    assert_exact(report["syncs"])
    killed = report["killed"]
    assert "died" in killed["error"] or "Connection" in killed["error"], killed["error"]
    if side == "actor":
        # The version never became whole: generation was not even paused.
        assert killed["calls"] == [[], []]
        assert killed["after"] == killed["before"]
    else:
        # The other worker has the old or the new version, whole, and no replica was resumed.
        assert killed["calls"] == [["abort"], ["abort"]]
        assert killed["after"][0] in (killed["before"][0], killed["sent"])
    again = report["again"]
    for sync in again:
        assert all(digests == sync["sent"] for digests, _ in sync["received"])
    assert again[0]["figures"]["p2pcast/branch"] > report["syncs"][-1]["figures"]["p2pcast/branch"]

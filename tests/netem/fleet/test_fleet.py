"""A hub and a peer on an emulated network, and the computed rows of experiments with them."""

from __future__ import annotations

from itertools import islice

import pytest

from netem.emulation.description import EmulatedLink, star
from netem.emulation.namespaces import namespaces
from netem.fleet.fleet import emulated_fleet
from netem.fleet.saved_weights import nbytes, noise
from netem.lab.experiments.history import Parameters
from netem.lab.experiments.sync import COLD, FAST, SLOW, SyncPath, at_scale, row
from netem.lab.experiments.sync import Parameters as Paths
from p2pcast.codec.codec_prediction import Cost
from p2pcast.ground.errors import IntegrityError, UsageError


def test_words_are_new_in_every_version_and_the_same_in_every_run() -> None:
    first, second = islice(noise(600_000), 2)
    assert nbytes(first) == 600_000
    assert all((first[name][2] != second[name][2]).mean() > 0.99 for name in first)
    assert all((words == first[name][2]).all() for name, (_, _, words) in next(noise(600_000)).items())


def test_paths_at_the_papers_scale() -> None:
    paths = [
        SyncPath(COLD, 40e6, 1, 180_000_000, 38.0, 38.2),
        SyncPath(FAST, 40e6, 1, 800_000, 0.3, 0.4),
        SyncPath(SLOW, 40e6, 10, 187_200_000, 39.6, 41.0),
    ]
    grown = {path.name: path for path in at_scale(paths, 180_000_000, Cost(3e9, 3e9, 0.0), Paths())}
    assert grown[COLD].bytes == 14_000_000_000
    assert grown[COLD].ready_s == pytest.approx(280 * 38 / 36)
    assert grown[FAST].bytes == pytest.approx(62.2e6, rel=0.01)
    assert 1.2 < grown[FAST].ready_s < 2.0
    assert grown[SLOW].ready_s > grown[SLOW].received_s
    made = row(grown[FAST], 14_000_000_000, simulated=True)
    assert made["simulated"]
    assert made["ready_to_whole"] < 0.0139


def test_join_points_must_lie_within_the_run() -> None:
    Parameters().check()
    with pytest.raises(UsageError, match="201"):
        Parameters(points=(201,)).check()


@pytest.mark.root
def test_version_reaches_a_peer_that_leaves_and_returns() -> None:
    versions = noise(1 << 20)
    with namespaces(star(EmulatedLink(), 1, EmulatedLink(100e6, 100e6))) as net, emulated_fleet(net) as run:
        run.save(next(versions))
        run.hub(run.trained)
        run.until_joinable()
        run.peer("p1")
        run.live(["p1"])
        run.save(next(versions))
        line = run.timeline(["p1"])
        assert line.version == "0.1"
        assert line.bytes >= 1 << 20
        assert 0 < line.received_s["p1"] <= line.staged_s["p1"] <= line.committed_s["p1"]
        run.leave("p1")
        run.save(next(versions))
        run.wait_for("hub", "sealed", version=run.version)
        run.peer("p1")
        run.live(["p1"])
        run.exact("p1")
        (run.trained / "step_2" / "model.safetensors").write_bytes(
            (run.trained / "step_1" / "model.safetensors").read_bytes()
        )
        with pytest.raises(IntegrityError, match=r"p1/step_2: installed weights differ"):
            run.exact("p1")
        assert run.twice(["p1"]) == 0
        folder = run.folder
    assert not folder.exists()

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import matplotlib as mpl
import pytest

from p2pcast.ground.errors import LocalError
from p2pcast.inspection import png_figure
from tests.trainer_node.learning import run_events as events
from trainer_node.learning.monitoring.run_plot import AVERAGE_STEPS, plot_run
from trainer_node.learning.monitoring.run_record import RunRecord

PANELS = 6
Drawn = Callable[[RunRecord], list[Any]]


def size_of(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])  # type: ignore[return-value]


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """Panels as matplotlib's axes, before they become a PNG."""

    def draw(record: RunRecord) -> list[Any]:
        found: list[Any] = []
        monkeypatch.setattr(png_figure, "save", lambda figure, _: found.append(figure))
        plot_run(record, tmp_path / "unused.png")
        return list(found[0].axes[:PANELS])

    return draw


def labels(axis: Any) -> list[str]:
    return list(axis.get_legend_handles_labels()[1])


def line(axis: Any, label: str) -> tuple[list[float], list[float]]:
    found = next(each for each in axis.lines if each.get_label() == label)
    return list(found.get_xdata()), list(found.get_ydata())


@pytest.mark.parametrize(
    "documents",
    [
        [],
        [events.start()],
        [events.start(), events.step(1)],
        [{"event": "step", "step": 1}],
        [{"event": "step", "step": 1, "kl_sampler": 0.0, "wait_s": 0.0, "train_s": 0.0}],
        [events.publish(3, live_s=None)],
        [events.probe(1, kl=0.0), events.probe(2, engine="$x$ \N{SNOWMAN}")],
        events.resumed_run(),
    ],
    ids=["empty", "start", "one step", "no numbers", "zeros", "late", "names", "resumed"],
)
def test_every_run_gives_a_picture_of_one_size(tmp_path: Path, documents: list[events.Document]):
    path = tmp_path / "run.png"
    plot_run(events.record_of(documents), path)
    assert size_of(path) == (1600, 1000)
    assert [each.name for each in tmp_path.iterdir()] == ["run.png"]


def test_panels_without_numbers_say_so(drawn: Drawn):
    def silent(documents: list[events.Document]) -> list[str]:
        axes = drawn(events.record_of(documents))
        return [axis.get_title(loc="left") for axis in axes if "no data" in [text.get_text() for text in axis.texts]]

    every = silent([])
    assert len(every) == PANELS
    assert silent([events.step(1)]) == every[4:]
    assert silent([events.publish(1)]) == every[:4]
    assert silent([events.probe(1)]) == [every[0], every[1], *every[3:]]
    assert silent([events.evaluation(1)]) == every[1:]
    assert silent(events.resumed_run()) == []


def test_panels_show_the_recorded_numbers(drawn: Drawn):
    record = events.record_of(events.resumed_run())
    reward, staleness, kl, time, wire, density = drawn(record)
    steps = list(range(1, 41))
    rewards = [step.reward or 0.0 for step in record.steps]
    assert line(reward, "all groups played") == (steps, rewards)
    means = [sum(rewards[max(0, i - 9) : i + 1]) / min(i + 1, 10) for i in range(40)]
    assert line(reward, f"mean of {AVERAGE_STEPS} steps")[1] == pytest.approx(means)
    assert line(reward, "held out, greedy") == ([10, 20, 30, 40], [0.4] * 4)
    assert line(reward, "superseded")[0] == list(range(21, 28))
    assert line(staleness, "oldest") == (steps, [3] * 40)
    assert line(staleness, "mean")[1] == pytest.approx([record.steps[0].staleness_mean] * 40)
    assert line(kl, "rollouts")[1] == [step.kl_sampler for step in record.steps]
    assert line(kl, "10 x floor")[1] == pytest.approx([1e-5] * 20)
    assert kl.get_yscale() == "log"
    assert {"training", "waiting", "bubble (right)"} == set(labels(time))
    assert line(wire, "size")[1] == [383.0] * 20
    assert wire.get_ylabel() == "kB a version"
    assert line(density, "changed since the version before")[1] == [26.0] * 20


def test_alarms_and_late_versions_are_marked(drawn: Drawn):
    record = events.record_of([events.probe(1), events.probe(2, kl=1e-3), events.publish(2, live_s=None)])
    axes = drawn(record)
    assert line(axes[2], "alarm") == ([2], [1e-3])
    assert line(axes[4], "not live in time")[0] == [2]


def test_a_kl_of_zero_is_in_the_picture(drawn: Drawn):
    axis = drawn(events.record_of([events.step(1, kl_sampler=0.0), events.step(2, kl_sampler=1e-4)]))[2]
    assert axis.get_yscale() == "symlog"
    assert axis.get_ylim()[0] == 0


def test_further_engines_stay_out_of_the_legend(drawn: Drawn):
    record = events.record_of([events.probe(1, f"engine-{i:02}") for i in range(20)])
    assert labels(drawn(record)[2]) == [*(f"probe engine-{i:02}" for i in range(6)), "10 x floor"]


def test_long_names_keep_their_end(drawn: Drawn):
    record = events.record_of([events.probe(1, f"engine-in-frankfurt-{i}") for i in range(2)])
    assert labels(drawn(record)[2])[:2] == ["probe …-in-frankfurt-0", "probe …-in-frankfurt-1"]


def test_a_missing_step_leaves_a_gap_in_the_times(drawn: Drawn):
    documents = [events.step(number, wait_s=1.0, train_s=2.0) for number in (1, 2, 5)]
    waiting, training = (patch.get_data() for patch in drawn(events.record_of(documents))[3].patches)
    assert list(waiting.edges) == list(training.edges) == [0.5, 1.5, 1.5, 2.5, 4.5, 5.5]
    assert list(waiting.values) == [3, 0, 3, 0, 3]
    assert list(training.values) == [2, 0, 2, 0, 2]


@pytest.mark.parametrize("seed", range(3))
def test_runs_with_missing_and_extreme_numbers_are_drawn(seed: int, tmp_path: Path):
    draw = Random(seed)
    extremes = [None, 0.0, -1.0, 5e-324, 1e-300, 1e30, -1e30, 1e308, -1e308, 2**53]
    documents = [events.start(), *events.stretch(1, 12)]
    for document in documents:
        for key in sorted(set(document) - {"event", "step", "version", "engine", "staleness", "tags"}):
            if draw.random() < 0.25:
                document[key] = draw.choice(extremes)
    plot_run(events.record_of(documents), tmp_path / "run.png")
    assert size_of(tmp_path / "run.png") == (1600, 1000)


def test_equal_runs_give_equal_pictures_under_any_style_of_the_user(tmp_path: Path):
    record = events.record_of(events.stretch(1, 4))
    plot_run(record, tmp_path / "light.png")
    with mpl.rc_context({"figure.facecolor": "black", "axes.facecolor": "black", "font.size": 30, "text.color": "w"}):
        plot_run(record, tmp_path / "dark.png")
    assert (tmp_path / "light.png").read_bytes() == (tmp_path / "dark.png").read_bytes()


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LocalError, match=r"pip install 'p2pcast\[lab\]'"):
        plot_run(RunRecord(), tmp_path / "run.png")
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path):
    with pytest.raises(LocalError, match=r"cannot write .*run\.png"):
        plot_run(RunRecord(), tmp_path / "missing" / "run.png")


def test_entropy_is_beside_the_divergences(drawn: Drawn):
    assert "entropy (right)" in labels(drawn(events.record_of(events.resumed_run()))[2])
    assert "entropy (right)" not in labels(drawn(events.record_of([events.step(1, entropy=None)]))[2])

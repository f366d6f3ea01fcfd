"""A training run as one picture: six panels over the learner's steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from p2pcast.inspection import png_figure
from trainer_node.learning.monitoring.run_record import ALARM_FACTOR, Number, Probe, RunRecord

INCHES, DPI = (16.0, 10.0), 100
AVERAGE_STEPS: Final = 10
"""Least number of steps in a moving average; long runs take a fiftieth of their steps."""
MOST: Final = 1e15
"""Greater numbers, of a run that diverged, are drawn at this height: matplotlib's scales would overflow."""
LEAST: Final = 1e-15
"""Smaller numbers count as zero, for the same reason."""
SHORT_LABEL: Final = 20
"""Longest label in characters of which three fit beside each other."""
FEW: Final = 30
"""Most points of a line that has dots."""
MANY: Final = 300
"""Most points before lines become thin and dots small."""
_BLUE, _ORANGE, _GREEN, _RED, _GREY, _PALE = "#1f5fa8", "#d9730d", "#2e8b57", "#c0262d", "#6b7280", "#9cc3ec"
_ENGINES: Final = ("#2e8b57", "#7b4fb3", "#00838f", "#a0522d", "#5c6bc0", "#ad1457")
"""Colours of the first engines; further ones are grey, and not in the legend."""
_INK: Final = "#1f2937"
_STYLE: Final = {
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "axes.facecolor": "#fbfbfc",
    "axes.edgecolor": "#c5cad3",
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 11,
    "text.color": _INK,
    "text.usetex": False,
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "grid.color": "#e3e6eb",
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.fontsize": 9,
}
Points = tuple[NDArray[np.float64], NDArray[np.float64]]


def plot_run(record: RunRecord, png_path: Path) -> None:
    """Write a PNG of 1600 x 1000 pixels, atomically. A panel without numbers says ``no data``.

    Raises LocalError: matplotlib is missing, or the file cannot be written.
    """
    png_figure.require_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # Colours and sizes do not depend on the user's own matplotlibrc.
    with mpl.rc_context(_STYLE):
        figure: Any = Figure(INCHES, dpi=DPI, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
        figure.suptitle(png_figure.plain(_heading(record)), x=0.01, ha="left", fontsize=14)
        limits = _step_limits(record)
        for axis, (title, draw) in zip(figure.subplots(2, 3).flat, _PANELS.items(), strict=True):
            axis.set_xlabel("step")
            axis.set_xlim(*limits)
            axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
            draw(axis, record)
            _, labels = axis.get_legend_handles_labels()
            _title(axis, title, labels)
            for resume in record.resumes if labels else ():
                axis.axvline(resume.step + 0.5, color=_GREY, linewidth=0.9, linestyle=(0, (2, 3)), zorder=1)
        png_figure.save(figure, png_path)


def _heading(record: RunRecord) -> str:
    if not record.starts and not record.steps:
        return "Training run without events"
    parts = [record.starts[-1].model] if record.starts and record.starts[-1].model else []
    parts.append(f"step {record.steps[-1].step}" if record.steps else "no step yet")
    parts += [f"{len(record.publications)} published"] if record.publications else []
    if count := len(record.resumes):
        parts.append(f"resumed {'once' if count == 1 else f'{count} times'} (dotted lines)")
    parts += [f"{len(record.superseded_steps)} superseded (crosses)"] if record.superseded_steps else []
    parts += [record.end.reason] if record.end and record.end.reason else []
    return "   ·   ".join(parts)


def _step_limits(record: RunRecord) -> tuple[float, float]:
    drawn = (record.steps, record.publications, record.evaluations, record.probes, record.superseded_steps)
    steps = [event.step for events in drawn for event in events]
    first, last = min(steps, default=0), max(steps, default=1)
    margin = max(0.5, 0.02 * (last - first))
    return first - margin, last + margin


def _title(axis: Any, title: str, labels: list[str]) -> None:
    """Title, and between title and panel the legend, which thus covers no data."""
    if labels:
        columns = 3 if max(map(len, labels)) <= SHORT_LABEL else 2
        rows = -(-len(labels) // columns)
        place = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "borderaxespad": 0.1, "frameon": False}
        legend = axis.legend(ncols=columns, columnspacing=1.0, handlelength=1.5, handletextpad=0.5, **place)
        # A wide legend may reach beyond its panel; the layout would make the panel narrow instead.
        legend.set_in_layout(False)
        axis.set_title(title, pad=10 + 15 * rows)
    else:
        axis.set_title(title)
        axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center", va="center", color=_GREY, fontsize=13)
        axis.set_yticks([])
        axis.grid(visible=False)


# -- panels: each draws the data there is, under labels for the legend


def _reward(axis: Any, record: RunRecord) -> None:
    played = _points(record.steps, lambda event: event.reward)
    _draw(axis, _points(record.superseded_steps, lambda event: event.reward), "superseded", "x", _GREY, 4)
    _draw(axis, played, "all groups played", "o", _PALE, _dots(played))
    _draw(axis, _moving_average(played), f"mean of {_window(played)} steps", "-", _BLUE, linewidth=1.6)
    _draw(axis, _points(record.evaluations, lambda event: event.reward), "held out, greedy", "D-", _ORANGE, 6)
    axis.set_ylabel("mean reward")


def _staleness(axis: Any, record: RunRecord) -> None:
    most = _points(record.steps, lambda event: event.staleness_max)
    mean = _points(record.steps, lambda event: event.staleness_mean)
    flight = _moving_average(_points(record.steps, lambda event: event.staleness_in_flight))
    queue = _moving_average(_points(record.steps, lambda event: event.staleness_in_queue))
    _draw(axis, most, "oldest", "o", _ORANGE, _dots(most))
    _draw(axis, mean, "mean", "-", _PALE)
    _draw(axis, _moving_average(mean), f"mean of {_window(mean)} steps", "-", _BLUE, linewidth=1.6)
    _draw(axis, flight, "in flight (mean)", "--", _GREEN)
    _draw(axis, queue, "in queue (mean)", ":", _INK)
    axis.set_ylabel("steps behind the learner")
    _from_zero(axis, most, mean, flight, queue)


def _kl(axis: Any, record: RunRecord) -> None:
    drawn = [_draw(axis, _points(record.steps, lambda event: event.kl_sampler), "rollouts", "-", _BLUE)]
    drawn += [_draw(axis, _points(record.steps, lambda event: event.kl_same_version), "newest version", "-", _PALE)]
    engines: dict[str, list[Probe]] = {}
    for probe in record.probes:
        engines.setdefault(probe.engine, []).append(probe)
    for at, (engine, probes) in enumerate(engines.items()):
        # Names of one fleet differ at their end.
        name = engine if len(engine) <= 16 else f"…{engine[-15:]}"
        label = f"probe {png_figure.plain(name)}" if at < len(_ENGINES) else "_"
        colour = _ENGINES[at] if at < len(_ENGINES) else _GREY
        drawn.append(_draw(axis, _points(probes, lambda event: event.kl), label, ".", colour, 6))
    for at, probes in enumerate(engines.values()):
        steps, floors = _points(probes, lambda event: event.floor)
        label = "_" if at else f"{ALARM_FACTOR:.0f} x floor"
        drawn.append(_draw(axis, (steps, ALARM_FACTOR * floors), label, "--", _RED))
    alarms = _points([probe for probe in record.probes if probe.alarm], lambda event: event.kl)
    _draw(axis, alarms, "alarm", "o", _RED, 11, fillstyle="none")
    axis.set_ylabel("KL in nats a token")
    _logarithmic(axis, *drawn)
    entropy = _points(record.steps, lambda event: event.entropy)
    if len(entropy[1]):
        right = _right(axis, "entropy in nats a token")
        _draw(right, entropy, "entropy (right)", "-", _ORANGE)
        _from_zero(right, entropy)
        axis.plot([], [], color=_ORANGE, label="entropy (right)")


def _time(axis: Any, record: RunRecord) -> None:
    steps = np.array([event.step for event in record.steps], float)
    waited = np.clip(np.array([event.wait_s or 0.0 for event in record.steps]), 0, MOST)
    both = waited + np.clip(np.array([event.train_s or 0.0 for event in record.steps]), 0, MOST)
    if (both > LEAST).any():
        edges = np.column_stack((steps - 0.5, steps + 0.5)).ravel()
        # One area under another: a bar for each step would take seconds to draw. Zeros are for missing steps.
        for values, colour, label in ((both, "#e8a56a", "waiting"), (both - waited, _PALE, "training")):
            heights = np.column_stack((values, np.zeros(len(values)))).ravel()[:-1]
            axis.stairs(heights, edges, fill=True, color=colour, label=label)
        # One long pause would flatten everything else.
        usual = float(np.percentile(both[both > LEAST], 98))
        axis.set_ylim(0, min(1.1 * float(both.max()), 2 * usual))
    axis.set_ylabel("seconds a step")
    bubble = _points(record.steps, lambda event: event.bubble)
    if len(bubble[1]):
        right = _right(axis, "bubble: share of time spent waiting")
        _draw(right, bubble, "bubble (right)", "-", _BLUE)
        right.set_ylim(0, 1)
        axis.plot([], [], color=_BLUE, label="bubble (right)")


def _bytes(axis: Any, record: RunRecord) -> None:
    steps, sizes = _points(record.publications, lambda event: event.bytes)
    unit, name = _byte_unit(sizes)
    drawn = _draw(axis, (steps, sizes / unit), "size", "o-", _BLUE, _dots((steps, sizes)), linewidth=0.8)
    axis.set_ylabel(f"{name} a version")
    _from_zero(axis, drawn)
    live = _points(record.publications, lambda event: event.live_s)
    if len(live[1]):
        right = _right(axis, "seconds until live")
        _draw(right, live, "time to live (right)", ".-", _ORANGE, 6, linewidth=0.8)
        _from_zero(right, live, room=1.5)
        axis.plot([], [], ".-", color=_ORANGE, label="time to live (right)")
    late = np.array([event.step for event in record.publications if event.live_s is None], float)
    # Such a version has no time, so its mark is at the panel's upper edge.
    edge = (late, np.full(len(late), 0.98))
    _draw(axis, edge, "not live in time", "v", _RED, 6, transform=axis.get_xaxis_transform())


def _density(axis: Any, record: RunRecord) -> None:
    percent = _points(record.publications, lambda event: None if event.density is None else 100 * event.density)
    _draw(axis, percent, "changed since the version before", "o-", _BLUE, _dots(percent), linewidth=0.8)
    axis.set_ylabel("percent of all weights")
    positive = percent[1][percent[1] > 0]
    if len(positive) and positive.max() > 30 * positive.min():
        _logarithmic(axis, percent)
    else:
        _from_zero(axis, percent)


_PANELS: Final[dict[str, Callable[[Any, RunRecord], None]]] = {
    "Reward": _reward,
    "Staleness of trained rollouts": _staleness,
    "Sampler against learner, and entropy": _kl,
    "Time of a step": _time,
    "Versions on the wire": _bytes,
    "Weights changed by a version": _density,
}


# -- points and axes


def _points(events: Sequence[Any], value: Callable[[Any], Number]) -> Points:
    """(steps, values) of the events that have the value, by step."""
    found = sorted((event.step, number) for event in events if (number := value(event)) is not None)
    pairs = np.array(found, float).reshape(-1, 2)
    values = np.clip(pairs[:, 1], -MOST, MOST)
    return pairs[:, 0], np.where(np.abs(values) < LEAST, 0, values)


def _moving_average(points: Points) -> Points:
    """Each point's mean with the points before; the first ones have fewer."""
    steps, values = points
    sums = np.concatenate(([0.0], np.cumsum(values)))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(0, ends - _window(points))
    return steps, (sums[ends] - sums[begins]) / (ends - begins)


def _window(points: Points) -> int:
    return max(AVERAGE_STEPS, len(points[1]) // 50)


def _draw(axis: Any, points: Points, label: str, form: str, colour: str, dots: float = 5, **style: Any) -> Points:
    """Draw the points and return them. Lines of few points get dots: one point alone has no line."""
    if len(points[1]):
        count = len(points[1])
        if form in ("-", "--", ":"):
            style = ({"marker": "."} if count <= FEW else {"linewidth": 1.6 if count <= MANY else 0.8}) | style
        axis.plot(*points, form, color=colour, label=label, markersize=dots, **style)
    return points


def _right(axis: Any, label: str) -> Any:
    right = axis.twinx()
    right.set_ylabel(label)
    right.grid(visible=False)
    return right


def _from_zero(axis: Any, *drawn: Points, room: float = 1.1) -> None:
    """``room``: height of the panel by the greatest value; it differs between the axes of one panel."""
    most = max((float(values.max()) for _, values in drawn if len(values)), default=0.0)
    axis.set_ylim(0, room * most if most > 0 else 1)


def _logarithmic(axis: Any, *drawn: Points) -> None:
    """A zero is drawn at the lower edge, where the scale is linear."""
    values = np.concatenate([values for _, values in drawn])
    positive = values[values > 0]
    if len(positive) and len(positive) < len(values):
        axis.set_yscale("symlog", linthresh=float(positive.min()))
        axis.set_ylim(bottom=0)
    elif len(positive):
        axis.set_yscale("log")


def _dots(points: Points) -> float:
    return 4.5 if len(points[1]) <= MANY else 2.5


def _byte_unit(sizes: NDArray[np.float64]) -> tuple[float, str]:
    most = float(sizes.max()) if len(sizes) else 0.0
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next(((unit, name) for unit, name in units if most >= unit), (1.0, "bytes"))

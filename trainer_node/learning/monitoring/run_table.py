"""A training run as text: a table of the newest steps for a live screen, and one plain line for each event."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from trainer_node.learning.monitoring.run_record import (
    BudgetEvent,
    CheckpointEvent,
    EndEvent,
    Evaluation,
    Event,
    Number,
    Probe,
    Publication,
    RunRecord,
    StartEvent,
    StepEvent,
)

ROWS: Final = 8
"""Steps in the table."""
SPARKS: Final = 40
"""Steps in the sparkline."""
MOST_ENGINES: Final = 4
"""Engines whose probes are shown; alarms come first."""
MOST_TAGS: Final = 6
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_GAP: Final = 3
"""Characters between two columns of the table."""


@dataclass(frozen=True, slots=True)
class Column:
    """``rank``: on a narrow screen, columns with a high rank are left out first."""

    name: str
    rank: int
    cell: Callable[[StepEvent], str]


COLUMNS: Final = (
    Column("step", 0, lambda at: str(at.step)),
    Column("reward", 0, lambda at: fixed(at.reward)),
    Column("stale", 1, lambda at: _pair(at.staleness_mean, at.staleness_max)),
    Column("KL", 2, lambda at: scientific(at.kl_sampler)),
    Column("ratio", 3, lambda at: fixed(at.ratio_mean)),
    Column("max", 7, lambda at: fixed(at.ratio_max, 2)),
    Column("clipped", 6, lambda at: percent(at.clip_share)),
    Column("effective", 9, lambda at: percent(at.effective_sample_share)),
    Column("loss", 10, lambda at: scientific(at.loss)),
    Column("gradient", 8, lambda at: scientific(at.grad_norm)),
    Column("entropy", 6, lambda at: fixed(at.entropy)),
    Column("bubble", 4, lambda at: percent(at.bubble)),
    Column("waited", 7, lambda at: seconds(at.wait_s)),
    Column("trained", 7, lambda at: seconds(at.train_s)),
    Column("tokens/s", 5, lambda at: short(at.tokens_per_s)),
)


def run_picture(record: RunRecord, *, width: int, rows: int = ROWS, doing: str = "") -> Group:
    """The live screen, ``width`` characters wide."""
    return Group(steps_table(record.steps[-rows:], width), *map(_line, summary_lines(record, doing)))


def steps_table(steps: Sequence[StepEvent], width: int) -> Table:
    """One row a step, with the columns that fit into ``width``."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1), pad_edge=False)
    for column in _fitting(steps, width):
        table.add_column(column.name, justify="right", no_wrap=True)
    for step in steps:
        table.add_row(*(column.cell(step) for column in _fitting(steps, width)))
    return table


def _fitting(steps: Sequence[StepEvent], width: int) -> list[Column]:
    widths = {
        column.name: max([len(column.name), *(len(column.cell(step)) for step in steps)]) + _GAP for column in COLUMNS
    }
    chosen: set[str] = set()
    left = width + _GAP
    for column in sorted(COLUMNS, key=lambda column: column.rank):
        if widths[column.name] > left:
            break
        left -= widths[column.name]
        chosen.add(column.name)
    return [column for column in COLUMNS if column.name in chosen]


def summary_lines(record: RunRecord, doing: str = "") -> list[str]:
    """The lines below the table; an alarm's line begins with ``ALARM``."""
    newest_version = _publication(record.publications[-1]) if record.publications else "-"
    lines = [f"reward      {_rewards(record.steps)}", f"version     {newest_version}"]
    if record.evaluations:
        lines.append(f"evaluation  {_evaluation(record.evaluations[-1])}")
    newest = {probe.engine: probe for probe in record.probes}
    shown = sorted(newest.values(), key=lambda probe: not probe.alarm)
    lines += [f"{'ALARM' if probe.alarm else 'probe':12}{_probe(probe)}" for probe in shown[:MOST_ENGINES]]
    if len(shown) > MOST_ENGINES:
        lines.append(f"{'':12}and {len(shown) - MOST_ENGINES} engines more")
    if record.budgets:
        lines.append(f"budget      {_budget(record.budgets[-1])}")
    if record.checkpoints:
        lines.append(f"checkpoint  {_checkpoint(record.checkpoints[-1])}")
    if record.resumes:
        lines.append(
            f"resumed     {_times(len(record.resumes))}, last at step {record.resumes[-1].step}; "
            f"{len(record.superseded_steps)} steps superseded"
        )
    if record.end is not None:
        lines.append(f"end         {_end(record.end)}")
    elif doing:
        lines.append(f"now         {doing}")
    return lines


def event_line(event: Event) -> str:
    """One event on one line, for output that is no terminal."""
    match event:
        case StepEvent():
            said = [f"reward {fixed(event.reward)}", f"staleness {_pair(event.staleness_mean, event.staleness_max)}"]
            said += [f"KL {scientific(event.kl_sampler)}"]
            if event.replayed_share is not None:
                routing = f"KL {scientific(event.kl_replayed)}, by own routing {scientific(event.kl_own_routing)}"
                said += [f"experts of {percent(event.replayed_share)} of tokens replayed ({routing})"]
            if event.acceptance is not None:
                said += [f"5th percentile of acceptance {fixed(event.acceptance)}"]
            said += [f"ratio {fixed(event.ratio_mean)} (at most {fixed(event.ratio_max, 2)})"]
            said += [f"entropy {fixed(event.entropy)}"]
            said += [f"bubble {percent(event.bubble)}", f"{short(event.tokens_per_s)} tokens/s"]
            said += [f"{seconds(event.wait_s)} waiting", f"{seconds(event.train_s)} training"]
            return f"step {event.step}: {', '.join(said)}"
        case Publication():
            return f"version {_publication(event)}"
        case Evaluation():
            return f"evaluation: {_evaluation(event)}"
        case Probe():
            return f"{'probe ALARM' if event.alarm else 'probe'}: {_probe(event)}"
        case BudgetEvent():
            return f"budget: {_budget(event)}"
        case CheckpointEvent():
            return f"checkpoint: {_checkpoint(event)}"
        case StartEvent():
            sizes = f", {short(event.parameters)} parameters" if event.parameters is not None else ""
            ranks = f", {event.ranks} ranks" if event.ranks is not None and event.ranks > 1 else ""
            branch = f", branch {event.branch}" if event.branch is not None else ""
            return f"start at step {event.step}{branch}: {event.model or 'model without a name'}{sizes}{ranks}"
        case EndEvent():
            return f"end {_end(event)}"


def _line(text: str) -> Text:
    # A name of an engine or model is text, never rich's markup.
    return Text(text, style="bold red" if text.startswith("ALARM") else "", no_wrap=True, overflow="ellipsis")


def _rewards(steps: Sequence[StepEvent]) -> str:
    shown = [step.reward for step in steps[-SPARKS:]]
    known = [reward for reward in shown if reward is not None]
    if not known:
        return "-"
    return f"{sparkline(shown)}  {fixed(min(known))} to {fixed(max(known))}"


def _publication(event: Publication) -> str:
    live = "not live in time" if event.live_s is None else f"live after {seconds(event.live_s)}"
    engines = "" if event.engines is None else f" on {event.engines} engine{'' if event.engines == 1 else 's'}"
    return f"{event.version} {live}{engines}, {size(event.bytes)}, {percent(event.density)} changed"


def _evaluation(event: Evaluation) -> str:
    line = f"{fixed(event.reward)} at {f'step {event.step}' if event.version is None else event.version}"
    if event.problems is not None:
        answered = event.problems if event.answered is None else event.answered
        line += f", {answered} of {event.problems} problems"
    tags = [f"{name} {value} {count}" for name, counts in sorted(event.tags.items()) for value, count in counts.items()]
    return line + "".join(f", {tag}" for tag in tags[:MOST_TAGS])


def _probe(event: Probe) -> str:
    line = f"KL {scientific(event.kl)} at {event.version}"
    if event.kl is not None and event.floor:
        line += f", {event.kl / event.floor:.3g} x the floor"
    return f"{line}, {event.engine}"


def _budget(event: BudgetEvent) -> str:
    before, after = (f"{'all' if pages is None else pages} pages" for pages in (event.before, event.after))
    return (
        f"bin {event.bin} has {after} in place of {before} from step {event.step} on: 5th percentile of the acceptance"
        f" rate {fixed(event.percentile)} of {event.tokens} tokens"
    )


def _checkpoint(event: CheckpointEvent) -> str:
    return f"step {event.step}, {size(event.bytes)}, {seconds(event.seconds)}"


def _end(event: EndEvent) -> str:
    return f"at step {event.step} after {seconds(event.seconds)}" + (f": {event.reason}" if event.reason else "")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


# -- numbers, short and without spaces that could break


def sparkline(values: Sequence[Number]) -> str:
    """One character a value, from the least to the greatest; a blank for None, middle height if all are equal."""
    known = [value for value in values if value is not None]
    if not known:
        return " " * len(values)
    # Halves, because the difference of two finite floats can overflow.
    least, span = min(known) / 2, max(known) / 2 - min(known) / 2
    top = len(_BLOCKS) - 1
    return "".join(
        " " if value is None else _BLOCKS[round((value / 2 - least) / span * top) if span else top // 2]
        for value in values
    )


def fixed(value: Number, digits: int = 3) -> str:
    """Fixed digits; scientific for numbers that would be too long for a column."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if abs(value) < 1e4 else f"{value:.1e}"


def scientific(value: Number) -> str:
    return "-" if value is None else f"{value:.1e}"


def percent(share: Number) -> str:
    if share is None:
        return "-"
    shown = 100 * share
    if abs(shown) >= 1e4:
        return f"{shown:.0e}%"
    return f"{shown:.0f}%" if abs(shown) >= 10 or not shown else f"{_significant(shown, 2)}%"


def seconds(value: Number) -> str:
    """With the unit, three significant digits."""
    if value is None:
        return "-"
    if abs(value) < 1e4:
        return f"{value:.2f}s" if abs(value) < 10 else f"{value:.0f}s"
    return f"{value / 3600:.3g}h"


def short(value: Number) -> str:
    """Three significant digits with k, M, G or T."""
    return "-" if value is None else _scaled(value, ("", "k", "M", "G", "T"))


def size(count: Number) -> str:
    """Bytes, three significant digits."""
    return "-" if count is None else _scaled(count, (" B", " kB", " MB", " GB", " TB"))


def _scaled(value: float, units: tuple[str, ...]) -> str:
    at = 0
    # 999.5 would round to 1e+03.
    while abs(value) >= 999.5 and at < len(units) - 1:
        value /= 1000
        at += 1
    return f"{_significant(value, 3) if at else f'{value:.3g}'}{units[at]}"


def _significant(value: float, digits: int) -> str:
    """Trailing zeros are kept, so that a column's numbers are equally long."""
    return f"{value:#.{digits}g}".rstrip(".")


def _pair(mean: Number, most: Number) -> str:
    return "-" if mean is None or most is None else f"{mean:.1f}/{most:.0f}"

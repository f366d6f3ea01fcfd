"""``p2pcast bench squash``: the size of k deltas squashed into one, the time of squashing, and the savings of a squash
ladder for late peers.

Every version of a run is coded against the previous version (the chain) and against the first (the size of a squash).
Some sizes of squashes are verified by squashing. Times are of one core, in turns: squashing the first k links;
replaying them as a peer does, with both digests verified; and applying the squash instead. Ladder figures are computed
from these sizes: a squash of i → j counts as large as 0 → j − i.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy.typing as npt

from netem.bench.measuring import one_core, take_turns
from p2pcast.checkpoint import Checkpoint
from p2pcast.codec.cell import apply, decode, digest, encode
from p2pcast.codec.layout import Cell, Layout
from p2pcast.codec.squash_cell import Link, squash
from p2pcast.ground.errors import IntegrityError, LocalError, UsageError
from p2pcast.ground.version import Version
from p2pcast.inspection.png_figure import blank, plain, save
from p2pcast.relay.artifact_path import Edge, cheapest_path
from p2pcast.store.squash_ladder import RUNGS, missing_rungs

Words = npt.NDArray[Any]
State = Callable[[Cell], Words]

LEARNING_RATES = (1e-6, 3e-6)
CODECS = ("flat", "context")
MARKS = (1, 2, 4, 8, 16, 32, 64, 100)
TIMED = (1, 8, 32, 100)
"""Values of k at which squashes are made, timed and compared; at other marks only the delta between the ends is made.
"""
LADDERS: dict[str, tuple[int, ...]] = {
    "chain": (),
    "ladder 64": (64,),
    "ladder 8, 64": (8, 64),
    "ladder 4, 16, 64": RUNGS,
    "ladder 2, 4, 8 …": (2, 4, 8, 16, 32, 64),
}
REPEATS = 2
_STEP = re.compile(r"step_(\d{1,18})", re.ASCII)


@dataclass(frozen=True, slots=True)
class SquashRun:
    """Consecutive states, starting with the base."""

    name: str
    layout: Layout
    states: Iterator[State]


def trained_runs(learning_rates: Sequence[float] = LEARNING_RATES) -> Iterator[SquashRun]:
    """Real weights under real AdamW steps, without end. Needs torch and transformers. Raises LocalError."""
    from netem.fleet.adamw_steps import endless_states

    for rate in learning_rates:
        layout, states = endless_states(rate)
        yield SquashRun(f"AdamW lr {rate:g}", layout, (of_arrays(layout, s) for s in states))


def of_arrays(layout: Layout, arrays: dict[str, Any]) -> State:
    """State of the given words by tensor name."""
    return lambda cell: arrays[layout.tensors[cell.tensor].name][cell.start : cell.start + cell.words]


def folder_run(checkpoints: Path) -> SquashRun:
    """The folders ``step_N`` in a folder, by N, after ``base`` if it exists. Raises LocalError, UsageError,
    IntegrityError.
    """
    try:
        found = sorted((int(m[1]), p) for p in checkpoints.iterdir() if (m := _STEP.fullmatch(p.name)))
    except OSError as error:
        raise LocalError(f"cannot read {checkpoints}: {error.strerror}") from None
    folders = [p for p in [checkpoints / "base"] if p.is_dir()] + [p for _, p in found]
    if len(folders) < 2:
        raise UsageError(f"{checkpoints}: fewer than two checkpoint folders (step_N, base)")
    layout = Checkpoint.open(folders[0]).layout()

    def states() -> Iterator[State]:
        for folder in folders:
            checkpoint = Checkpoint.open(folder)
            lines = layout.difference(checkpoint.layout())
            if lines:
                raise UsageError(f"{folder} has other tensors than {folders[0]}:\n" + "\n".join(lines[:20]))
            yield checkpoint.words

    return SquashRun(str(checkpoints), layout, states())


@dataclass(slots=True)
class Chain:
    """A run's deltas in one codec. ``links``: cell → its deltas, each with the number of its version."""

    links: dict[int, list[tuple[int, Link]]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    """Bytes of each delta."""
    squashed: list[int] = field(default_factory=list)
    """Bytes of the first k deltas squashed into one."""

    def first(self, cell: Cell, k: int) -> list[Link]:
        return [link for number, link in self.links.get(cell.index, []) if number <= k]


def measure(
    run: SquashRun, versions: int, *, marks: Sequence[int] = MARKS, timed: Sequence[int] = TIMED, repeats: int = REPEATS
) -> dict[str, Any]:
    """One dataset's part of the report, over at most ``versions`` deltas."""
    layout = run.layout
    base = next(run.states)
    chains = {codec: Chain() for codec in CODECS}
    changed_each: list[int] = []
    changed: list[int] = []
    known = {cell.index: digest(base(cell), cell) for cell in layout.cells}
    start, before = dict(known), base
    for number, state in enumerate(_at_most(run.states, versions), 1):
        each = total = 0
        for chain in chains.values():
            chain.steps.append(0)
            chain.squashed.append(0)
        for cell in layout.cells:
            old, new, first = before(cell), state(cell), base(cell)
            reached = known[cell.index]
            for codec, chain in chains.items():
                coded = encode(cell, old, new, before=known[cell.index], codec=codec)
                if coded is not None:
                    link = (coded.codec, coded.payload, coded.before, coded.after)
                    chain.links.setdefault(cell.index, []).append((number, link))
                    chain.steps[-1] += len(coded.payload)
                    each, reached = each + coded.changed, coded.after
                whole = encode(cell, first, new, before=start[cell.index], codec=codec)
                if whole is not None:
                    chain.squashed[-1] += len(whole.payload)
                    total += whole.changed
            known[cell.index] = reached
        changed_each.append(each // len(chains))
        changed.append(total // len(chains))
        before = state
    if not changed:
        raise UsageError(f"{run.name}: no version to measure")
    rows = []
    for k in sorted({min(m, len(changed)) for m in marks}):
        row: dict[str, Any] = {"k": k, "changed": changed[k - 1], "changed_chain": sum(changed_each[:k])}
        for codec, chain in chains.items():
            part = {"chain_bytes": sum(chain.steps[:k]), "squash_bytes": chain.squashed[k - 1]}
            times = _timed(layout, base, chain, k, repeats) if k in timed or k == len(changed) else {}
            row[codec] = {**part, "ratio": round(part["squash_bytes"] / max(1, part["chain_bytes"]), 4), **times}
        rows.append(row)
    sizes = {codec: {"chain_bytes": chain.steps, "squash_bytes": chain.squashed} for codec, chain in chains.items()}
    return {
        "dataset": run.name,
        "params": layout.params,
        "dense_bytes": layout.nbytes,
        "versions": len(changed),
        "rows": rows,
        "sizes": sizes,
        "ladders": {codec: ladders(chain.steps, chain.squashed) for codec, chain in chains.items()},
    }


def _at_most(states: Iterable[State], count: int) -> Iterator[State]:
    for _, state in zip(range(count), states, strict=False):
        yield state


def _timed(layout: Layout, base: State, chain: Chain, k: int, repeats: int) -> dict[str, float]:
    """Seconds on one core. Also verifies the size of the squash, and that it gives the same words as the chain."""
    work = [(cell, base(cell), links) for cell in layout.cells if (links := chain.first(cell, k))]
    made = [squash(cell, links, base=words) for cell, words, links in work]
    weight = sum(len(m.payload) for m in made if m is not None)
    if weight != chain.squashed[k - 1]:
        raise IntegrityError(
            f"the squash of {k} deltas has {weight} bytes, the delta between its ends {chain.squashed[k - 1]}"
        )

    def squashing() -> None:
        for cell, words, links in work:
            squash(cell, links, base=words)

    def replaying() -> None:
        for cell, words, links in work:
            target = words.copy()
            for codec, payload, before, after in links:
                apply(decode(cell, codec, payload, target, before, after), target)

    def catching_up() -> None:
        for (cell, words, _), m in zip(work, made, strict=True):
            if m is not None:
                target = words.copy()
                apply(decode(cell, m.codec, m.payload, target, m.before, m.after), target)

    with one_core():
        taken = take_turns({"squash_s": squashing, "replay_s": replaying, "catch_up_s": catching_up}, repeats)
    replay = taken["replay_s"]
    return {
        **taken,
        "squash_to_replay": round(taken["squash_s"] / replay, 4) if replay else 0.0,
        "catch_up_to_replay": round(taken["catch_up_s"] / replay, 4) if replay else 0.0,
    }


def ladders(
    steps: Sequence[int], squashed: Sequence[int], kinds: dict[str, tuple[int, ...]] | None = None
) -> list[dict[str, Any]]:
    """Mean fetched bytes of peers 1 … len(steps) versions behind, and the stored bytes of each ladder. ``squashed[k −
    1]``: bytes of k deltas as one.
    """
    count = len(steps)
    path = [Version(0, n) for n in range(count + 1)]
    deltas = [Edge(b"", a, b, size) for (a, b), size in zip(pairwise(path), steps, strict=True)]
    chain = [sum(steps[count - behind :]) for behind in range(1, count + 1)]
    out = []
    for name, rungs in (kinds or LADDERS).items():
        made = [
            Edge(b"", r.base, r.version, squashed[r.version.step - r.base.step - 1])
            for r in missing_rungs(path, [], rungs)
        ]
        ways = [cheapest_path(path[count - behind], [*deltas, *made]) for behind in range(1, count + 1)]
        out.append(
            _summary(
                name,
                [sum(e.bytes for e in way) for way in ways],
                chain,
                [len(w) for w in ways],
                sum(e.bytes for e in made),
            )
        )
    exact = [min(squashed[behind - 1], chain[behind - 1]) for behind in range(1, count + 1)]
    out.append(_summary("exact", exact, chain, [1] * count, 0))
    return out


def _summary(name: str, taken: Sequence[int], chain: Sequence[int], hops: Sequence[int], kept: int) -> dict[str, Any]:
    return {
        "ladder": name,
        "mean_bytes": round(sum(taken) / len(taken)),
        "ratio_to_chain": round(sum(taken) / max(1, sum(chain)), 4),
        "furthest_ratio": round(taken[-1] / max(1, chain[-1]), 4),
        "mean_artifacts": round(sum(hops) / len(hops), 1),
        "kept_to_chain": round(kept / max(1, chain[-1]), 4),
    }


def draw(document: Mapping[str, Any], file: Path) -> None:
    """Plot the bytes of squashes and of their deltas, and the ratio. Raises LocalError."""
    figure, ((sizes, ratios),) = blank(1, 2, width=11, height=4)
    for row, dash in zip(document["rows"], ["-", "--", ":", "-."] * len(document["rows"]), strict=False):
        for number, (codec, part) in enumerate(row["sizes"].items()):
            k = range(1, row["versions"] + 1)
            chain = [sum(part["chain_bytes"][:n]) for n in k]
            label = plain(f"{row['dataset']}, {codec}")
            colour = f"C{number}"
            sizes.plot(k, [b / 1e6 for b in chain], dash, color=colour, alpha=0.35)
            sizes.plot(k, [b / 1e6 for b in part["squash_bytes"]], dash, color=colour, label=label)
            ratios.plot(
                k,
                [s / max(1, c) for s, c in zip(part["squash_bytes"], chain, strict=True)],
                dash,
                color=colour,
                label=label,
            )
    sizes.set(
        xlabel="deltas, k", ylabel="MB", xscale="log", yscale="log", title="squash of k deltas (pale: the deltas)"
    )
    ratios.set(
        xlabel="deltas, k", ylabel="squash ÷ deltas", xscale="log", ylim=(0, 1.05), title="size relative to the deltas"
    )
    for axes in (sizes, ratios):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    save(figure, file)

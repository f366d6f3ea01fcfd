"""Figures of ``bench live``: from switches and gaps to rows and ratios. Pure.

A *switch* is a period in which an engine was told to stop, to take other weights, and to continue. A *gap* is the time
that one client waited between two pieces of one answer. A gap belongs to a switch if the two overlap; the longest such
gap of a client is its view of the switch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from netem.bench.measuring import quantile

Gap = tuple[int, float, float]
"""(client, start, end)."""
Span = tuple[float, float]
CLOCK = "%(created).6f "
"""Prefix of vLLM's log lines (``VLLM_LOGGING_PREFIX``) from which ``pauses`` reads times."""
_PAUSE_STATE = re.compile(r"(\d+\.\d{6}) .*setting pause state to (\w+)")


@dataclass(frozen=True, slots=True)
class Switch:
    """``began_s`` and ``ended_s``: from the first command sent to the last one answered, by the clock of the gaps.
    ``pause_s``: pause of the engine in that period, from its scheduler's log; None if the log has none. ``parts_s``:
    durations of the commands.
    """

    version: str
    began_s: float
    ended_s: float
    pause_s: float | None = None
    recomputed_tokens: int | None = None
    parts_s: Mapping[str, float] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        parts = {name: round(seconds, 6) for name, seconds in self.parts_s.items()}
        return {
            "version": self.version,
            "pause_s": None if self.pause_s is None else round(self.pause_s, 6),
            "commands_s": round(self.ended_s - self.began_s, 6),
            "recomputed_tokens": self.recomputed_tokens,
            "parts_s": parts,
        }


def pauses(lines: Iterable[str]) -> list[Span]:
    """Pauses of vLLM's scheduler, from its own log, in Unix times. An unfinished pause is left out."""
    found, since = [], None
    for line in lines:
        match = _PAUSE_STATE.search(line)
        if match is None:
            continue
        at_s, paused = float(match[1]), match[2] != "UNPAUSED"
        if paused and since is None:
            since = at_s
        elif not paused and since is not None:
            found.append((since, at_s))
            since = None
    return found


def with_pauses(switches: Iterable[Switch], stood_still: Sequence[Span]) -> list[Switch]:
    """``stood_still``: pauses by the switches' clock. Each pause counts for the switch in whose commands it ends."""
    out = []
    for switch in switches:
        lengths = [to - since for since, to in stood_still if switch.began_s <= to <= switch.ended_s]
        out.append(replace(switch, pause_s=sum(lengths) if lengths else None))
    return out


def sort_gaps(gaps: Sequence[Gap], switches: Sequence[Switch]) -> tuple[list[list[float]], list[float]]:
    """In seconds: for each switch the longest gap of each client that was within an answer, and the lengths of all gaps
    that overlap no switch.
    """
    if not gaps:
        return [[] for _ in switches], []
    table = np.array(gaps, dtype=np.float64)
    client, began, ended = table[:, 0], table[:, 1], table[:, 2]
    seen, free = [], np.ones(len(gaps), dtype=bool)
    for switch in switches:
        met = (began < switch.ended_s) & (ended > switch.began_s)
        seen.append([float((ended - began)[met & (client == one)].max()) for one in np.unique(client[met])])
        free &= ~met
    return seen, [float(length) for length in (ended - began)[free]]


def row(system: str, switches: Sequence[Switch], gaps: Sequence[Gap], facts: Mapping[str, Any]) -> dict[str, Any]:
    """One system's figures. ``gap_worst_median_s``: the worst gap of each switch, as the median over the switches.
    ``facts`` are added.
    """
    seen, free = sort_gaps(gaps, switches)
    all_seen = [length for lengths in seen for length in lengths]
    pauses = [switch.pause_s for switch in switches if switch.pause_s is not None]
    tokens = [switch.recomputed_tokens for switch in switches if switch.recomputed_tokens is not None]
    return {
        "system": system,
        "switches": len(switches),
        "pause_median_s": quantile(pauses, 0.5),
        "pause_p99_s": quantile(pauses, 0.99),
        "commands_median_s": quantile([switch.ended_s - switch.began_s for switch in switches], 0.5),
        "gaps_at_switches": len(all_seen),
        "gap_p50_s": quantile(all_seen, 0.5),
        "gap_p99_s": quantile(all_seen, 0.99),
        "gap_worst_median_s": quantile([max(lengths) for lengths in seen if lengths], 0.5),
        "gaps_elsewhere": len(free),
        "gap_elsewhere_p50_s": quantile(free, 0.5),
        "gap_elsewhere_p99_s": quantile(free, 0.99),
        "recomputed_tokens": sum(tokens) if tokens else None,
        "recomputed_tokens_median": quantile(tokens, 0.5),
        "parts_median_s": medians(switch.parts_s for switch in switches),
        **facts,
    }


def medians(many: Iterable[Mapping[str, float]]) -> dict[str, float | None]:
    """Median of each name over the maps that contain it."""
    found: dict[str, list[float]] = {}
    for parts in many:
        for name, seconds in parts.items():
            found.setdefault(name, []).append(seconds)
    return {name: quantile(values, 0.5) for name, values in found.items()}


def ratio(theirs: float | None, ours: float | None) -> float | None:
    """The rival's figure ÷ ours; None if either was not measured."""
    return None if theirs is None or not ours else round(theirs / ours, 2)


def ratios(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float | None]:
    """Two rows compared: their figure ÷ ours."""
    return {
        "pause_ratio": ratio(theirs["pause_median_s"], ours["pause_median_s"]),
        "commands_ratio": ratio(theirs["commands_median_s"], ours["commands_median_s"]),
        "gap_p99_ratio": ratio(theirs["gap_p99_s"], ours["gap_p99_s"]),
        "gap_worst_ratio": ratio(theirs["gap_worst_median_s"], ours["gap_worst_median_s"]),
    }

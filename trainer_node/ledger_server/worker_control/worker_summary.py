"""The workers in the ledger's summary: sums by region, and single workers, those that need a look first."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from trainer_node.rollout_summary import MAX_FIELDS, MAX_ROWS, MAX_TEXT

OTHERS: Final = "other regions"
COLUMNS: Final = (
    "name",
    "region",
    "served",
    "slots",
    "leases",
    "tokens_per_s",
    "accepted_tokens",
    "silent_s",
    "drained_s",
    "blamed",
    "disagreements",
)

Row = Mapping[str, Any]


def worker_summary(workers: Sequence[Row], silent_s: float) -> dict[str, Any]:
    """``workers``: of the ledger's report. ``silent_s``: time without a request after which a worker is silent."""
    workers_of, leases, tokens_per_s = Counter[str](), Counter[str](), defaultdict[str, float](float)
    present = [row for row in workers if row["silent_s"] <= silent_s]
    for row in present:
        region = (row["region"] or "")[:MAX_TEXT]
        workers_of[region] += 1
        leases[region] += row["leases"]
        tokens_per_s[region] += row["tokens_per_s"] or 0.0
    largest = [region for region, _ in workers_of.most_common(MAX_FIELDS - 1)]
    shown = heapq.nsmallest(MAX_ROWS, workers, key=lambda row: _urgency(row, silent_s))
    return {
        "region_workers": _bounded(workers_of, largest),
        "region_leases": _bounded(leases, largest),
        "region_tokens_per_s": _bounded(tokens_per_s, largest),
        "worker_rows": [{name: _short(row[name]) for name in COLUMNS} for row in shown],
    }


def _bounded(table: Mapping[str, float], largest: Sequence[str]) -> dict[str, float]:
    found = {region: round(table[region], 1) for region in largest}
    rest = sum(value for region, value in table.items() if region not in found)
    return found | ({OTHERS: round(rest, 1)} if len(table) > len(largest) else {})


def _urgency(row: Row, silent_s: float) -> tuple[Any, ...]:
    """Workers that lie, then silent ones, then those without new leases, then by name."""
    return (
        -row["disagreements"],
        -row["blamed"],
        not row["silent_s"] > silent_s,
        not row["drained_s"] > 0,
        row["name"],
    )


def _short(value: Any) -> Any:
    return value[:MAX_TEXT] if isinstance(value, str) else value

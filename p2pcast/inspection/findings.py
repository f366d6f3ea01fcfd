"""Describes what is notable in a sparsity report, for an operator whose deltas have grown. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from p2pcast.codec.floats import thresholds_shown

HEAVY_TENSOR, HEAVY_KIND = 0.25, 0.4
"""Share of the bytes from which a tensor, or all tensors of one kind, are named."""
BEYOND_ITS_SIZE = 1.2
"""Least ratio of a kind's share of the bytes to its share of the values for the kind to be named."""
COSTLY = 1.5
"""Least bits per change, as a multiple of the mean, for a tensor with at least ``COSTLY_FROM`` of the bytes to be
named.
"""
COSTLY_FROM = 0.05
WHOLE_CELLS = 0.1
MANY_CHANGED = 0.03
USUAL = "about 1 % is usual from one step to the next at RL's learning rates"
FEW_SINGLE = 0.75
ACROSS = 0.02
ALL_CHANGED = 0.99
MOST_NAMED = 3


def findings(document: dict[str, Any]) -> list[str]:
    """Sentences about a report (``sparsity_report.report``), the most important first. Tensor names are not escaped."""
    total, tensors = document["total"], document["tensors"]
    if not total["changed"]:
        return ["Nothing changed."]
    return [
        *_changed(total, tensors),
        *_large(total, tensors),
        *_costly(total, tensors),
        *_whole(total),
        *_steps(total),
        *_threshold(document),
        *_unchanged(total, tensors),
    ]


def _percent(part: float, whole: float) -> str:
    share = 100 * part / whole if whole else 0.0
    return f"{share:.0f} %" if share >= 10 else f"{share:.2g} %"


def _changed(total: dict[str, Any], tensors: list[dict[str, Any]]) -> Iterator[str]:
    if not total["exact"]:
        yield "The number of changed values is unknown for some cells: give the delta's base folder (--base DIR)."
        return
    share = _percent(total["changed"], total["words"])
    bits = f"{total['bits_per_change']:.1f} bits a change"
    many = total["share"] > MANY_CHANGED
    yield f"{share} of the values changed, at {bits}." + (f" That is many: {USUAL}." if many else "")
    full = [t for t in tensors if t["words"] and t["share"] >= ALL_CHANGED]
    if full and len(full) < len(tensors):
        yield f"{_names(full)} changed in every value."


def _names(tensors: list[dict[str, Any]]) -> str:
    names = [t["name"] for t in tensors[:MOST_NAMED]]
    more = len(tensors) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _large(total: dict[str, Any], tensors: list[dict[str, Any]]) -> Iterator[str]:
    if not total["bytes"] or len(tensors) < 2:
        return
    first = tensors[0]
    if first["bytes"] >= HEAVY_TENSOR * total["bytes"]:
        yield (
            f"{first['name']} takes {_percent(first['bytes'], total['bytes'])} of the bytes and has "
            f"{_percent(first['words'], total['words'])} of the values."
        )
    kinds: dict[str, list[dict[str, Any]]] = {}
    for tensor in tensors:
        kinds.setdefault(re.sub(r"\d+", "*", tensor["name"]), []).append(tensor)
    for kind, members in kinds.items():
        size, words = (sum(t[key] for t in members) for key in ("bytes", "words"))
        fat = size * total["words"] >= BEYOND_ITS_SIZE * words * total["bytes"]
        if len(members) > 1 and size >= HEAVY_KIND * total["bytes"] and fat:
            yield (
                f"The {len(members)} tensors {kind} take {_percent(size, total['bytes'])} of the bytes and have "
                f"{_percent(words, total['words'])} of the values."
            )


def _costly(total: dict[str, Any], tensors: list[dict[str, Any]]) -> Iterator[str]:
    mean = total["bits_per_change"]
    if mean is None:
        return
    costly = [
        t
        for t in tensors
        if t["bytes"] >= COSTLY_FROM * total["bytes"]
        and t["bits_per_change"] is not None
        and t["bits_per_change"] >= COSTLY * mean
    ]
    for tensor in costly[:MOST_NAMED]:
        yield f"{tensor['name']} takes {tensor['bits_per_change']:.1f} bits a change; the mean is {mean:.1f}."


def _whole(total: dict[str, Any]) -> Iterator[str]:
    cells = sum(total["codecs"].values())
    whole = sum(total["codecs"].get(name, 0) for name in ("dense", "raw"))
    if whole and whole >= WHOLE_CELLS * cells:
        yield (
            f"{whole} of {cells} cells state every value (dense or raw): "
            "so many values changed that steps would take more bytes."
        )


def _steps(total: dict[str, Any]) -> Iterator[str]:
    known = total["steps_known"]
    if not known:
        return
    single = sum(total["ulps"].get("1", {}).values())
    if single < FEW_SINGLE * known:
        yield (
            f"Only {_percent(single, known)} of the steps are of one ULP (about 90 % are usual): "
            "possible causes are a high learning rate, many optimiser steps a version, or many small weights."
        )
    across = sum(ways["across"] for ways in total["ulps"].values())
    if across >= ACROSS * known:
        yield f"{_percent(across, known)} of the changes cross zero; such steps are large and take many bits."


def _threshold(document: dict[str, Any]) -> Iterator[str]:
    total, rate = document["total"]["magnitudes"], document["learning_rate"]
    if total is None or rate is None or total["under"] is None or not total["changed"]:
        return
    if document["learning_rate_given"]:
        what = f"η = {rate:.2g}"
    else:
        what = f"η not given: estimated by the mean update {rate:.2g}, which under Adam is below η"
    under, above = total["under"], total["words"] - total["under"]
    above_changed = total["changed"] - total["under_changed"]
    below = thresholds_shown(t["dtype"] for t in document["tensors"] if t["magnitudes"] is not None)
    yield (
        f"{_percent(under, total['words'])} of the weights are small enough to show a typical update "
        f"(|w| < {below}; {what}): "
        f"{_percent(total['under_changed'], under)} of these changed, "
        f"and {_percent(above_changed, above)} of the others. "
        f"These weights account for {_percent(total['under_changed'], total['changed'])} of the changes."
    )


def _unchanged(total: dict[str, Any], tensors: list[dict[str, Any]]) -> Iterator[str]:
    unchanged = [t for t in tensors if t["words"] and not t["changed"]]
    if unchanged:
        words = sum(t["words"] for t in unchanged)
        share = _percent(words, total["words"])
        yield f"{len(unchanged)} of {len(tensors)} tensors did not change ({share} of the values)."

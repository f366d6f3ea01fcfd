"""What stands out in a sparsity report, in words: what somebody looks for whose deltas got fat. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from p2pcast.codec.floats import thresholds_shown

HEAVY_TENSOR, HEAVY_KIND = 0.25, 0.4
"""Share of the bytes from which a tensor, or all of one kind, is named."""
BEYOND_ITS_SIZE = 1.2
"""A kind is named only when its share of the bytes is so many times that of its values."""
DEAR = 1.5
"""Bits a change, times the mean, from which a tensor is named that takes at least ``DEAR_FROM`` of the bytes."""
DEAR_FROM = 0.05
WHOLE_CELLS = 0.1
MANY_CHANGED = 0.03
USUAL = "about 1 % is usual from one step to the next at RL's learning rates"
FEW_SINGLE = 0.75
ACROSS = 0.02
ALL_CHANGED = 0.99
MOST_NAMED = 3


def findings(document: dict[str, Any]) -> list[str]:
    """Sentences about a report (``sparsity.report``), the weightiest first; names as they are."""
    total, tensors = document["total"], document["tensors"]
    if not total["changed"]:
        return ["Nothing changed."]
    return [
        *_changed(total, tensors),
        *_heavy(total, tensors),
        *_dear(total, tensors),
        *_whole(total),
        *_steps(total),
        *_threshold(document),
        *_still(total, tensors),
    ]


def _percent(part: float, whole: float) -> str:
    share = 100 * part / whole if whole else 0.0
    return f"{share:.0f} %" if share >= 10 else f"{share:.2g} %"


def _changed(total: dict[str, Any], tensors: list[dict[str, Any]]) -> Iterator[str]:
    if not total["exact"]:
        yield "How many values changed is not known of all cells: give the folder that the delta starts from (--base DIR)."
        return
    share = _percent(total["changed"], total["words"])
    bits = f"{total['bits_per_change']:.1f} bits a change"
    many = total["share"] > MANY_CHANGED
    yield f"{share} of the values changed, at {bits}." + (f" That is a lot: {USUAL}." if many else "")
    full = [t for t in tensors if t["words"] and t["share"] >= ALL_CHANGED]
    if full and len(full) < len(tensors):
        yield f"{_names(full)} changed in all values."


def _names(tensors: list[dict[str, Any]]) -> str:
    names = [t["name"] for t in tensors[:MOST_NAMED]]
    more = len(tensors) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _heavy(total: dict[str, Any], tensors: list[dict[str, Any]]) -> Iterator[str]:
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


def _dear(total: dict[str, Any], tensors: list[dict[str, Any]]) -> Iterator[str]:
    mean = total["bits_per_change"]
    if mean is None:
        return
    dear = [
        t
        for t in tensors
        if t["bytes"] >= DEAR_FROM * total["bytes"] and t["bits_per_change"] is not None and t["bits_per_change"] >= DEAR * mean
    ]
    for tensor in dear[:MOST_NAMED]:
        yield f"{tensor['name']} takes {tensor['bits_per_change']:.1f} bits a change, against {mean:.1f} over all."


def _whole(total: dict[str, Any]) -> Iterator[str]:
    cells = sum(total["codecs"].values())
    whole = sum(total["codecs"].get(name, 0) for name in ("dense", "raw"))
    if whole and whole >= WHOLE_CELLS * cells:
        yield f"{whole} of {cells} cells state all their values (dense or raw): so much changed there that steps would be larger."


def _steps(total: dict[str, Any]) -> Iterator[str]:
    known = total["steps_known"]
    if not known:
        return
    single = sum(total["ulps"].get("1", {}).values())
    if single < FEW_SINGLE * known:
        yield (
            f"Only {_percent(single, known)} of the steps are of one ULP (about 90 % are usual): "
            "a high learning rate, many optimiser steps a version, or many small weights."
        )
    across = sum(ways["across"] for ways in total["ulps"].values())
    if across >= ACROSS * known:
        yield f"{_percent(across, known)} of the changes cross zero; such steps are far, and dear."


def _threshold(document: dict[str, Any]) -> Iterator[str]:
    total, rate = document["total"]["magnitudes"], document["learning_rate"]
    if total is None or rate is None or total["under"] is None or not total["changed"]:
        return
    if document["learning_rate_given"]:
        what = f"η = {rate:.2g}"
    else:
        what = f"η not given: the mean update {rate:.2g} stands for it, which under Adam is below η"
    under, above = total["under"], total["words"] - total["under"]
    above_changed = total["changed"] - total["under_changed"]
    below = thresholds_shown(t["dtype"] for t in document["tensors"] if t["magnitudes"] is not None)
    yield (
        f"{_percent(under, total['words'])} of the weights are small enough to show a typical update (|w| < {below}; {what}): "
        f"{_percent(total['under_changed'], under)} of them changed, and {_percent(above_changed, above)} of the others. "
        f"They make {_percent(total['under_changed'], total['changed'])} of the changes."
    )


def _still(total: dict[str, Any], tensors: list[dict[str, Any]]) -> Iterator[str]:
    still = [t for t in tensors if t["words"] and not t["changed"]]
    if still:
        words = sum(t["words"] for t in still)
        yield f"{len(still)} of {len(tensors)} tensors did not change ({_percent(words, total['words'])} of the values)."

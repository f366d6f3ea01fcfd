"""Tables and plots with which ``p2pcast inspect`` shows a change; the numbers come from
``p2pcast.inspection.sparsity_report``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from p2pcast.codec.change_statistics import WAYS
from p2pcast.codec.floats import thresholds_shown
from p2pcast.inspection.png_figure import blank, plain, save

_HEAVIEST = 12
_NAME = 34
_NONE = "–"


def change_lines(document: dict[str, Any]) -> list[dict[str, str]]:
    """Return a table row for every tensor that takes up bytes in the delta."""
    everything = document["total"]["bytes"]
    there = [t for t in document["tensors"] if t["bytes"]]
    below = f"<_{thresholds_shown(t['dtype'] for t in there)}".replace(" ", "_")
    return [_line(t, everything, below) for t in there]


def _line(tensor: dict[str, Any], everything: int, below: str) -> dict[str, str]:
    """Return a tensor's table row. ``below``: heading of the column for weights below PULSE's threshold."""
    found = tensor["magnitudes"]
    known = tensor["steps_known"]
    line = {
        "name": tensor["name"],
        "type": f"{tensor['dtype']} {'×'.join(map(str, tensor['shape']))}",
        "codec": ", ".join(tensor["codecs"]),
        "changed": f"{'' if tensor['exact'] else '≤ '}{tensor['changed']:,}",
        "share": f"{100 * tensor['share']:.3f} %",
        "bytes": f"{tensor['bytes']:,}",
        "of_all": _percent(tensor["bytes"], everything),
        "bits_each": _NONE if tensor["bits_per_change"] is None else f"{tensor['bits_per_change']:.1f}",
        "±1_ULP": _percent(sum(tensor["ulps"].get("1", {}).values()), known),
    }
    if found is not None:
        line["median_|w|"] = _value(found["median"])
        line["changed_|w|"] = _value(found["median_changed"])
        line[below] = _percent(found["under"], tensor["words"])
        line["of_changes"] = _percent(found["under_changed"], tensor["changed"])
    return line


def _percent(part: int | None, whole: int) -> str:
    return _NONE if part is None or not whole else f"{100 * part / whole:.1f} %"


def _value(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2g}"


def step_lines(total: dict[str, Any]) -> list[dict[str, str]]:
    """Return a table row for every range of ULPs that occurs."""
    known = total["steps_known"]
    return [
        {
            "ULPs": name.replace("-", "–"),
            "share": _percent(sum(ways.values()), known),
            **{way: f"{ways[way]:,}" for way in WAYS},
        }
        for name, ways in total["ulps"].items()
    ]


def draw(document: dict[str, Any], file: Path) -> None:
    """Plot bytes by tensor, steps in ULPs, changed share by tensor, and magnitudes against the threshold. Raises
    LocalError.
    """
    figure, ((heavy, steps), (share, sizes)) = blank(2, 2, width=13, height=8)
    _draw_heaviest(heavy, document)
    _draw_steps(steps, document["total"])
    _draw_share(share, document["tensors"])
    _draw_magnitudes(sizes, document)
    save(figure, file)


def _draw_heaviest(axes: Any, document: dict[str, Any]) -> None:
    top = [t for t in document["tensors"] if t["bytes"]][:_HEAVIEST]
    names = [plain(t["name"] if len(t["name"]) <= _NAME else "…" + t["name"][-_NAME:]) for t in top]
    rest = document["total"]["bytes"] - sum(t["bytes"] for t in top)
    sizes = [t["bytes"] / 1e3 for t in top]
    if rest:
        names.append("all others")
        sizes.append(rest / 1e3)
    rows = range(len(names))
    axes.barh(rows, sizes, color="C0")
    axes.set_yticks(rows, names, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="kB", title=f"bytes: {document['total']['bytes']:,}")


def _draw_steps(axes: Any, total: dict[str, Any]) -> None:
    ranges = list(total["ulps"])
    for number, way in enumerate(WAYS):
        counts = [total["ulps"][name][way] for name in ranges]
        axes.bar(
            [k + 0.3 * (number - 1) for k in range(len(ranges))],
            counts,
            width=0.3,
            label=f"{way} zero" if number else "away from zero",
        )
    axes.set_xticks(range(len(ranges)), ranges, fontsize=8, rotation=45)
    axes.set(xlabel="ULPs", ylabel="changes", title="how far values moved")
    if ranges:
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.5)
        axes.legend(fontsize=8)


def _draw_share(axes: Any, tensors: list[dict[str, Any]]) -> None:
    there = sorted((t for t in tensors if t["words"]), key=lambda t: _natural(t["name"]))
    shares = [100 * t["share"] for t in there]
    axes.scatter(
        range(len(there)), shares, s=[4 + 60 * t["words"] / max(u["words"] for u in there) for t in there], alpha=0.6
    )
    if any(shares):
        axes.set_yscale("symlog", linthresh=0.01)
    axes.set(xlabel="tensors, by name (area: values)", ylabel="changed, %", title="changed share through the model")
    axes.grid(alpha=0.3)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdecimal() and part.isascii() else (-1, part) for part in name.split(".")]


def _draw_magnitudes(axes: Any, document: dict[str, Any]) -> None:
    found = document["total"]["magnitudes"]
    axes.set(xlabel="log₂ |w|", ylabel="values", title="how large the weights are")
    if found is None:
        axes.text(0.5, 0.5, "unknown without the base (--base DIR)", ha="center", transform=axes.transAxes)
        return
    for name, label, colour in (("by_exponent", "all", "C7"), ("changed_by_exponent", "changed", "C3")):
        exponents = sorted(map(int, found[name]))
        axes.bar(
            [e + 0.5 for e in exponents], [found[name][str(e)] for e in exponents], width=0.9, label=label, color=colour
        )
    if found["by_exponent"]:
        axes.set_yscale("log")
    thresholds = {
        (t["dtype"], t["magnitudes"]["threshold"])
        for t in document["tensors"]
        if t["magnitudes"] and t["magnitudes"]["threshold"]
    }
    for number, (dtype, value) in enumerate(sorted(thresholds)):
        axes.axvline(
            math.log2(value), color="k", linestyle=["-", "--", ":"][number % 3], label=f"shows an update in {dtype}"
        )
    axes.legend(fontsize=8)

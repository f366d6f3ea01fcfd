"""The guard's bars (limits on speed and size): their runs in the short form, and the figures that count. Figures are
named ``BAR: FIGURE``; the form is unchanged until ``FORM`` changes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from netem.guard import loopback_swarm
from netem.guard.paired_ratios import Figure
from netem.guard.saved_steps import save, step
from netem.guard.source_trees import Tree

FORM: Final = 1
"""Records of another form are not comparable."""
STATE_MIB: Final = 32
CODECS: Final = ("context", "flat", "dense")
FAULT: Final = "kill head middle"
MEMORY: Final = "/dev/shm"

Run = Callable[[Tree, Path], dict[str, float]]
SECONDS, BYTES, TIMES = "s", "bytes", "×"


@dataclass(frozen=True, slots=True)
class Bar:
    """``run``: one measurement with a tree's code in an empty folder; returns figures by name. ``once``: the same code
    always gives the same figures. ``lacks``: the missing requirement, or None.
    """

    name: str
    figures: Mapping[str, Figure]
    run: Run
    once: bool = False
    lacks: Callable[[], str | None] = lambda: None


def _root() -> str | None:
    return None if os.geteuid() == 0 else "only root can make its networks"


def _torch() -> str | None:
    return (
        None
        if importlib.util.find_spec("torch") is not None
        else "torch is not installed: pip install 'p2pcast[trainer]'"
    )


def _pair(folder: Path) -> tuple[Path, Path]:
    old, new = step(STATE_MIB)
    return save(folder / "old", old), save(folder / "new", new)


def _sizes(tree: Tree, folder: Path) -> dict[str, float]:
    old, new = _pair(folder)
    out: dict[str, float] = {}
    for codec in CODECS:
        file = folder / f"{codec}.p2pd"
        tree.run(folder, "-m", "p2pcast.cli", "delta", "diff", old, new, "--codec", codec, "-o", file, "--json")
        found = json.loads(tree.run(folder, "-m", "p2pcast.cli", "inspect", file, "--json"))
        out |= {f"{codec}, payload": found["log_bytes"], f"{codec}, file": found["bytes"]}
    return out


def _codec(tree: Tree, folder: Path) -> dict[str, float]:
    old, new = _pair(folder)
    found = tree.bench(folder, "codec", "--old", old, "--new", new, "--working-set", STATE_MIB)
    rows = {row["format"]: row for row in found["formats"]["rows"]}
    return {
        f"{codec}, {way} over a scan": 1 / rows[codec][f"{way}_vs_scan"]
        for codec in CODECS
        for way in ("encode", "decode")
    }


def _relay(tree: Tree, folder: Path) -> dict[str, float]:
    found = tree.bench(folder, "relay", "--payload", 128, "--runs", 1)
    return {
        "CPU a GB, plain": found["cpu_s_per_gb_plaintext"],
        "CPU a GB, TLS": found["cpu_s_per_gb_tls"],
        "memory peak": found["peak_rss_bytes"],
    }


def _broadcast(tree: Tree, folder: Path) -> dict[str, float]:
    found = tree.bench(
        folder, "broadcast", "--peers", 8, "--payload", 24, "--rounds", 1, "--no-rivals", "--dir", folder
    )
    [row] = found["rows"]
    return {
        "to the last peer over the ideal": row["all_over_ideal"],
        "CPU of all": row["cpu_s"],
        "CPU of the busiest": row["busiest_cpu_s"],
    }


def _catchup(tree: Tree, folder: Path) -> dict[str, float]:
    found = tree.bench(folder, "catchup", "--versions", 8, "--state", 16)
    out: dict[str, float] = {"deltas": found["chain_bytes"], "one squash, offline": found["exact_bytes"]}
    return out | {f"received, {row['way']}": row["bytes"] for row in found["rows"][:3]}


def _faults(tree: Tree, folder: Path) -> dict[str, float]:
    found = tree.bench(folder, "faults", "--only", FAULT)
    [row] = found["rows"]
    return {
        "until bytes flow again": row["gap_s"],
        "until all have it": row["all_s"],
        "bytes sent twice": row["bytes_duplicate"],
    }


def _publish(tree: Tree, folder: Path) -> dict[str, float]:
    found = tree.bench(folder, "publish", "--mib", 64, "--steps", 3)
    row = next(row for row in found["rows"] if row["row"].startswith("bf16"))
    return {"snapshot": row["snapshot_s"], "to the end of publishing": row["total_s"]}


def _figures(text: str, **options: Any) -> dict[str, Figure]:
    """One ``name | unit`` a line."""
    rows = [line.strip().partition(" | ") for line in text.strip().splitlines()]
    return {name: Figure(unit, **options) for name, _, unit in rows}


BARS: Final[Mapping[str, Bar]] = {
    bar.name: bar
    for bar in (
        Bar(
            "sizes",
            {f"{codec}, {what}": Figure(BYTES, exact=True) for codec in CODECS for what in ("payload", "file")},
            _sizes,
            once=True,
        ),
        Bar(
            "codec",
            {f"{codec}, {way} over a scan": Figure(TIMES) for codec in CODECS for way in ("encode", "decode")},
            _codec,
        ),
        Bar("relay", _figures("CPU a GB, plain | s\nCPU a GB, TLS | s\nmemory peak | bytes"), _relay),
        Bar(
            "broadcast",
            _figures("to the last peer over the ideal | ×\nCPU of all | s\nCPU of the busiest | s"),
            _broadcast,
            lacks=_root,
        ),
        Bar(
            "swarm",
            _figures(
                "hub start to answering | s\nhub SIGTERM to its end | s\n20 kB delta to the last peer | s\npeer "
                "memory peak | bytes"
            ),
            loopback_swarm.measured,
        ),
        Bar(
            "catchup",
            _figures(
                "deltas | bytes\none squash, offline | bytes\nreceived, each delta | bytes\nreceived, squashes that "
                "are kept | bytes\nreceived, by predicted time | bytes",
                exact=True,
            ),
            _catchup,
            once=True,
        ),
        Bar(
            "faults",
            _figures("until bytes flow again | s\nuntil all have it | s")
            | {"bytes sent twice": Figure(BYTES, exact=True)},
            _faults,
        ),
        Bar("publish", _figures("snapshot | s\nto the end of publishing | s"), _publish, lacks=_torch),
    )
}
"""In the order of running."""


def measured(bar: Bar, tree: Tree, folder: Path) -> dict[str, float]:
    """One measurement, in a folder that is created before and removed after it. Raises LocalError."""
    folder.mkdir()
    try:
        found = bar.run(tree, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {name: float(found[name]) for name in bar.figures}

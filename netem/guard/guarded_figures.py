"""The guard's bars (limits on speed and size): their runs in the short form, and the figures that count. Figures are
named ``BAR: FIGURE``; the form is unchanged until ``FORM`` changes.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from netem.guard import loopback_swarm
from netem.guard.paired_ratios import Figure
from netem.guard.saved_steps import save, step
from netem.guard.source_trees import SourceTree

FORM: Final = 1
"""Records of another form are not comparable."""
STATE_MIB: Final = 32
CODECS: Final = ("context", "flat", "dense")
MEMORY: Final = "/dev/shm"

Run = Callable[[SourceTree, Path], dict[str, float]]
SECONDS, TIMES, SIZE = Figure("s"), Figure("×"), Figure("bytes", exact=True)
PEAK: Final = Figure("bytes")


@dataclass(frozen=True, slots=True)
class Bar:
    """``run``: one measurement with a tree's code in an empty folder; returns figures by name. ``once``: the same code
    always gives the same figures. ``needs``: of the machine, as of ``step_run``.
    """

    name: str
    figures: Mapping[str, Figure]
    run: Run
    once: bool = False
    needs: tuple[str, ...] = ()


def _bench(name: str, words: str, figures: Mapping[str, tuple[Figure, Callable[[Any], float]]], **options: Any) -> Bar:
    """A command of ``p2pcast bench``. ``figures``: each with its value in the command's document. ``DIR`` in ``words``
    is the folder.
    """

    def run(tree: SourceTree, folder: Path) -> dict[str, float]:
        found = tree.bench(folder, name, *(folder if word == "DIR" else word for word in shlex.split(words)))
        return {figure: value(found) for figure, (_, value) in figures.items()}

    return Bar(name, {figure: kind for figure, (kind, _) in figures.items()}, run, **options)


def _pair(folder: Path) -> tuple[Path, Path]:
    old, new = step(STATE_MIB)
    return save(folder / "old", old), save(folder / "new", new)


def _sizes(tree: SourceTree, folder: Path) -> dict[str, float]:
    old, new = _pair(folder)
    out: dict[str, float] = {}
    for codec in CODECS:
        file = folder / f"{codec}.p2pd"
        tree.run(folder, "-m", "p2pcast.cli", "delta", "diff", old, new, "--codec", codec, "-o", file, "--json")
        found = json.loads(tree.run(folder, "-m", "p2pcast.cli", "inspect", file, "--json"))
        out |= {f"{codec}, payload": found["log_bytes"], f"{codec}, file": found["bytes"]}
    return out


def _codec(tree: SourceTree, folder: Path) -> dict[str, float]:
    old, new = _pair(folder)
    found = tree.bench(folder, "codec", "--old", old, "--new", new, "--working-set", STATE_MIB)
    rows = {row["format"]: row for row in found["formats"]["rows"]}
    return {
        f"{codec}, {way} over a scan": 1 / rows[codec][f"{way}_vs_scan"]
        for codec in CODECS
        for way in ("encode", "decode")
    }


def _bf16(found: Any) -> Any:
    return next(row for row in found["rows"] if row["row"].startswith("bf16"))


def _by_way(found: Any) -> dict[str, float]:
    return {row["way"]: row["bytes"] for row in found["rows"]}


BARS: Final[Mapping[str, Bar]] = {
    bar.name: bar
    for bar in (
        Bar("sizes", {f"{codec}, {what}": SIZE for codec in CODECS for what in ("payload", "file")}, _sizes, once=True),
        Bar("codec", {f"{c}, {way} over a scan": TIMES for c in CODECS for way in ("encode", "decode")}, _codec),
        _bench(
            "relay",
            "--payload 128 --runs 1",
            {
                "CPU a GB, plain": (SECONDS, lambda found: found["cpu_s_per_gb_plaintext"]),
                "CPU a GB, TLS": (SECONDS, lambda found: found["cpu_s_per_gb_tls"]),
                "memory peak": (PEAK, lambda found: found["peak_rss_bytes"]),
            },
        ),
        _bench(
            "broadcast",
            "--peers 8 --payload 24 --rounds 1 --no-rivals --dir DIR",
            {
                "to the last peer over the ideal": (TIMES, lambda found: found["rows"][0]["all_over_ideal"]),
                "CPU of all": (SECONDS, lambda found: found["rows"][0]["cpu_s"]),
                "CPU of the busiest": (SECONDS, lambda found: found["rows"][0]["busiest_cpu_s"]),
            },
            needs=("root",),
        ),
        Bar(
            "swarm",
            {
                "hub start to answering": SECONDS,
                "hub SIGTERM to its end": SECONDS,
                "20 kB delta to the last peer": SECONDS,
                "peer memory peak": PEAK,
            },
            loopback_swarm.measured,
        ),
        _bench(
            "catchup",
            "--versions 8 --state 16",
            {
                "deltas": (SIZE, lambda found: found["chain_bytes"]),
                "one squash, offline": (SIZE, lambda found: found["exact_bytes"]),
                "received, each delta": (SIZE, lambda found: _by_way(found)["each delta"]),
                "received, squashes that are kept": (SIZE, lambda found: _by_way(found)["squashes that are kept"]),
                "received, by predicted time": (SIZE, lambda found: _by_way(found)["by predicted time"]),
            },
            once=True,
        ),
        _bench(
            "faults",
            "--only 'kill head middle'",
            {
                "until bytes flow again": (SECONDS, lambda found: found["rows"][0]["gap_s"]),
                "until all have it": (SECONDS, lambda found: found["rows"][0]["all_s"]),
                "bytes sent twice": (SIZE, lambda found: found["rows"][0]["bytes_duplicate"]),
            },
        ),
        _bench(
            "publish",
            "--mib 64 --steps 3",
            {
                "snapshot": (SECONDS, lambda found: _bf16(found)["snapshot_s"]),
                "to the end of publishing": (SECONDS, lambda found: _bf16(found)["total_s"]),
            },
            needs=("torch",),
        ),
    )
}
"""In the order of running."""


def measured(bar: Bar, tree: SourceTree, folder: Path) -> dict[str, float]:
    """One measurement, in a folder that is created before and removed after it. Raises LocalError."""
    folder.mkdir()
    try:
        found = bar.run(tree, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {name: float(found[name]) for name in bar.figures}

"""`make guard`: two trees that run their own code, the record beside a run, and one cheap bar from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from netem.guard import source_trees
from netem.guard.__main__ import compared, recorded
from netem.guard.guarded_figures import BARS, FORM
from netem.guard.paired_ratios import Figure, row
from netem.guard.source_trees import BASELINE, ROOT, SourceTree, baseline, check_pinned
from p2pcast.ground.errors import LocalError, UsageError


@pytest.fixture(scope="module")
def previous() -> SourceTree:
    return baseline(None)


def guard(*words: object) -> subprocess.CompletedProcess[str]:
    """From the repository's root, as in make."""
    return subprocess.run(
        [sys.executable, "-m", "netem.guard", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_the_baseline_runs_its_own_code(previous: SourceTree) -> None:
    """This holds in our repository's root too, where Python would find our own code first."""
    where = "import netem, p2pcast, trainer_node; print(p2pcast.__file__, netem.__file__, trainer_node.__file__)"
    for tree in (previous, source_trees.ours()):
        for folder in (ROOT, previous.path):
            assert all(Path(found).is_relative_to(tree.path) for found in tree.run(folder, "-c", where).split())


def test_unpinned_baseline_archive_is_refused(tmp_path: Path) -> None:
    data = BASELINE.read_bytes()
    check_pinned(BASELINE, data)
    with pytest.raises(LocalError, match="is not the archive whose SHA-256"):
        check_pinned(BASELINE, data + b"\0")
    check_pinned(tmp_path / "another.tar.xz", b"")  # a user's own archive is not pinned


def test_other_baselines(previous: SourceTree) -> None:
    assert baseline(str(previous.path)).path == previous.path
    with pytest.raises(UsageError, match="nor a revision of this repository"):
        baseline("no-such-thing")


@pytest.mark.prove  # the pure tests of this file are the sample
def test_one_bar_from_end_to_end(tmp_path: Path) -> None:
    record, now = tmp_path / "guard.json", tmp_path / "now.json"
    words = ("--only", "sizes", "--pairs", 1, "--record", record, "--json", now)
    first = guard(*words, "--write")
    assert first.returncode in (0, 1), first.stderr  # 1: sizes have grown
    written = recorded(record)
    assert written is not None
    assert set(written["figures"]) == {f"sizes: {name}" for name in BARS["sizes"].figures}
    assert (written["form"], written["baseline"], written["failed"]) == (FORM, "p2pcast-0.1.0", {})
    again = guard(*words)
    assert "Recorded: " in again.stdout
    figures = json.loads(now.read_text())["figures"]
    assert {figure["since"] for figure in figures.values()} == {"same"}  # sizes are exact
    assert {k: f["ours"] for k, f in figures.items()} == {k: f["ours"] for k, f in written["figures"].items()}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--only", "nothing"), "there is no bar 'nothing'"),
        (("--pairs", 0), "--pairs: 1 at least"),
        (("--record", ROOT / "README.md"), "is not a record"),
    ],
)
def test_usage_errors_are_one_line(words: tuple[object, ...], why: str) -> None:
    done = guard(*words)
    assert done.returncode in (1, 2)
    assert why in done.stderr
    assert "Traceback" not in done.stderr


def test_figures_of_catching_up_go_by_the_name_of_the_way(tmp_path: Path) -> None:
    rows = [{"way": way, "bytes": len(way)} for way in ("by predicted time", "squashes that are kept", "each delta")]
    tree = Mock(**{"bench.return_value": {"chain_bytes": 7, "exact_bytes": 3, "rows": rows}})
    assert BARS["catchup"].run(tree, tmp_path)["received, each delta"] == len("each delta")
    rows[0]["way"] = "by time"
    with pytest.raises(LookupError, match="by predicted time"):
        BARS["catchup"].run(tree, tmp_path)


def test_a_record_of_another_form_or_baseline_is_not_compared_with() -> None:
    name = next(iter(BARS["relay"].figures))
    figures = {f"relay: {name}": row(Figure("s"), [2.0] * 5, [1.0] * 5)}
    now = {"form": FORM, "baseline_ident": "a", "figures": {k: dict(f) for k, f in figures.items()}}
    for change in ({"form": FORM + 1}, {"baseline_ident": "b"}, {"figures": {}}):
        compared(now, {**now, "figures": figures, **change})
        assert "since" not in now["figures"][f"relay: {name}"]
    compared(now, {**now, "figures": figures})
    assert now["figures"][f"relay: {name}"]["since"] == "same"

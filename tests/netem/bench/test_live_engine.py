"""``bench live``: figures from gaps and switches, and a small run of real parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from netem.bench import live_figures
from netem.bench.commands.engine_commands import live as command
from netem.bench.live_engine import DENSE, OURS, LiveEngineOptions, bench_live, confirmed, verdict
from netem.bench.live_figures import Switch
from netem.demo.verdict import DemoCheck
from p2pcast.ground.errors import UsageError


def switch(began_s: float, ended_s: float, **more: Any) -> Switch:
    return Switch("0.1", began_s, ended_s, **more)


# -- figures


def test_a_gap_belongs_to_an_overlapping_switch() -> None:
    gaps = [(0, 0.0, 1.0), (0, 1.0, 2.5), (0, 2.5, 2.6), (0, 2.6, 9.0), (1, 2.0, 2.1)]
    seen, free = live_figures.sort_gaps(gaps, [switch(2.0, 3.0), switch(20.0, 21.0)])
    assert seen == [[pytest.approx(6.4), pytest.approx(0.1)], []], "the worst gap of each client within an answer"
    assert free == [1.0]


def test_touching_is_not_overlapping() -> None:
    seen, free = live_figures.sort_gaps([(0, 0.0, 1.0), (0, 2.0, 3.0)], [switch(1.0, 2.0)])
    assert (seen, free) == ([[]], [1.0, 1.0])


def test_missing_measurement_is_none() -> None:
    empty = live_figures.row("x", [], [], {})
    assert (empty["pause_median_s"], empty["gap_p99_s"], empty["recomputed_tokens"], empty["switches"]) == (
        None,
        None,
        None,
        0,
    )
    assert set(live_figures.ratios(empty, empty).values()) == {None}
    assert live_figures.ratio(1.0, 0.0) is None


SPANS = st.tuples(st.floats(0, 100), st.floats(0, 10)).map(lambda span: (span[0], span[0] + span[1]))


@given(st.lists(st.tuples(st.integers(0, 3), SPANS), max_size=40), st.lists(SPANS, max_size=5))
def test_each_gap_is_somewhere_and_no_worst_gap_is_lost(gaps: list[Any], switches: list[Any]) -> None:
    table = [(client, *span) for client, span in gaps]
    chosen = [switch(*span) for span in switches]
    seen, free = live_figures.sort_gaps(table, chosen)
    free_expected = [b - a for _, a, b in table if not any(a < s.ended_s and b > s.began_s for s in chosen)]
    assert free == pytest.approx(free_expected)
    for one, lengths in zip(chosen, seen, strict=True):
        met = [(c, b - a) for c, a, b in table if a < one.ended_s and b > one.began_s]
        assert len(lengths) == len({c for c, _ in met})
        assert max(lengths, default=0) == pytest.approx(max((length for _, length in met), default=0))


def test_a_row_and_its_ratios_by_hand() -> None:
    gaps = [(client, at, at + length) for client, length in ((0, 0.3), (1, 0.1)) for at in (1.0, 5.0)]
    gaps += [(0, 8.0, 8.02)]
    ours = [
        switch(1.0, 1.2, pause_s=0.01, recomputed_tokens=8, parts_s={"worker": 0.002}),
        switch(5.0, 5.4, pause_s=0.03, recomputed_tokens=16, parts_s={"worker": 0.004, "other": 0.1}),
    ]
    row = live_figures.row("ours", ours, gaps, {"tokens": 7})
    assert (row["system"], row["switches"], row["tokens"]) == ("ours", 2, 7)
    assert (row["pause_median_s"], row["commands_median_s"]) == (0.02, 0.3)
    assert (row["gaps_at_switches"], row["gap_p50_s"], row["gap_worst_median_s"]) == (4, 0.2, 0.3)
    assert (row["gaps_elsewhere"], row["gap_elsewhere_p50_s"]) == (1, 0.02)
    assert (row["recomputed_tokens"], row["recomputed_tokens_median"]) == (24, 12)
    assert row["parts_median_s"] == {"worker": 0.003, "other": 0.1}
    dense = live_figures.row("dense", [switch(1.0, 2.0, pause_s=0.5)], gaps, {})
    assert live_figures.ratios(row, dense)["pause_ratio"] == 25
    assert live_figures.ratios(row, dense)["commands_ratio"] == pytest.approx(1 / 0.3, abs=0.01)


LOG = """\
1763719000.000001 (EngineCore pid=7) INFO 11-21 scheduler.py:2756] setting pause state to PAUSED_ALL
(Worker pid=9) INFO something else
1763719000.020000 (EngineCore pid=7) INFO 11-21 scheduler.py:2756] setting pause state to PAUSED_ALL
1763719000.500001 (EngineCore pid=7) INFO 11-21 scheduler.py:2756] setting pause state to UNPAUSED
1763719001.000000 (EngineCore pid=7) INFO 11-21 scheduler.py:2756] setting pause state to UNPAUSED
1763719002.000000 (EngineCore pid=7) INFO 11-21 scheduler.py:2756] setting pause state to PAUSED_NEW
"""


def test_pauses_match_the_scheduler_log() -> None:
    assert live_figures.pauses(LOG.splitlines()) == [(1763719000.000001, 1763719000.500001)]
    assert live_figures.pauses([]) == []


def test_pause_belongs_to_the_switch_at_its_end() -> None:
    stood_still = [(0.5, 1.5), (1.6, 1.7), (5.0, 9.0)]
    found = live_figures.with_pauses([switch(1.0, 2.0), switch(3.0, 6.0)], stood_still)
    assert found[0].pause_s == pytest.approx(1.1)
    assert found[1].pause_s is None, "no pause is invented"


# -- the whole bench


def test_steps_for_fresh_engines_have_the_first_and_the_last() -> None:
    assert LiveEngineOptions(Path("x"), versions=7, fresh_every=3).fresh_steps == [1, 3, 6, 7]
    assert LiveEngineOptions(Path("x"), versions=3).fresh_steps == [1, 2, 3]


def test_invalid_model_size_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="multiple of 128"):
        bench_live(LiveEngineOptions(tmp_path / "w", hidden=200))
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(("verdict", "code"), [("PASS", 0), ("FAIL", 1)])
def test_exit_code_reports_failed_checks(monkeypatch: pytest.MonkeyPatch, verdict: str, code: int) -> None:
    monkeypatch.setattr(
        "netem.bench.live_engine.bench_live", lambda options: {"verdict": verdict, "versions": options.versions}
    )
    done = CliRunner().invoke(command, ["--versions", "4", "--json"])
    assert (done.exit_code, json.loads(done.stdout)) == (code, {"verdict": verdict, "versions": 4})


def test_an_engine_is_confirmed_by_a_row_without_differences() -> None:
    right = {"name": "e", "version": "0.1", "state": "00", "wrong": [], "unknown": []}
    assert confirmed([right], right)
    assert confirmed([right | {"lacks": []}], right)
    for other in ({"lacks": ["adapter"]}, {"state": "01"}, {"wrong": ["w"]}):
        assert not confirmed([right | other], right)
    assert not any(confirmed(engines, right) for engines in (None, [], [right, right]))


def test_one_failed_check_fails_the_run() -> None:
    checks = [DemoCheck("no request failed", True, ""), DemoCheck("own weights", True, "")]
    assert verdict(checks) == "PASS"
    assert verdict([*checks, DemoCheck("answers", False, "version 2 answers otherwise")]) == "FAIL"
    assert verdict([]) == "FAIL", "nothing was checked"


@pytest.mark.prove  # tests/rollout_node/vllm/test_vllm_server.py is the sample
@pytest.mark.vllm
def test_three_versions_into_a_real_server(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs vLLM", exc_type=ImportError)
    words = ["--versions", "3", "--clients", "2", "--tp", "1", "--hidden", "128", "--layers", "1"]
    words += ["--fresh-every", "2", "--dir", str(tmp_path / "w"), "-o", str(tmp_path / "live.json")]
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    document = json.loads((tmp_path / "live.json").read_text())
    assert (done.exit_code, document["verdict"]) == (0, "PASS"), document["checks"]
    names = [check["name"] for check in document["checks"]]
    for promise in (
        "no request failed",
        "own weights have the digest",
        f"{OURS}: the live vLLM",
        f"{DENSE}: the live vLLM",
    ):
        assert any(promise in name for name in names)
    ours, dense = document["rows"]
    assert [ours["system"], dense["system"]] == [OURS, DENSE]
    assert ours["switches"] == dense["switches"] == 3
    assert [commit["version"] for commit in document["commits"]] == ["0.1", "0.2", "0.3"]
    assert ours["gaps_at_switches"] + dense["gaps_at_switches"] > 0, (
        "clients were within an answer at one of six switches at least"
    )
    for row in (ours, dense):
        assert row["requests"] > 0
        assert 0 < row["pause_median_s"] <= row["commands_median_s"]
    assert set(ours["parts_median_s"]) == {"paused", "command", "worker"}, "the engine core switched by itself"
    assert all(commit["recomputed_tokens"] is not None for commit in document["commits"])
    assert all(0 < commit["changed"] < document["params"] and commit["bytes"] > 0 for commit in document["commits"])
    assert document["requests"]["failed"] == 0
    assert {"pause_ratio", "commands_ratio", "gap_p99_ratio", "gap_worst_ratio"} <= set(document)
    assert "ratio" in done.stdout

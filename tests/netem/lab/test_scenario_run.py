"""Scenarios as users run them: by name or from a file, complete and interrupted, without remains."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from netem.emulation import uml
from netem.lab import scenario_run
from netem.lab.case_network import emulated, results
from netem.lab.experiments import links
from netem.lab.scenario import parse
from p2pcast.cli import main
from p2pcast.ground.errors import LocalError, UsageError

LAB = [sys.executable, "-m", "p2pcast.cli", "lab"]
END_S = 600.0
TRIES = 5
TWO = """
what = "two hosts"
minutes = 0.1
experiment = "links"
[network]
[[hosts]]
name = "a"
[[hosts]]
name = "b"
rate = "{rate}"
[columns]
rate_bps = "bit/s"
[[plots]]
x = "from"
y = "rate_bps"
title = "rates"
file = "rates"
kind = "bar"
"""
HERE = """
what = "no network"
minutes = 0.1
experiment = "links"
"""
ARGUMENT: dict[str, Any] = {
    "network": {"hosts": [{"name": "a", "rate": "50mbit"}, {"name": "b", "rate": "50mbit"}]},
    "events": [],
    "parameters": {},
}


def lab(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LAB, *words], capture_output=True, text=True, timeout=600, check=False)


def holders(pid: int | str = "self") -> set[int]:
    """Descendants of a process, without the process itself."""
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            found |= {int(child), *holders(child)}
    return found


@pytest.mark.root
def test_user_scenario_file_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(TWO.format(rate="50mbit"))
    said = lab(
        str(tmp_path / "mine.toml"), "--json", "-o", str(tmp_path / "out"), "--set", 'hosts.b.rate=["40mbit", "20mbit"]'
    )
    document = json.loads(said.stdout)
    assert document == json.loads((tmp_path / "out" / "result.json").read_text())
    assert document["backend"] == "rate"
    assert document["failed"] == []
    assert [
        (row["case"], row["hosts.b.rate"], row["from"], row["to"], row["asked_rate_bps"]) for row in document["rows"]
    ] == [
        (1, "40mbit", "b", "a", 4e7),
        (1, "40mbit", "a", "b", 4e7),
        (2, "20mbit", "b", "a", 2e7),
        (2, "20mbit", "a", "b", 2e7),
    ]
    # On a busy machine a link may be slower, and is reported; it is never faster.
    assert said.returncode == any(each["off"] for each in document["calibrations"])
    assert all(0 < row["rate_bps"] < 1.05 * row["asked_rate_bps"] for row in document["rows"] if row["rate_bps"])
    only = json.loads(lab(str(tmp_path / "mine.toml"), "--json", "-o", str(tmp_path / "out"), "--only", "1").stdout)
    assert {row["case"] for row in only["rows"]} == {1}


def test_unrunnable_scenario_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(TWO.format(rate="50mbit") + "colour = 'red'\n")
    eventful = tmp_path / "eventful.toml"
    eventful.write_text(TWO.format(rate="50mbit") + "[[events]]\ndo = 'cut'\nat_s = 1\nversion = 1\nhost = 'a'\n")
    for words, why in (
        (["nothing"], "there is no scenario 'nothing'"),
        ([str(tmp_path / "mine.toml")], r"unknown key: plots[1].colour"),
        (["smoke", "--backend", "rate"], "asks for delay or loss"),
        (["smoke", "--set", "mtu"], "write KEY=VALUE"),
        ([str(eventful)], "case 1: events: experiment 'links' does not support any"),
    ):
        said = lab(*words)
        assert said.returncode == 2
        assert why in said.stderr
        assert len(said.stderr.splitlines()) == 1


def test_short_scenario_runs_on_any_backend(tmp_path: Path) -> None:
    """The short scenario, on any available backend. On a busy machine links may be off, and are reported; delay and
    loss are present all the same.
    """
    said = lab("smoke", "--json", "-o", str(tmp_path))
    if "cannot be emulated here" in said.stderr:
        assert "lab doctor" in said.stderr
        return
    document = json.loads(said.stdout)
    assert document["failed"] == []
    rows = {(row["from"], row["to"]): row for row in document["rows"]}
    assert len(rows) == 6
    for row in document["rows"]:
        assert row["rtt_s"] is None or row["rtt_s"] > 0.95 * row["asked_rtt_s"]
        assert row["rate_bps"] is None or row["rate_bps"] < 1.05 * row["asked_rate_bps"]
    # Sum up all links: of a few hundred packets, a single link may lose hardly any.
    assert sum(row["loss"] for row in document["rows"]) >= 0.3 * sum(row["asked_loss"] for row in document["rows"])
    assert any(row["rtt_s"] for row in document["rows"])
    assert (tmp_path / "smoke-round-trips.png").exists()


@pytest.mark.root
@pytest.mark.parametrize(
    "end", [*(pytest.param(end, marks=pytest.mark.prove) for end in (signal.SIGINT, signal.SIGTERM)), signal.SIGKILL]
)
def test_interrupted_scenario_leaves_nothing(tmp_path: Path, end: signal.Signals) -> None:
    (tmp_path / "mine.toml").write_text(TWO.format(rate="500kbit"))
    _cut_short([*LAB, str(tmp_path / "mine.toml"), "-o", str(tmp_path / "out")], 2, end)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.root
def test_interrupted_run_leaves_no_programs_or_folders(tmp_path: Path) -> None:
    text = (
        TWO.format(rate="10mbit").replace('"links"', '"stripes"').replace('"a"', '"parent"').replace('"b"', '"child"')
    )
    (tmp_path / "mine.toml").write_text(
        text + "[parameters]\nrounds = 1000\nlimit = 1000\ncongestion = ['reno']\nstripes = [1]\n"
    )
    command = [*LAB, str(tmp_path / "mine.toml"), "-o", str(tmp_path / "out")]
    # Two hosts, the switch, and a process at each host.
    maker = _cut_short(command, 5, signal.SIGTERM, until="  1 × reno")
    assert not [path for path in Path(tempfile.gettempdir()).iterdir() if path.name.endswith(f"-{maker}")]


def test_interrupted_uml_kernel_leaves_nothing(tmp_path: Path) -> None:
    if shutil.which(uml.KERNEL) is None or not uml.runs_programs():
        assert "cannot be emulated here: uml lacks user-mode-linux" in lab("smoke", "--backend", "uml").stderr
        return
    maker = _cut_short([*LAB, "smoke", "--backend", "uml", "-o", str(tmp_path / "out")], 4, signal.SIGINT)
    assert not list(Path(tempfile.gettempdir()).glob(f"{uml.PREFIX}{maker}-*"))


def _begun(command: list[str], until: str) -> subprocess.Popen[str]:
    """A scenario process that has printed ``until``. A busy machine may be too slow for the requested network; the
    start is then repeated.
    """
    for _ in range(TRIES):
        maker = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert maker.stderr is not None
        said = ""
        for line in iter(maker.stderr.readline, ""):
            if line.startswith(until):
                return maker
            said += line
        maker.communicate()
        assert "left out" in said, said
    pytest.fail(f"the process never printed {until!r}: {said}")


def _cut_short(command: list[str], processes: int, end: signal.Signals, until: str = "case 1") -> int:
    """End the process once it has printed ``until`` and has at least ``processes`` descendants. Returns its id."""
    maker = _begun(command, until)
    try:
        while len(below := holders(maker.pid)) < processes:
            assert maker.poll() is None
            time.sleep(0.01)
        watched = []
        for pid in below:
            with suppress(ProcessLookupError):  # some finish their work and end
                watched.append(os.pidfd_open(pid))
        maker.send_signal(end)
        assert maker.wait(END_S) == (-end if end == signal.SIGKILL else 130)
        for pidfd in watched:
            assert select.select([pidfd], [], [], END_S)[0], "one of its descendants still runs"
            os.close(pidfd)
    finally:
        maker.kill()
        maker.communicate()
    return maker.pid


@pytest.mark.root
def test_failed_run_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netem.emulation.calibration.measure", lambda net, wanted=(): [])
    before = holders()

    def broken() -> None:
        with emulated(ARGUMENT) as (_, calibrated):
            assert len(holders() - before) == 3
            assert calibrated["off"] == []
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert holders() == before
    saying = links.results(ARGUMENT)
    assert next(saying)["off"] == []
    assert holders() > before
    saying.close()  # type: ignore[attr-defined]
    assert holders() == before


def test_remaining_cases_run_in_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    boots: list[list[int]] = []

    def ending(backend: str, work: str, argument: dict[str, Any]) -> Iterator[dict[str, Any]]:
        numbers = [case["number"] for case in argument["cases"]]
        boots.append(numbers)
        for number in numbers:
            if number == 2:
                raise LocalError("user-mode Linux ended early")
            yield {"case": number, "row": {"x": number}}
            yield {"case": number, "done": True}

    monkeypatch.setattr(scenario_run, "results", ending)
    scenario = parse("s", TWO.format(rate="1mbit") + "[sweep]\n'hosts.b.delay_ms' = [1, 2, 3, 4]")
    document = scenario_run.run(scenario, "uml", only=(1, 2, 4))
    assert boots == [[1, 2, 4], [4]]
    assert [(row["case"], row["x"], row["hosts.b.delay_ms"]) for row in document["rows"]] == [(1, 1, 1), (4, 4, 4)]
    assert document["failed"] == [{"case": 2, "hosts.b.delay_ms": 2, "why": "user-mode Linux ended early"}]
    assert (document["cases"], document["run"]) == (4, [1, 2, 4])


@pytest.mark.parametrize(
    ("last", "code"),
    [({"failed": "it broke"}, 1), ({"off": ["a → b: too slow"], "done": True}, 1), ({"done": True}, 0)],
)
def test_exit_code_reports_missing_figures(
    last: dict[str, Any], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.toml").write_text(HERE)
    said = [{"case": 1, "off": []}, {"case": 1, "row": {"rate_bps": 1}}, {"case": 1, **last}]
    monkeypatch.setattr(scenario_run, "results", lambda backend, work, argument: (each for each in said))
    monkeypatch.setattr(sys, "argv", ["p2pcast", "lab", str(tmp_path / "mine.toml"), "-o", str(tmp_path / "out")])
    ended = 0
    try:
        main()
    except SystemExit as end:
        ended = end.code if isinstance(end.code, int) else 2
    assert ended == code
    assert (tmp_path / "out" / "result.json").exists()


@pytest.mark.root
def test_failed_case_does_not_stop_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network is not measured twice either."""
    measured: list[int] = []

    def breaking(argument: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with emulated(argument) as (_, calibrated):
            yield calibrated
            if argument["parameters"]["bad"]:
                raise LocalError("it broke")
            yield {"row": {"x": 1}}

    monkeypatch.setattr("netem.emulation.calibration.measure", lambda net, wanted=(): measured.append(1) or [])
    monkeypatch.setattr(links, "results", breaking)
    cases = [{"number": n, "argument": {**ARGUMENT, "parameters": {"bad": n == 1}}} for n in (1, 2)]
    said = list(results({"experiment": "links", "cases": cases}))
    assert [{**each, "tries": 1} for each in said if "off" not in each] == [
        {"case": 1, "failed": "it broke", "tries": 1},
        {"case": 2, "row": {"x": 1}, "tries": 1},
        {"case": 2, "done": True, "tries": 1},
    ]
    assert measured == [1]
    with pytest.raises(UsageError, match="no experiment"):
        list(results({"experiment": "none", "cases": []}))


def test_unexpected_error_fails_one_case_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes unexpected errors; invalid arguments end the run only while no row can be lost."""

    def work(argument: dict[str, int]) -> Iterator[dict[str, object]]:
        if argument["n"] == 2:
            raise KeyError("bytes_duplicate")
        if argument["n"] == 3:
            raise UsageError("no sense")
        yield {"row": argument}

    def said(*numbers: int) -> list[dict[str, object]]:
        asked = [{"number": n, "argument": {"n": n}} for n in numbers]
        return list(results({"experiment": "any", "cases": asked}))

    monkeypatch.setattr("netem.lab.case_network.experiment", lambda name: work)
    first, done, broken, strange, last, _ = said(1, 2, 3, 4)
    assert (first["row"], done["done"], last["row"]) == ({"n": 1}, True, {"n": 4})
    assert re.fullmatch(r"KeyError: 'bytes_duplicate' \(test_scenario_run\.py:\d+\)", str(broken["failed"]))
    assert strange == {"case": 3, "failed": "no sense"}
    with pytest.raises(UsageError, match="no sense"):
        said(3, 1)

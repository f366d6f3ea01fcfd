"""`make bench`: measurements are kept and resumed; the text follows from them alone, and names the comparisons that
p2pcast loses.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from netem.report import __main__ as command
from netem.report import parts as measuring
from netem.report.document import write
from netem.report.host_sections import publish
from netem.report.lab_sections import lab
from netem.report.network_sections import STATE, broadcast, faults, latency, stripes
from netem.report.parts import PARTS, ReportPart, kept, measure
from netem.report.section_text import RivalComparison, figure, merged, share, table
from netem.report.size_sections import catchup
from p2pcast.ground.errors import LocalError, UsageError

MACHINE = {"cpu": "a processor", "cores": 4, "memory_bytes": 16_000_000_000, "kernel": "Linux 6", "load": 0.25}
CATCHUP = {
    "versions": 8,
    "codec": "context",
    "rate_bits_s": 20e6,
    "state_bytes": 16 << 20,
    "chain_bytes": 700,
    "exact_bytes": 300,
    "rows": [
        {
            "way": way,
            "artifacts": count,
            "bytes": size,
            "seconds": seconds,
            "to_chain": size / 700,
            "to_exact": size / 300,
        }
        for way, count, size, seconds in (
            ("each delta", 8, 700, 2.0),
            ("by predicted time", 2, 400, 3.0),
            ("one made for it", 1, 300, 4.0),
        )
    ],
}


def row(system: str, peers: int, ratio: float, **settings: Any) -> dict[str, Any]:
    return {
        "system": system, "peers": peers, "payload_bytes": 24 << 20, "ideal_s": 2.0, "p90_s": ratio, "all_s": 2 * ratio,
        "all_over_ideal": ratio, "every_over_ideal": [ratio], "staged_s": None, "cpu_s": 3.0, "busiest_cpu_s": 1.0,
        "machine_busy": 0.5, "settings": settings,
    }  # fmt: skip


BROADCAST = {
    "uplink_bps": 300e6,
    "peer_bps": 100e6,
    "congestion": "bbr",
    "rounds": 3,
    "cores": 4,
    "rows": [
        row("p2pcast", 8, 1.15, chains=3),
        row("bare chain", 8, 1.06),
        row("libtorrent", 8, 1.4, version="2.1"),
        {"system": "shardcast", "peers": 8, "skipped": "shardcast is not installed"},
        row(STATE, 8, 0.05, moved_bytes=210_000, changed_share=0.01),
        row("rsync", 8, 1.2, moved_bytes=10_000_000, peer_sent_bytes=3_700_000),
    ],
}
STRIPES = {
    "backend": "uml",
    "rate_bps": 50e6,
    "payload_bytes": 16 << 20,
    "ways": [
        {
            "rtt_s": 0.15,
            "loss": 0.005,
            "off": [],
            "by_congestion": {
                "cubic": {"of_ceiling": {"1": 0.03, "8": 0.35}},
                "bbr": {"of_ceiling": {"1": 0.3, "8": 0.8}},
            },
            "best": {"congestion": "bbr", "stripes": 8, "bps": 1},
            "choice": {"congestion": "bbr", "stripes": 8, "to_best": 0.8, "to_single_cubic": 26.0},
        },
        {"rtt_s": 0.01, "loss": 0.0, "off": ["parent → child: 40 instead of 50 Mbit/s"]},
    ],
    "rows": [{"stripes": n, "congestion": name} for name in ("cubic", "bbr") for n in (1, 8)],
}
FAULTS = {
    "undisturbed_s": 2.5,
    "gap_median_s": 0.1,
    "gap_worst_s": 1.9,
    "late": 1,
    "bytes_duplicate": 0,
    "wrong": 0,
    "payload_bytes": 4 << 20,
    "rate_bits_s": 16e6,
    "failed": [],
    "rows": [
        {
            "fault": "kill",
            "position": place,
            "moment": "start",
            "gap_s": gap,
            "all_s": 3.0,
            "outage_s": out,
            "most_s": most,
            "bytes_duplicate": 0,
            "wrong": [],
        }
        for place, gap, out, most in (("hub", 1.5, 0.8, 5.0), ("head", 1.25, 0.0, 2.9))
    ],
}
LAB = {
    "scenario": "wan",
    "what": "a long way",
    "paper": "a paper, section 7",
    "scale": "small",
    "backend": "uml",
    "machine": MACHINE,
    "versions": {"python": "3.11"},
    "began": "2026-01-01T00:00:00+00:00",
    "took_s": 60.0,
    "cases": 2,
    "run": [1, 2],
    "sweep": {"delay": [1, 2], "system": []},
    "columns": {"system": "system", "all_s": "last, s"},
    "reference": [{"system": "theirs", "all_s": 9.0, "source": "Figure 1"}],
    "rows": [
        {"case": 1, "system": "p2pcast", "delay": 1, "all_s": 2.0},
        {"case": 2, "system": "libtorrent", "delay": 1, "all_s": 1.5},
        {"case": 3, "system": "p2pcast", "delay": 2, "all_s": 2.0},
        {"case": 4, "system": "libtorrent", "delay": 2, "all_s": 2.5},
    ],
    "failed": [],
    "calibrations": [{"case": 1, "off": ["too slow"]}],
    "holds": [
        {
            "what": "quick",
            "held": False,
            "rows": 2,
            "nearest": None,
            "missed": [{"row": {}, "value": 2.0, "bound": 1.2, "margin": -0.67}],
        },
        {"what": "right", "held": True, "rows": 2, "nearest": {"value": 1.0, "bound": 1.2}, "missed": []},
        {"what": "seen", "held": None, "rows": 0, "nearest": None, "missed": []},
    ],
}


def envelope(name: str, document: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {
        "part": name,
        "command": f"p2pcast bench {name}",
        "quick": False,
        "began": "2026-01-01T00:00:00+00:00",
        "took_s": 12.0,
        "machine": MACHINE,
        "versions": {"python": "3.11"},
        "exit_code": 0,
        "document": document,
        **other,
    }


ALL = {
    "broadcast": envelope("broadcast", BROADCAST),
    "stripes": envelope("stripes", STRIPES, exit_code=1),
    "faults": envelope("faults", FAULTS),
    "catchup": envelope("catchup", CATCHUP, quick=True),
    "live": {"part": "live", "why": "vllm is not installed"},
}


def lost(section: Any) -> list[tuple[str, str | None]]:
    return [(loss.what, loss.rival) for loss in section.compared if loss.lost]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0"), (0.00123, "0.00123"), (1.2345, "1.23"), (99.95, "100"), (12345.6, "12 346"), (7, "7")],
)
def test_figures_are_short(value: float | None, text: str) -> None:
    assert figure(value) == text
    assert share(0.0123) == "1.23 %"


def test_cell_escapes_column_separators() -> None:
    assert table(["a"], [["b|c\nd"], [True], [None]]) == "| a |\n|---|\n| b\\|c d |\n| yes |\n| – |"


def test_losses_know_which_way_is_worse() -> None:
    assert RivalComparison("w", "s", 2.0, 1.0).lost
    assert not RivalComparison("w", "speed", 2.0, 1.0, less=False).lost
    assert not RivalComparison("w", "s", 1.0, 1.0).lost
    assert RivalComparison("w", "speed", 0.5, 1.0, "x", less=False).by == 2.0
    assert RivalComparison("w", "bytes twice", 3.0, 0.0).by is None


def test_comparisons_of_one_figure_are_merged() -> None:
    some = [
        RivalComparison("w", "s", 2.0, 1.0, "x", case="N = 1"),
        RivalComparison("w", "s", 3.0, 1.0, "x", case="N = 2"),
        RivalComparison("w", "s", 3.0, 2.0, "y", case="N = 2"),
        RivalComparison("w", "bytes twice", 3.0, 0.0),
    ]
    assert merged(some) == [
        ["w", "s", "N = 1; N = 2", "2–3", "x 1; y 2", "1.5–3"],
        ["w", "bytes twice", "", "3", "0", "–"],
    ]
    many = [RivalComparison("w", "s", 2.0, 1.0, case=f"N = {n}") for n in range(5)]
    assert merged(many) == [["w", "s", "N = 0 … N = 4", "2", "1", "2"]]


def test_broadcast_section_names_leading_rivals_and_missed_bars() -> None:
    section = broadcast(BROADCAST)
    assert lost(section) == [
        ("time to the last peer ÷ ideal", "bare chain"),
        ("time to the last peer ÷ ideal", None),
    ]
    assert [one.case for one in section.compared if one.lost] == ["N = 8", "p2pcast, N = 8"]
    whole = "\n".join(section.blocks)
    assert "shardcast is not installed" in whole
    assert "| system | N = 8 |\n|---|---|\n| p2pcast, whole state | 0.1 |\n| rsync | 2.4 |" in whole
    assert "rsync,8,2.4,1.2,3,0.5,1.20,10000000,3700000,\n" in section.data["broadcast"].csv()
    assert section.best == [
        ["time to the last of 8 peers ÷ ideal", 1.15, "libtorrent 1.4"],
        ["time until 8 peers have a state with 1 % changed, s", 0.1, "rsync 2.4"],
    ]
    assert [picture.file for picture in section.pictures] == ["broadcast", "broadcast-state"]


def test_latency_section_holds_bars_for_small_versions_on_near_paths_alone() -> None:
    stages = ("opened_s", "receiving_s", "received_s", "staged_s", "first_live_s", "live_s")

    def case(source: str, rtt_s: float, size: int, beyond_s: float) -> dict[str, Any]:
        return {"source": source, "rtt_s": rtt_s, "bytes": size, "beyond_s": beyond_s, **dict.fromkeys(stages, 0.25)}

    rows = [
        case("publisher", 0.001, 22_000, 0.07),
        case("folder", 0.0, 22_000, 0.11),
        case("folder", 0.0, 200_000, 0.9),
        case("publisher", 0.02, 22_000, 0.9),
    ]
    section = latency({"peers": 8, "rate_bps": 1e8, "state_bytes": 8_000_000, "rounds": 5, "rows": rows})
    assert lost(section) == [("ms beyond transfer and path", None)]
    assert [one.case for one in section.compared] == ["publisher, 22 kB", "folder, 22 kB"]
    assert "| publisher | 1 | 22 | 250 | 250 | 250 | 250 | 250 | 250 | 70 |" in section.blocks[1]


def test_stripes_faults_and_catchup_sections_report_misses() -> None:
    section = stripes(STRIPES)
    assert lost(section) == [("chosen stripes ÷ the best tried", None)]
    assert "left out, parent → child" in section.blocks[-1]
    # The hub's absence does not count as a gap.
    section = faults(FAULTS)
    assert lost(section) == [("gap in s", None), ("s until all peers have it", None)]
    assert {one.case for one in section.compared if one.lost} == {"kill head start"}
    head = "| fault | gap: hub | gap: head | all: hub | all: head |\n|---|---|---|---|---|\n"
    assert section.blocks[1] == head + "| kill | 0.70 | 1.25 | 3.00 | 3.00 |"
    section = faults(FAULTS | {"failed": ["stop tail last"]})
    assert ("cases that never recovered", None) in lost(section)
    assert "cases that never recovered: stop tail last." in section.blocks[0]
    assert lost(catchup(CATCHUP)) == [("s until staged, by the peer's policy", "each delta")]


def test_publish_section_follows_from_the_document_of_its_bench() -> None:
    rows = [
        {
            "row": "bf16 → bf16", "changed": 1, "params": 100, "bytes": 2e6, "memcpy_s": 0.01, "publish_s": 0.01,
            "snapshot_s": 0.02, "snapshot_to_memcpy": 2.0, "total_s": 0.05, "total_to_memcpy": 5.0,
        }
    ]  # fmt: skip
    section = publish({"state_bytes": 2 << 20, "steps": 5, "device": "CPU, 2 threads", "rows": rows})
    assert lost(section) == [("snapshot in ms", "memcpy")]
    older = publish({"state_bytes": 2 << 20, "steps": 5, "threads": 4, "rows": rows})
    assert "on the CPU with 4 threads" in older.blocks[0]
    assert "| bf16 → bf16 | 1 % | 2.00 | 10 | 20 | 2 | 50 | 5 |" in section.blocks[1]


def test_the_text_follows_from_the_data_alone() -> None:
    written = write(ALL, [LAB], {"wan": ["wan-a.png"]})
    assert written == write(dict(reversed(ALL.items())), [LAB], {"wan": ["wan-a.png"]})
    text = written.text
    assert text.count("## ") == 7
    assert "Machine: a processor, 4 cores, 16 GB, Linux 6." in text
    assert "- live: vllm is not installed" in text
    assert "- codec: not yet" in text
    assert "(quick, so coarse)" in text
    assert "exit code 1" in text
    assert "![wan](benchmarks/wan-a.png)" in text
    assert "| wan | time to the last, s | delay 1 | 2 | libtorrent 1.5 | 1.33 |" in text
    assert "delay 2" not in text
    assert "| wan | quick | 1 of 2 | 2 | 1.2 | 1.67 |" in text
    assert "1 of 3 bars held." in text
    assert "- not shown: seen" in text
    assert "- case 1 left out: too slow" in text
    assert "| theirs | 9 | Figure 1 |" in text
    assert "p2pcast lab wan`, uml, 2026-01-01, 60 s. [wan.csv](benchmarks/wan.csv)." in text
    assert "| time until 8 peers have a state with 1 % changed, s | 0.1 | rsync 2.4 |" in text.split("## ")[0]
    assert text.count("(benchmarks/broadcast-state.png)") == 1
    files = {picture.file for picture in written.pictures}
    assert set(re.findall(r"\(benchmarks/(\S+)\.png\)", text)) == {*files, "wan-a"}
    assert set(re.findall(r"\(benchmarks/(\S+\.csv)\)", text)) == set(written.data)
    assert "p2pcast,2,measured\n" in written.data["wan.csv"]
    assert 'wan,"time to the last, s",delay 1,2,libtorrent,1.5\n' in written.data["losses.csv"]


def test_a_view_sets_values_of_a_key_side_by_side() -> None:
    rows = [
        {"case": 1, "system": "p2pcast", "peers": 1, "simulated": False, "all_over_ideal": 1.5},
        {"case": 2, "system": "p2pcast", "peers": 16, "simulated": False, "all_over_ideal": 2.0},
        {"case": 3, "system": "p2pcast", "peers": 16, "simulated": True, "all_over_ideal": 9.0},
        {"case": 4, "system": "star", "peers": 16, "simulated": False, "all_over_ideal": 4.0},
    ]
    columns = {"system": "system", "peers": "peers", "simulated": "by the model", "all_over_ideal": "÷ ideal"}
    section = lab(LAB | {"scenario": "echo2-scale", "columns": columns, "rows": rows})
    assert section.blocks[2:4] == [
        "÷ ideal, by peers:",
        "| system | 1 | 16 |\n|---|---|---|\n| p2pcast | 1.5 | 2 |\n| star | – | 4 |",
    ]
    assert len(section.data["echo2-scale"].rows) == 5


def test_incompatible_result_is_reported() -> None:
    text = write(ALL | {"catchup": envelope("catchup", {"rows": []})}, [], {}).text
    assert "- catchup: the stored document has no 'versions'" in text
    assert "## Coming back" not in text


def test_report_distinguishes_machines() -> None:
    other = envelope("catchup", CATCHUP, machine={**MACHINE, "cores": 2}, versions={"python": "3.11", "numpy": "2"})
    text = write(ALL | {"catchup": other}, [], {}).text
    assert "Machine: a processor, 4 cores, 16 GB, Linux 6. Versions: python 3.11." in text
    assert "Machine of catchup: a processor, 2 cores, 16 GB, Linux 6. Versions: numpy 2." in text


def test_report_names_parts_run_on_a_busy_machine() -> None:
    assert "busy with other programs" not in write(ALL, [LAB], {}).text
    crowded = envelope("catchup", CATCHUP, machine={**MACHINE, "load": 4.5})
    assert "which affects their times: catchup." in write(ALL | {"catchup": crowded}, [LAB], {}).text


def short_part(monkeypatch: pytest.MonkeyPatch, options: str = "", **needs: Any) -> None:
    made = ReportPart("plan", PARTS["relay"].section, options, options, **needs)
    monkeypatch.setattr(measuring, "PARTS", {"plan": made})


def test_a_part_is_kept_and_measured_again_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    short_part(monkeypatch, "--peers 20")
    said: list[str] = []
    assert measure(tmp_path, [], quick=True, show=said.append)
    first = kept(tmp_path)["plan"]
    assert first["quick"]
    assert first["command"] == "p2pcast bench plan --peers 20"
    assert first["document"]["peers"] == 20
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert measure(tmp_path, [], quick=True, show=said.append)
    assert said[-1].startswith("plan: kept, measured ")
    assert kept(tmp_path)["plan"] == first
    monkeypatch.setattr(measuring, "_run", lambda folder, part, quick: {"part": part.name, "why": "part failed"})
    assert not measure(tmp_path, ["plan"], quick=True, show=said.append)
    assert kept(tmp_path)["plan"] == first
    # A quick run does not replace a full measurement.
    assert not measure(tmp_path, [], quick=False, show=said.append)


def test_skipped_and_failed_parts_have_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    short_part(monkeypatch, needs=("no_moon",))
    assert measure(tmp_path, [], quick=False, show=said.append)
    assert kept(tmp_path)["plan"] == {"part": "plan", "why": "no_moon is not installed"}
    short_part(monkeypatch, "--peers 1")
    assert not measure(tmp_path, [], quick=False, show=said.append)
    assert "--peers" in kept(tmp_path)["plan"]["why"]
    ends = "import pathlib, sys; pathlib.Path(sys.argv[-1]).write_text('{}'); sys.exit(3)"
    monkeypatch.setattr(measuring, "COMMAND", (sys.executable, "-c", ends))
    assert not measure(tmp_path, [], quick=False, show=said.append)
    assert kept(tmp_path)["plan"]["why"] == "exit code 3", "a document of a step that broke off does not count"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


WAITING = """
import pathlib, signal, sys
folder = pathlib.Path(sys.argv[1])
pathlib.Path(sys.argv[-1]).write_text("half a")
try:
    (folder / "began").touch()
    signal.pause()
except KeyboardInterrupt:
    (folder / "cleared").touch()
"""


def test_interrupted_part_cleans_up_and_keeps_no_partial_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    short_part(monkeypatch)
    monkeypatch.setattr(measuring, "COMMAND", (sys.executable, "-c", WAITING, str(tmp_path)))
    over = threading.Event()

    def break_off() -> None:
        while not over.wait(0.01):
            if (tmp_path / "began").exists():
                os.kill(os.getpid(), signal.SIGINT)
                return

    breaking = threading.Thread(target=break_off)
    breaking.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            measure(tmp_path / "kept", [], quick=True, show=lambda said: None)
    finally:
        over.set()
        breaking.join()
    assert (tmp_path / "cleared").exists()
    assert list((tmp_path / "kept").iterdir()) == []


def test_unknown_names_and_files_are_one_line_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no part 'moon'"):
        measure(tmp_path, ["moon"], quick=False, show=print)
    (tmp_path / "codec.json").write_text("[]")
    with pytest.raises(LocalError, match=r"codec\.json is not a result of"):
        kept(tmp_path)


def test_the_command_writes_text_and_pictures_and_the_same_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'p2pcast[lab]'")
    for name, each in ALL.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(each))
    (tmp_path / "labs" / "wan").mkdir(parents=True)
    (tmp_path / "labs" / "wan" / "result.json").write_text(json.dumps(LAB))
    words = [
        "--write-only",
        "--from",
        str(tmp_path),
        "--labs",
        str(tmp_path / "labs"),
        "--docs",
        str(tmp_path / "docs"),
    ]

    def made() -> dict[str, bytes]:
        done = CliRunner().invoke(command.main, words)
        assert done.exit_code == 0, done.output
        return {path.name: path.read_bytes() for path in (tmp_path / "docs").rglob("*") if path.is_file()}

    first = made()
    pictures = {"broadcast.png", "broadcast-state.png", "stripes.png"}
    data = {"broadcast.csv", "stripes.csv", "faults.csv", "wan.csv", "losses.csv"}
    assert set(first) == {"benchmarks.md", *pictures, *data}
    assert made() == first

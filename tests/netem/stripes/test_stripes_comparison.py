"""A p2pcast link between two emulated hosts, by its stripes, and the judgement of the figures."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from click.testing import CliRunner

from netem.emulation import calibration
from netem.stripes import stripes_comparison, sweep
from netem.stripes.stripes_comparison import StripesBench, bench_stripes, judged
from netem.stripes.sweep import Sweep
from p2pcast.cli import cli
from p2pcast.transport.stripe_count import FEWEST

WAY = Sweep(80e6, 0.0, 0.0, 1 << 20, (3,), ("reno",), (None, 65536), 2, 60.0)


@pytest.mark.root
def test_links_carry_versions_and_are_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this kernel, with rates alone; another test checks that the path is as requested."""
    monkeypatch.setattr(calibration, "measure", lambda net: [])
    calibrated, *rows = sweep.sweep(asdict(WAY))
    assert calibrated["off"] == []
    rows = [said["row"] for said in rows]
    assert [(row["stripes"], row["buffer_bytes"], row["chosen"]) for row in rows] == [
        (3, None, False), (3, 65536, False), (FEWEST, None, True), (FEWEST, 65536, True),
    ]  # fmt: skip
    for row in rows:
        assert row["whole"]
        assert row["left"] is None
        assert len(row["goodputs_bps"]) == 2
        assert all(0 < bps < 80e6 for bps in row["goodputs_bps"])
        assert row["congestion"] == "reno"


@pytest.mark.root
def test_deviating_path_gives_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    class Off:
        sender, receiver = "a", "b"

        def document(self) -> dict[str, object]:
            return {"faults": ["a → b: 1.0 Mbit/s instead of 80.0 Mbit/s"]}

    monkeypatch.setattr(calibration, "measure", lambda net, wanted=(): [Off()])
    (calibrated,) = sweep.sweep(asdict(WAY))
    assert calibrated["tries"] == calibration.CALIBRATIONS
    assert calibrated["off"]


def row(
    congestion: str, stripes: int, *mbit: float, buffer: int | None = None, chosen: bool = False
) -> dict[str, object]:
    goodputs_bps = [m * 1e6 for m in mbit]
    return {
        "congestion": congestion,
        "stripes": stripes,
        "goodputs_bps": goodputs_bps,
        "buffer_bytes": buffer,
        "chosen": chosen,
    }


LONG = Sweep(100e6, 0.3, 0.001, 1 << 20, (1, 16), ("cubic", "bbr"), (None,), 2, 3.0)


def test_chosen_stripes_are_compared_with_the_best() -> None:
    said = judged(
        LONG,
        [
            row("cubic", 1, 9, 10, 11),
            row("cubic", 16, 40),
            row("bbr", 1, 30),
            row("bbr", 4, 36),
            row("bbr", 1, 99, buffer=1),
            row("bbr", 4, 35, 36, 99, chosen=True),
        ],
    )
    assert said["best"] == {"congestion": "cubic", "stripes": 16, "bps": 40_000_000}
    assert said["choice"] == {"congestion": "bbr", "stripes": 4, "to_best": 0.9, "to_single_cubic": 3.6}
    assert said["by_congestion"]["cubic"]["rule_to_best"] == 1.0
    assert said["by_congestion"]["bbr"]["of_ceiling"]["1"] == pytest.approx(30 / 95.6, abs=0.001)


def test_small_packets_leave_less_to_payload() -> None:
    said = judged(replace(LONG, mtu=576), [row("cubic", 1, 10)])
    assert said["by_congestion"]["cubic"]["of_ceiling"]["1"] == pytest.approx(10 / 88.8, abs=0.001)


def test_missing_settings_are_not_judged() -> None:
    said = judged(LONG, [row("cubic", 1, 10)])
    assert said["choice"] is None
    assert said["by_congestion"]["cubic"]["rule_to_best"] is None


def test_command_shows_measured_and_skipped_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    def results(backend, work, argument):
        if argument["loss"]:
            yield {"off": ["parent → child: 70.0 Mbit/s instead of 100.0 Mbit/s"], "tries": 3}
            return
        yield {"off": [], "tries": 1}
        for stripes in argument["stripes"]:
            yield {"row": row("bbr", stripes, 10.0 + stripes)}
        yield {"row": row("bbr", 4, 20.8, chosen=True)}

    monkeypatch.setattr(stripes_comparison, "results", results)
    monkeypatch.setattr("netem.emulation.backend.chosen", lambda wanted: "uml")
    said = CliRunner().invoke(
        cli, ["bench", "stripes", "--rtt", "300", "--loss", "0", "--loss", "1", "--congestion", "bbr"]
    )
    assert said.exit_code == 0, said.output
    assert "300 ms, 1.0%: left out, parent → child: 70.0 Mbit/s" in said.output
    assert "a peer chooses 4 × bbr: 0.80 of the best" in said.output
    document = bench_stripes(
        StripesBench("uml", 1e8, (0.3,), (0.0,), 1, (1,), ("bbr",), (None,), 1, 2.0), lambda way: None
    )
    assert [row["chosen"] for row in document["rows"]] == [False, True]
    assert document["ways"][0]["best"]["stripes"] == 1

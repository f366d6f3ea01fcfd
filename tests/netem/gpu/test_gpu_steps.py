"""`make gpu`: which steps run, on what size, and what the page says about them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import netem.gpu.__main__ as command
from netem.gpu import gpu_page
from netem.gpu.gpu_machine import USUAL_BYTES, describe, state_bytes
from netem.gpu.gpu_page import PAGE, RECORD, page
from netem.gpu.gpu_steps import STEPS, GpuStep, StepSizes
from p2pcast.ground.limits import GIB

SIZES = StepSizes(4 << 20, 2, "cpu")
OLD, OTHER = "2026-01-01T00:00:00+00:00", "2026-02-02T00:00:00+00:00"


@pytest.mark.parametrize("name", [name for name, step in STEPS.items() if "p2pcast.cli" in step.arguments(SIZES)])
def test_the_command_of_each_bench_has_the_options_that_its_step_gives(name: str) -> None:
    arguments = STEPS[name].arguments(SIZES)
    options = {word for word in arguments if word.startswith("--")}
    shown = subprocess.run([sys.executable, *arguments[:4], "--help"], capture_output=True, text=True, check=True)
    assert all(f"{option} " in shown.stdout or f"{option}\n" in shown.stdout for option in options)


def test_the_page_is_that_of_the_record() -> None:
    assert page(json.loads(RECORD.read_text()).values()) == PAGE.read_text()


def test_a_step_without_its_packages_is_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(sizes: StepSizes) -> tuple[str, ...]:
        raise AssertionError("a step that is left out has no command")

    steps = {
        "passes": GpuStep("x", ("json", "no_such_module", "nor_this"), never, str),
        "publish-pinned": GpuStep("y", (), never, str, only_cuda=True),
    }
    monkeypatch.setattr(command, "STEPS", steps)
    found = command.run("cpu", GIB, 2, tuple(steps), tmp_path)["steps"]
    assert found == {
        "passes": {"left_out": "no_such_module is not installed; nor_this is not installed"},
        "publish-pinned": {"left_out": "for a GPU alone"},
    }


def step_of(code: str, **options: Any) -> GpuStep:
    return GpuStep("x", (), lambda sizes: ("-c", code), str, **options)


def test_a_steps_last_line_is_its_result() -> None:
    found = command.run_step(step_of("print('loading'); print('{\"a\": 1}')"), SIZES)
    assert found["result"] == {"a": 1}
    some = command.run_step(step_of('print(\'{"a": 1, "folder": 2}\')', keys=("a",)), SIZES)
    assert some["result"] == {"a": 1}
    counted = command.run_step(step_of("print('==== 7 passed, 2 deselected in 1.20s ====')", json=False), SIZES)
    assert counted["result"] == {"passed": 7}


def test_a_step_that_fails_or_hangs_costs_no_other() -> None:
    killed = command.run_step(step_of("import os; os.kill(os.getpid(), 9)"), SIZES)
    assert gpu_page.outcome("bench", killed) == "**failed**: exit code -9"
    failed = command.run_step(step_of("import sys; print('before'); sys.exit('no memory on the device')"), SIZES)
    assert failed == {"failed": "before\nno memory on the device"}
    for printed in ("", "print('no result')"):
        assert command.run_step(step_of(printed), SIZES)["failed"].startswith("the last line is no result:")
    assert command.run_step(step_of("import time; time.sleep(99)", limit_s=0.1), SIZES) == {
        "failed": "still running after 0 s"
    }


def test_the_state_fits_into_the_smallest_memory(tmp_path: Path) -> None:
    machine = describe("cpu")
    assert state_bytes(machine, None, tmp_path) == USUAL_BYTES["cpu"]
    assert state_bytes(machine, 1000, tmp_path) == 1000
    assert state_bytes(machine, USUAL_BYTES["cpu"] + 1, tmp_path) == USUAL_BYTES["cpu"] + 1
    small = machine | {"device_bytes": 60 << 20}
    assert state_bytes(small, 15 * GIB, tmp_path) == int(0.85 * (10 << 20))


def document(device: str, time: str, steps: dict[str, Any]) -> dict[str, Any]:
    machine = describe("cpu") | {"device": device}
    return {"time": time, "machine": machine, "state_bytes": GIB, "versions": 2, "steps": steps}


def test_the_page_names_failures_and_steps_that_were_left_out() -> None:
    steps = {
        "tests": {"result": {"passed": 7}},
        "engine": {"left_out": "not installed: vllm"},
        "passes": {"failed": "a\nb"},
    }
    text = page([document("A", OLD, steps)])
    assert "| tests | tests marked `device` | 7 passed |" in text
    assert "left out: not installed: vllm" in text
    assert "**failed**: b" in text


def test_a_device_is_recorded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_page, "RECORD", tmp_path / "gpu.json")
    monkeypatch.setattr(gpu_page, "PAGE", tmp_path / "gpu.md")
    first, other = tmp_path / "first.json", tmp_path / "other.json"
    first.write_text(json.dumps(document("A", OLD, {"tests": {"result": {"passed": 7}}})))
    other.write_text(json.dumps(document("B", OTHER, {"tests": {"result": {"passed": 8}}})))
    for path in (first, other, other):
        assert CliRunner().invoke(command.main, ["--add", str(path)]).exit_code == 0
    text = (tmp_path / "gpu.md").read_text()
    assert text.count("## A\n") == text.count("## B\n") == 1
    assert "8 passed" in text


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machine": 3}'])
def test_a_file_that_is_no_result_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(text)
    found = CliRunner().invoke(command.main, ["--add", str(path)])
    assert found.exit_code == 2
    assert "holds no result of `make gpu`" in found.stderr

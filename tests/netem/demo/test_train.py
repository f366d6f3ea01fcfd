"""The demo's trainer, run as its users run it: a tiny model, two versions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pcast.checkpoint import Checkpoint

TINY = ["--hidden", "128", "--layers", "1", "--warmup-steps", "4", "--versions", "2", "--every", "2"]


def run(out: Path, *options: str) -> list[dict[str, Any]]:
    """The printed lines."""
    command = [sys.executable, "-m", "netem.demo.train", "--out", str(out), *TINY, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("trained")
    return out, run(out)


def words(folder: Path) -> np.ndarray[Any, np.dtype[np.uint16]]:
    checkpoint = Checkpoint.open(folder)
    return np.concatenate([checkpoint.words(cell) for cell in checkpoint.layout().cells])


def test_folders_are_whole_checkpoints_of_one_layout(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    out, lines = trained
    assert sorted(p.name for p in out.iterdir()) == ["base", "step_2", "step_4"], "no draft remains"
    base = Checkpoint.open(out / "base")
    assert {t.dtype for t in base.layout().tensors} == {"BF16"}
    assert base.layout().params == lines[0]["params"]
    assert "lm_head.weight" not in base.layout().numbers, "tied"
    for name in ("base", "step_2", "step_4"):
        assert (out / name / "STABLE").exists()
        assert Checkpoint.open(out / name).layout() == base.layout()
        assert Checkpoint.open(out / name).small_files() == base.small_files()
    config = json.loads(base.small_files()["config.json"])
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "bfloat16"


def test_trainer_reports_match_its_files(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    out, lines = trained
    assert [line["event"] for line in lines] == ["base", "version", "version", "done"]
    assert [line["step"] for line in lines[:-1]] == [0, 2, 4]
    for old, new in ((lines[0], lines[1]), (lines[1], lines[2])):
        before, after = words(Path(old["path"])), words(Path(new["path"]))
        assert int((before != after).sum()) == new["changed"]
        assert 0 < new["changed"] < 0.2 * new["params"], "sparse"
    assert out / "step_4" == Path(lines[2]["path"])


def test_tokenizer_is_one_token_a_character(trained: tuple[Path, list[dict[str, Any]]]) -> None:
    code = (
        "import sys; from transformers import AutoTokenizer; t = AutoTokenizer.from_pretrained(sys.argv[1]);ids = "
        "t('17+25=').input_ids; assert len(ids) == 6, ids; assert t.decode(ids) == '17+25='; assert t.eos_token_id == "
        "1"
    )
    subprocess.run([sys.executable, "-c", code, str(trained[0] / "base")], check=True, timeout=600, capture_output=True)


def test_same_seed_same_bytes_and_the_go_file_is_waited_for(
    trained: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    go = tmp_path / "go"
    command = [sys.executable, "-m", "netem.demo.train", "--out", str(tmp_path / "out"), *TINY, "--go-file", str(go)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "base"
        assert [p.name for p in (tmp_path / "out").iterdir()] == ["base"]
        go.touch()
        assert [json.loads(line)["event"] for line in process.stdout] == ["version", "version", "done"]
    assert process.returncode == 0
    for name in ("base", "step_4"):
        expected = (trained[0] / name / "model.safetensors").read_bytes()
        assert (tmp_path / "out" / name / "model.safetensors").read_bytes() == expected


def test_wrong_sizes_are_a_usage_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "netem.demo.train", "--out", str(tmp_path), "--hidden", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert "multiple of 128" in done.stderr

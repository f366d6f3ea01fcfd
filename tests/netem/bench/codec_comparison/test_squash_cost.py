"""The squash bench: sums are right on hand-made data, ladders never cost more than the chain, the command prints and
draws.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from netem.bench.codec_comparison import squash_cost as bench
from netem.bench.commands.codec_commands import squash as command
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import UsageError


def a_run(versions, seed=0):
    rng = np.random.default_rng(seed)
    layout = Layout([Tensor("w", "BF16", (300, 100)), Tensor("still", "BF16", (500,))], cell_words=8192)
    words = {"w": rng.standard_normal(30_000).astype(np.float32).view(np.uint32).__rshift__(16).astype(np.uint16)}
    words["still"] = words["w"][:500].copy()

    def states():
        now = {name: w.copy() for name, w in words.items()}
        for _ in range(versions + 1):
            yield bench.of_arrays(layout, {name: w.copy() for name, w in now.items()})
            now["w"] += (rng.random(30_000) < 0.02).astype(np.uint16)

    return bench.SquashRun("random", layout, states())


def test_report_adds_up():
    row = bench.measure(a_run(9), 100, marks=(1, 4, 100), timed=(1,), repeats=1)
    assert (row["versions"], row["params"]) == (9, 30_500)
    assert [r["k"] for r in row["rows"]] == [1, 4, 9]
    for mark in row["rows"]:
        assert 0 < mark["changed"] <= mark["changed_chain"]
        for codec in bench.CODECS:
            sizes = row["sizes"][codec]
            assert mark[codec]["chain_bytes"] == sum(sizes["chain_bytes"][: mark["k"]])
            assert mark[codec]["squash_bytes"] == sizes["squash_bytes"][mark["k"] - 1]
            assert ("squash_to_replay" in mark[codec]) == (mark["k"] != 4)
    first, last = row["rows"][0], row["rows"][-1]
    assert first["flat"]["ratio"] == 1
    assert first["changed"] == first["changed_chain"]
    assert last["flat"]["ratio"] < 1
    assert last["context"]["ratio"] < 1


def test_no_more_versions_than_asked():
    assert bench.measure(a_run(9), 3, marks=(100,), repeats=1)["versions"] == 3
    with pytest.raises(UsageError, match="no version"):
        bench.measure(a_run(0), 3)


def test_ladders_of_twenty_versions():
    squashed = [round(100 * k**0.5) for k in range(1, 21)]
    rows = {r["ladder"]: r for r in bench.ladders([100] * 20, squashed, {"chain": (), "of four": (4,)})}
    assert rows["chain"]["mean_bytes"] == 1050
    assert rows["chain"]["ratio_to_chain"] == 1
    assert rows["chain"]["kept_to_chain"] == 0
    assert rows["of four"]["kept_to_chain"] == 0.5
    assert rows["of four"]["furthest_ratio"] == 0.5
    assert rows["exact"]["mean_bytes"] == round(sum(squashed) / 20)
    assert rows["exact"]["ratio_to_chain"] < rows["of four"]["ratio_to_chain"] < 1


def write(folder, words):
    folder.mkdir(parents=True)
    save_file({"w": words.view(np.float16).reshape(50, -1)}, folder / "model.safetensors")


@pytest.fixture
def checkpoints(tmp_path):
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 14, 20_000, dtype=np.uint16)
    for name in ("base", "step_9", "step_10", "step_11"):
        write(tmp_path / "run" / name, words)
        words = words + (rng.random(words.size) < 0.01).astype(np.uint16)
    return tmp_path / "run"


def test_command_on_a_folder(checkpoints, tmp_path):
    options = [str(checkpoints), "--plot", str(tmp_path / "p.png"), "-o", str(tmp_path / "s.json")]
    done = CliRunner().invoke(command, options, catch_exceptions=False)
    assert "÷ replay" in done.stdout
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads((tmp_path / "s.json").read_text())
    assert document["rows"][0]["versions"] == 3
    assert len(document["rows"][0]["sizes"]["flat"]["chain_bytes"]) == 3


def test_command_refuses_folders_of_different_models(checkpoints, tmp_path):
    (tmp_path / "empty").mkdir()
    assert isinstance(CliRunner().invoke(command, [str(tmp_path / "empty")]).exception, UsageError)
    write(checkpoints / "step_12", np.arange(50, dtype=np.uint16))
    done = CliRunner().invoke(command, [str(checkpoints)])
    assert "has other tensors than" in str(done.exception)

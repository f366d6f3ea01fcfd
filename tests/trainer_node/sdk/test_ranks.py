"""Real process groups, a real hub, a real peer: the peer installs, bit for bit, the weights that torch gathers from the
same ranks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

RANKS = Path(__file__).with_name("ranks.py")
LIMIT_S = 600.0


class Trainer:
    """Runs a scenario of ranks.py."""

    def __init__(self, run, states, *options: str) -> None:
        self.run, self.states = run, states
        self.folder = run.folder
        run.hub_up(*self._checkpoints(), *options)
        run.peer_up("peer")

    def _checkpoints(self):
        folder = self.folder / "checkpoints"
        folder.mkdir()
        return [folder]

    def scenario(self, name: str, ranks: int) -> list[subprocess.Popen]:
        words = [sys.executable, "-W", "error::ResourceWarning", str(RANKS), name, str(self.folder)]
        children = [subprocess.Popen([*words, str(rank), str(ranks), self.run.address]) for rank in range(ranks)]
        try:
            for child in children:
                child.wait(LIMIT_S)
        finally:
            for child in children:
                child.kill()
                child.wait()
        return children

    def all_well(self, name: str, ranks: int) -> None:
        assert [child.returncode for child in self.scenario(name, ranks)] == [0] * ranks

    def said(self, rank: int):
        return json.loads((self.folder / f"said_{rank}.json").read_text())

    def check(self, *steps: int) -> None:
        """The peer's installed tensors equal the trainer's."""
        for step in steps:
            truth = load_file(self.folder / "truth" / f"step_{step}.safetensors")
            assert self.states.differing(self.run.installed(step), truth) == []


@pytest.fixture
def trainer(run, states):
    return Trainer(run, states)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.prove)])
def test_fsdp2(trainer, ranks):
    trainer.all_well("fsdp", ranks)
    trainer.check(*range(1, 21))
    assert trainer.said(0) == trainer.said(ranks - 1) == ["0.20"]
    assert "lm_head.weight" not in trainer.run.installed(20)
    artifacts = trainer.run.status()["last"]
    assert artifacts["kind"] == "delta"


def test_tensors_that_all_ranks_gather_one_by_one(trainer):
    trainer.all_well("gathered", 2)
    trainer.check(*range(1, 9))


@pytest.mark.prove  # test_every_placement is the sample
def test_hsdp_takes_one_replica(trainer):
    trainer.all_well("hsdp", 4)
    trainer.check(*range(1, 21))


@pytest.mark.prove  # test_every_placement is the sample
def test_shards_of_columns_are_gathered(trainer):
    trainer.all_well("columns", 4)
    trainer.check(1, 2, 3)


def test_every_placement(run, states):
    """Whole cells beside cells in parts, which are not coded alike where context was chosen."""
    trainer = Trainer(run, states, "--codec", "context")
    trainer.all_well("placements", 4)
    trainer.check(1, 2, 3)


@pytest.mark.prove  # test_ranks_that_do_not_agree is the sample
def test_a_rank_that_dies_in_the_middle(trainer):
    children = trainer.scenario("killed", 4)
    assert [child.returncode for child in children] == [0, 0, -9, 0]
    for rank in (0, 1, 3):
        ((step, kind, text),) = trainer.said(rank)
        assert (step, kind) == (6, "RetryableError")
        assert "rank 2 of 4" in text
    trainer.check(1, 2, 3, 4, 5)
    trainer.all_well("resumed", 4)
    said = [trainer.said(rank) for rank in range(4)]
    assert [line for line in said[3] if isinstance(line, str)] == ["1.5", "1.6", "1.7"]
    assert said[0] == said[1] == said[2] == said[3]
    trainer.check(5, 6, 7)
    assert trainer.run.status()["version"] == "1.7"


def test_ranks_that_do_not_agree(trainer):
    trainer.all_well("disagreeing", 3)
    for rank in range(3):
        said = trainer.said(rank)
        assert said[0][0] == "RetryableError"
        assert "ranks 0, 2 said" in said[0][1]
        assert said[1][0] == ("UsageError" if rank == 1 else "RetryableError")
        assert "takes names and tensors" in said[1][1]
        assert "step 3" in said[2][1]
        assert said[3] == "0.2"
    trainer.check(2)


@pytest.mark.prove  # test_fsdp2 is the sample
def test_accelerate(trainer):
    trainer.all_well("accelerated", 2)
    trainer.check(1, 2, 3, 4, 5)

"""The learner on ranks that torchrun starts, sharded by FSDP2: real processes, with gloo or NCCL between them."""

from __future__ import annotations

import functools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from netem.fleet.small_model import SmallModel, write_small_model
from p2pcast.ledger_api.batch_client import RolloutBatch
from p2pcast.tasks.task_loader import load_task
from tests.support.tensor_device import CUDA
from tests.trainer_node.learning.expert_models import EXPERTS, experts_folder
from tests.trainer_node.learning.learner_ranks import PROBE_SET, SUMS_MODEL, Plan, replayed, warm
from tests.trainer_node.learning.learner_stage import (
    ALONE,
    STEPS,
    TASK,
    MemoryHub,
    MemoryLedger,
    batches,
    learner,
    small_folder,
)
from tests.trainer_node.sdk.conftest import Run
from trainer_node.learning import checkpoints
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.probing.learner_scores import learner_scores

ROOT = Path(__file__).parents[3]
LIMIT_S = 600
RANKS = torch.cuda.device_count() if CUDA else 2
TOLERANCE = 1e-4
"""Largest difference of losses, relative to 1. Ranks add the same float32 terms in another order; AdamW's first updates
turn that into changes of up to the learning rate, for weights whose gradient is all rounding.
"""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(tmp_path_factory.mktemp("model"), layers=2)


@pytest.fixture(scope="module")
def played(model_folder: Path) -> list[RolloutBatch]:
    return batches(model_folder)


@pytest.fixture(scope="module")
def plan(model_folder: Path, played: list[RolloutBatch]) -> Plan:
    file = model_folder.parent / "batches"
    file.write_bytes(pickle.dumps(played))
    return Plan(str(model_folder), str(file))


def on_ranks(folder: Path, plan: Plan, ranks: int = RANKS) -> tuple[int, list[dict[str, Any]], str]:
    """torchrun's exit code, what each rank said, and what all wrote."""
    file = folder / "plan.json"
    file.write_text(json.dumps(asdict(plan)))
    for earlier in folder.glob("said_*.json"):
        earlier.unlink()
    script = str(Path(__file__).with_name("learner_ranks.py"))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), script, str(file)]
    found = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": found, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
    )
    wrote = done.stdout + done.stderr
    print(wrote)
    said = [folder / f"said_{rank}.json" for rank in range(ranks)]
    return done.returncode, [json.loads(each.read_text()) if each.exists() else {} for each in said], wrote


def all_well(folder: Path, plan: Plan, ranks: int = RANKS) -> list[dict[str, Any]]:
    code, said, wrote = on_ranks(folder, plan, ranks)
    assert code == 0, wrote[-3000:]
    return said


def last_version(folder: Path) -> dict[str, torch.Tensor]:
    newest = max((folder / "versions").iterdir(), key=lambda file: tuple(map(int, file.stem.split("."))))
    return load_file(newest)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def undisturbed_of(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> Callable[[int], Path]:
    """Folder of a whole run, by its number of ranks."""

    @functools.cache
    def folder_of(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp(f"ranks_{ranks}")
        all_well(folder, plan, ranks)
        return folder

    return folder_of


@pytest.fixture(scope="module")
def undisturbed(undisturbed_of: Callable[[int], Path]) -> Path:
    return undisturbed_of(RANKS)


@pytest.mark.device
@pytest.mark.parametrize("ranks", [RANKS, *([] if CUDA else [pytest.param(4, marks=pytest.mark.prove)])])
def test_ranks_have_the_losses_of_one_process(
    tmp_path: Path,
    undisturbed_of: Callable[[int], Path],
    model_folder: Path,
    played: list[RolloutBatch],
    ranks: int,
) -> None:
    undisturbed = undisturbed_of(ranks)
    hub = MemoryHub()
    alone = learner(tmp_path, model_folder, MemoryLedger(played), hub)
    alone.run()
    steps = [line for line in alone.log.lines if line["event"] == "step"]  # type: ignore[attr-defined]
    said = json.loads((undisturbed / "said_0.json").read_text())
    assert said["step"] == len(steps) == STEPS
    assert said["losses"] == pytest.approx([line["loss"] for line in steps], rel=0, abs=TOLERANCE)
    assert said["norms"] == pytest.approx([line["grad_norm"] for line in steps], rel=TOLERANCE)
    weights, alone_weights = last_version(undisturbed), hub.versions[max(hub.versions)]
    assert weights.keys() == alone_weights.keys()
    exported = undisturbed / "checkpoints" / "exports" / f"000001-{STEPS:09d}"
    assert equal(load_file(exported / "model.safetensors"), weights)


def experts_plan(folder: Path) -> Plan:
    """Every expert computes every token: no difference of rounding chooses another one."""
    form = {"vocabulary": load_task(TASK).vocabulary, "chosen": EXPERTS}
    model = experts_folder(folder / "model", dtype=torch.float32, **form)
    (folder / "batches").write_bytes(pickle.dumps(batches(model)))
    return Plan(str(model), str(folder / "batches"))


@pytest.mark.device
def test_ranks_train_and_publish_experts_as_one_process(tmp_path: Path) -> None:
    plan = experts_plan(tmp_path)
    folder, played = Path(plan.model), pickle.loads((tmp_path / "batches").read_bytes())
    (tmp_path / "ranks").mkdir()
    said = all_well(tmp_path / "ranks", plan)[0]
    alone = learner(tmp_path / "alone", folder, MemoryLedger(played), MemoryHub())
    alone.run()
    steps = [line for line in alone.log.lines if line["event"] == "step"]  # type: ignore[attr-defined]
    assert said["losses"] == pytest.approx([line["loss"] for line in steps], rel=0, abs=TOLERANCE)
    assert said["norms"] == pytest.approx([line["grad_norm"] for line in steps], rel=TOLERANCE)
    published, first = last_version(tmp_path / "ranks"), load_file(folder / "model.safetensors")
    assert {name: words.shape for name, words in published.items()} == {n: words.shape for n, words in first.items()}
    changed = [name for name, words in published.items() if not torch.equal(words, first[name])]
    assert sum(".experts." in name for name in changed) > EXPERTS
    exported = tmp_path / "ranks" / "checkpoints" / "exports" / f"000001-{STEPS:09d}"
    assert equal(load_file(exported / "model.safetensors"), published)


@pytest.mark.device
@pytest.mark.prove  # test_ranks_have_the_losses_of_one_process is the sample
def test_ranks_resume_from_a_sharded_checkpoint_exactly(tmp_path: Path, plan: Plan, undisturbed: Path) -> None:
    stopped = all_well(tmp_path, replace(plan, stop_at=3))
    assert [said["step"] for said in stopped] == [3] * RANKS
    resumed = all_well(tmp_path, plan)
    assert [said["step"] for said in resumed] == [STEPS] * RANKS
    whole_run = json.loads((undisturbed / "said_0.json").read_text())["losses"]
    assert stopped[0]["losses"] + resumed[0]["losses"] == whole_run, "bit for bit"
    assert equal(last_version(tmp_path), last_version(undisturbed))


@pytest.mark.prove
@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks_read_the_checkpoint(tmp_path: Path, plan: Plan, ranks: int) -> None:
    all_well(tmp_path, replace(plan, stop_at=2))
    before = last_version(tmp_path)
    all_well(tmp_path, plan, ranks)
    first = min((tmp_path / "versions").glob("2.*"), key=lambda file: int(file.stem.partition(".")[2]))
    assert first.stem == "2.2"
    assert equal(load_file(first), before)
    assert checkpoints.newest(tmp_path / "checkpoints").position.step == STEPS  # type: ignore[union-attr]


@pytest.mark.prove
@pytest.mark.parametrize(
    ("ranks", "rank", "boundary"),
    [
        *((2, rank, boundary) for rank in (0, 1) for boundary in ("taken", "trained", "applied", "written")),
        (4, 2, "trained"),
    ],
)
def test_rank_that_dies_ends_the_others_and_no_step_is_lost(
    tmp_path: Path, plan: Plan, undisturbed_of: Callable[[int], Path], ranks: int, rank: int, boundary: str
) -> None:
    code, said, wrote = on_ranks(tmp_path, replace(plan, dies=(rank, boundary, 4)), ranks)
    assert code != 0
    assert "Signal 9 (SIGKILL)" in wrote
    assert said[rank] == {}
    for number, other in enumerate(said):
        if number != rank:
            assert other["error"] == "RetryableError"
            assert f"rank {number} of {ranks} lost the connection to another rank" in other["text"]
            assert "start all ranks again" in other["text"]
    stored = checkpoints.newest(tmp_path / "checkpoints")
    assert stored is not None
    assert stored.position.step == (2 if boundary == "applied" else 4), "the newest that was whole before"
    all_well(tmp_path, plan, ranks)
    assert equal(last_version(tmp_path), last_version(undisturbed_of(ranks)))
    assert not list((tmp_path / "checkpoints").glob(".*")), "what a rank left unfinished is removed"


@pytest.mark.device
@pytest.mark.prove
def test_ranks_replay_recorded_experts_as_one_process(tmp_path: Path) -> None:
    model = experts_folder(tmp_path / "model", dtype=torch.float32)
    alone = replayed(Plan(str(model)), ALONE)
    assert all(alone["gates"].values())
    for said in all_well(tmp_path, Plan(str(model), replay=True)):
        assert said["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-5)
        assert said["gates"] == pytest.approx(alone["gates"], rel=1e-3)


@pytest.mark.parametrize("experts", [False, True])
def test_peers_install_the_weights_that_torch_gathers(run: Run, plan: Plan, tmp_path: Path, experts: bool) -> None:
    if experts:
        plan = experts_plan(tmp_path)
    run.hub_up(plan.model)
    run.peer_up("peer")
    all_well(run.folder, replace(plan, hub=run.address))
    for step in range(1, STEPS + 1):
        (gathered,) = (run.folder / "versions").glob(f"*.{step}.safetensors")
        assert equal(run.installed(step), load_file(gathered))


@pytest.mark.prove
def test_warm_start_of_two_ranks_has_the_losses_of_one_process(tmp_path: Path) -> None:
    folder = write_small_model(tmp_path / "model", SUMS_MODEL, seed=1)
    plan = Plan(str(folder), warm=True)
    expected, _ = warm(plan, ALONE)
    said = all_well(tmp_path, plan)
    assert said[0]["losses"] == pytest.approx(expected, rel=TOLERANCE)
    assert said[1] == said[0]
    weights = load_file(tmp_path / "warm.safetensors")
    assert not equal(weights, load_file(folder / "model.safetensors"))


@pytest.mark.prove
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_loading_never_takes_memory_for_a_whole_tensor(tmp_path: Path, tied: bool, shards: int) -> None:
    folder = write_small_model(
        tmp_path / "model", SmallModel(997, hidden=64, layers=2, tied=tied), seed=1, dtype="bfloat16"
    )
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if shards > 1:
        whole.save_pretrained(folder, max_shard_size="100KB")
        (folder / "model.safetensors").unlink()
    said = all_well(tmp_path, Plan(str(folder), load=True))
    logits = whole(input_ids=torch.arange(20)[None], use_cache=False).logits.detach()
    expected = {name: p.detach() for name, p in whole.named_parameters()} | dict(whole.named_buffers())
    assert equal(load_file(tmp_path / "loaded.safetensors"), expected | {"logits": logits})
    embedding = 2 * 997 * 64
    # Probes: each rank has all scores, and those of an unsharded model.
    alone = learner_scores(LearnerModel(folder, ALONE), PROBE_SET, 16, "packed")
    assert all(each["scores"] == pytest.approx(alone.tolist(), abs=0.05) for each in said)
    assert said[0]["scores"] == said[1]["scores"]
    assert [each["largest"] for each in said] == pytest.approx([embedding / 2, embedding / 2], rel=0.01)

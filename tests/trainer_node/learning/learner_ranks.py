"""One rank of a learner, run by torchrun: ``learner_ranks.py PLAN.json``.

PLAN is a dictionary of ``Plan``. Each rank writes ``said_RANK.json`` beside it, and rank 0 each version as
``versions/B.S.safetensors``: whole tensors that torch gathers from the ranks.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from netem.fleet.small_model import SmallModel
from p2pcast.ground.errors import P2PCastError
from p2pcast.rollouts.probe_set import ProbeSet
from p2pcast.rollouts.routed_experts import RoutedExperts
from p2pcast.tasks.sums import Sums
from tests.trainer_node.learning import learner_stage as stage
from tests.trainer_node.learning.example_rows import row
from tests.trainer_node.learning.largest_tensor import LargestTensor
from trainer_node import Publisher
from trainer_node.learning import checkpoints
from trainer_node.learning.learner import HOOK, Learner
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.learner_startup import stopped_by_signals
from trainer_node.learning.objective.micro_batches import micro_batches
from trainer_node.learning.objective.training_rows import TrainingRow
from trainer_node.learning.packing_check import require_separate_rows
from trainer_node.learning.probing.learner_scores import learner_scores
from trainer_node.learning.publications import VersionPublisher
from trainer_node.learning.trained_weights import TrainedWeights
from trainer_node.learning.trainer_ranks import TrainerRanks, leave
from trainer_node.learning.warm_start import WarmStartOptions, warm_start

SUMS = Sums(digits=1, held_out=20)
SUMS_MODEL = SmallModel(SUMS.vocabulary, hidden=64, layers=2)
WARM_STEPS = 3
PROBE_SET = ProbeSet.checked([[5, 9, 11, 4, 7], [3, 8], [6] * 24])


@dataclass(frozen=True)
class Plan:
    """``batches``: pickle of the ledger's batches. ``stop_at``: step after which the learner is asked to end. ``dies``:
    rank, boundary and step at which a rank kills itself. ``hub``: address of a real hub, with ``token`` in the folder.
    ``warm``: a warm start alone, of a model for SUMS. ``load``: the model is loaded alone. ``replay``: a pass with
    recorded experts alone.
    """

    model: str
    batches: str = ""
    stop_at: int | None = None
    dies: tuple[int, str, int] | None = None
    hub: str | None = None
    warm: bool = False
    load: bool = False
    replay: bool = False


def replayed(plan: Plan, ranks: TrainerRanks) -> dict[str, Any]:
    """Log-probabilities with recorded experts, and the sizes of the routers' gradients. Each rank computes all rows."""
    model = LearnerModel(Path(plan.model), ranks, router_replay=True, recompute=True)
    (batch,) = micro_batches([list(enumerate(recorded_rows()))], 0, 1 << 12, "packed")
    logprobs = model.logprobs(batch)
    logprobs.sum().backward()
    gates = {name: stage.whole(p.grad) for name, p in model.parameters.items() if name.endswith("mlp.gate.weight")}
    return {"logprobs": logprobs.tolist(), "gates": {name: float(grad.norm()) for name, grad in gates.items()}}


def recorded_rows() -> list[TrainingRow]:
    """One row with experts that no router would choose, and one without."""
    ids = bytes([0, 1, 2, 3]) * 9
    return [row(1, 9, routed=RoutedExperts(2, 2, 1, ((0, 9),), ids)), row(2, 6)]


def warm(plan: Plan, ranks: TrainerRanks) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and the weights after them."""
    model = LearnerModel(Path(plan.model), ranks)
    options = WarmStartOptions(steps=WARM_STEPS, batch=16, most_tokens=64)
    weights = TrainedWeights(model.parameters, model.published, options.optimizer())
    demonstrations = SUMS.demonstrations(seed=1)
    losses = warm_start(model.logprobs, weights, demonstrations, options, vocabulary=model.vocabulary, ranks=ranks)
    return losses, {name: stage.whole(tensor) for name, tensor in model.working_copy()}


def load(plan: Plan, folder: Path, ranks: TrainerRanks) -> dict[str, Any]:
    """The largest memory of one tensor while the model was loaded, and the tensors, each gathered from the ranks."""
    with LargestTensor() as largest:
        model = LearnerModel(Path(plan.model), ranks)
    require_separate_rows(model)
    tensors = {name: stage.whole(tensor) for name, tensor in model.parameters.items()}
    buffers = {name: tensor.clone() for name, tensor in model.module.named_buffers()}
    logits = model.module(input_ids=torch.arange(20)[None], use_cache=False).logits
    if ranks.first:
        save_file(tensors | buffers | {"logits": logits.detach()}, folder / "loaded.safetensors")
    scores = learner_scores(model, PROBE_SET, 16, "packed")
    return {"largest": largest.nbytes, "scores": scores.tolist()}


def ledger_of(plan: Plan, folder: Path) -> stage.MemoryLedger:
    """As the ledger is after the newest checkpoint."""
    ledger = stage.MemoryLedger(pickle.loads(Path(plan.batches).read_bytes()))
    if (stored := checkpoints.newest(folder)) is not None:
        ledger.epoch, ledger.branch = stored.position.epoch, stored.position.branch
        ledger.lineage = [batch.id for batch in ledger.batches[: stored.position.step]]
        ledger.trained = set(ledger.lineage)
    return ledger


class Kept:
    """A hub whose versions rank 0 keeps, gathered by torch."""

    def __init__(self, folder: Path, ranks: TrainerRanks, hub: VersionPublisher) -> None:
        self._folder, self._ranks, self._hub = folder / "versions", ranks, hub
        self._folder.mkdir(exist_ok=True)

    def publish(self, step: int, named_tensors: Any, *, files: Any) -> Any:
        return self._kept(self._hub.publish, step, named_tensors, files)

    def resume(self, step: int, named_tensors: Any, *, files: Any) -> Any:
        return self._kept(self._hub.resume, step, named_tensors, files)

    def _kept(self, publish: Callable[..., Any], step: int, named_tensors: Any, files: Any) -> Any:
        tensors = {name: stage.whole(tensor) for name, tensor in named_tensors}
        handle = publish(step, named_tensors, files=files)
        version = handle.wait_durable(600)
        if self._ranks.first:
            save_file(tensors, self._folder / f"{version}.safetensors")
        return handle


def watcher_of(plan: Plan, learner: Learner, rank: int) -> Callable[[str], None]:
    def watch(boundary: str) -> None:
        learner.stopping = learner.stopping or learner.step == plan.stop_at
        if plan.dies == (rank, boundary, learner.step):
            os.kill(os.getpid(), signal.SIGKILL)

    return watch


def run(plan: Plan, folder: Path, ranks: TrainerRanks) -> dict[str, Any]:
    if plan.load:
        return load(plan, folder, ranks)
    if plan.replay:
        return replayed(plan, ranks)
    if plan.warm:
        losses, weights = warm(plan, ranks)
        if ranks.first:
            save_file(weights, folder / "warm.safetensors")
        return {"losses": losses}
    stored = folder / "checkpoints"
    with ExitStack() as stack:
        if plan.hub is None:
            newest = checkpoints.newest(stored)
            hub: VersionPublisher = stage.MemoryHub(0 if newest is None else newest.position.branch)
        else:
            hub = stack.enter_context(
                Publisher(plan.hub, token_file=folder / "token", base=Path(plan.model), plaintext=True)
            )
        made = stage.learner(
            stored,
            Path(plan.model),
            ledger_of(plan, stored) if ranks.first else None,
            Kept(folder, ranks, hub),
            ranks=ranks,
            export_every=2,
        )
        with stopped_by_signals(made), HOOK.by(watcher_of(plan, made, ranks.rank)):
            made.run()
    steps = [line for line in made.log.lines if line["event"] == "step"]  # type: ignore[attr-defined]
    return {
        "step": made.step,
        "losses": [line["loss"] for line in steps],
        "norms": [line["grad_norm"] for line in steps],
    }


def main() -> int:
    file = Path(sys.argv[1])
    written = json.loads(file.read_text())
    plan = Plan(**written | {"dies": None if written["dies"] is None else tuple(written["dies"])})
    torch.set_num_threads(1)
    ranks = TrainerRanks.start()
    said: dict[str, Any] = {}
    try:
        with ranks.together():
            said = run(plan, file.parent, ranks)
    except P2PCastError as error:
        said = {"error": type(error).__name__, "text": str(error)}
    finally:
        (file.parent / f"said_{ranks.rank}.json").write_text(json.dumps(said))
        ranks.end()
    return 1 if "error" in said else 0


if __name__ == "__main__":
    leave(main())

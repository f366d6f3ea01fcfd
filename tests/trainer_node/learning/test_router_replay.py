"""Router replay in the learner's forward and backward passes, against computations by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2pcast.ground.errors import LocalError, UsageError
from p2pcast.ground.version import Version
from p2pcast.rollouts.result import Span
from p2pcast.rollouts.routed_experts import RoutedExperts, RoutedTokens
from tests.trainer_node.learning.example_rows import HASH, result, row
from tests.trainer_node.learning.example_rows import batch as batch_of
from tests.trainer_node.learning.expert_models import EXPERTS, experts_folder, mixtral, qwen2_moe, qwen3_moe
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.learner_step import LearnerStep, StepOptions
from trainer_node.learning.monitoring.step_record import step_record
from trainer_node.learning.objective.micro_batches import MicroBatch, Packing, micro_batches
from trainer_node.learning.objective.policy_loss import LossOptions
from trainer_node.learning.objective.training_rows import TrainingRow, rows_of
from trainer_node.learning.trained_weights import OptimizerOptions, TrainedWeights
from trainer_node.learning.trainer_ranks import TrainerRanks

ALONE = TrainerRanks(0, 1, torch.device("cpu"))
LAYERS, TOP_K = 2, 2
FAMILIES = [qwen3_moe, qwen2_moe]


def drawn(tokens: int, seed: int = 0, *, start: int = 0) -> RoutedExperts:
    """Experts that no router would choose so."""
    rng, collected = np.random.default_rng(seed), RoutedTokens()
    order = rng.random((tokens, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K]
    collected.add(start, order.astype("u1"))
    found = collected.packed(1 << 20)
    assert found is not None
    return found


def one_batch(rows: Sequence[TrainingRow], packing: Packing = "packed") -> MicroBatch:
    (found,) = micro_batches([list(enumerate(rows))], 0, 1 << 12, packing)
    return found


def learner(folder: Path, make: Any = qwen3_moe, **options: Any) -> LearnerModel:
    if not folder.exists():
        experts_folder(folder, make, dtype=torch.float32)
    return LearnerModel(folder, ALONE, router_replay=True, **options)


class Routes:
    """Records inputs and outputs of each layer of experts, and its choices."""

    def __init__(self, model: LearnerModel) -> None:
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.chosen: list[torch.Tensor] = []
        for layer in model.module.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.register_forward_hook(self._layer)
                layer.mlp.gate.register_forward_hook(lambda _, __, out: self.chosen.append(out[2].detach()))

    def _layer(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        self.inputs.append(inputs[0].detach()[0])
        self.outputs.append(output.detach()[0])


def by_hand(block: Any, hidden: torch.Tensor, chosen: np.ndarray) -> torch.Tensor:
    """A layer of experts, one token and one expert after the other."""
    out = torch.zeros_like(hidden)
    for token, x in enumerate(hidden):
        probabilities = torch.softmax(block.gate.weight @ x, -1)
        gates = {int(e): probabilities[int(e)] for e in chosen[token]}
        if block.gate.norm_topk_prob:
            gates = {expert: gate / sum(gates.values()) for expert, gate in gates.items()}
        for expert, gate in gates.items():
            first, second = (block.experts.gate_up_proj[expert] @ x).chunk(2)
            out[token] += gate * (block.experts.down_proj[expert] @ (torch.nn.functional.silu(first) * second))
        if hasattr(block, "shared_expert"):
            out[token] += torch.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)
    return out


@pytest.mark.parametrize("make", FAMILIES)
def test_forced_layers_equal_a_computation_by_hand(tmp_path: Path, make: Any) -> None:
    model = learner(tmp_path / "m", make)
    routes, routed = Routes(model), drawn(9, 3)
    with torch.no_grad():
        model.scores(one_batch([row(1, 9, routed=routed)]))
        assert model.replay is not None
        blocks = [model.module.model.layers[layer].mlp for layer in model.replay.expert_layers]
        assert len(blocks) == len(routes.inputs) == (1 if make is qwen3_moe else 2)
        for layer, block, inputs, outputs in zip(
            model.replay.expert_layers, blocks, routes.inputs, routes.outputs, strict=True
        ):
            expected = by_hand(block, inputs, routed.array()[:, layer])
            assert torch.allclose(outputs, expected, atol=1e-5)


@pytest.mark.parametrize("make", FAMILIES)
def test_replay_of_the_own_choice_changes_nothing(tmp_path: Path, make: Any) -> None:
    model = learner(tmp_path / "m", make)
    assert model.replay is not None
    routes, plain = Routes(model), row(1, 12)
    with torch.no_grad():
        own = model.scores(one_batch([plain])).logprobs
        chosen = dict(zip(model.replay.expert_layers, routes.chosen, strict=True))
        ids = np.stack([chosen.get(n, torch.zeros_like(routes.chosen[0])).numpy() for n in range(LAYERS)], 1)
        collected = RoutedTokens()
        collected.add(0, ids.astype("u1"))
        replayed = model.scores(one_batch([replace(plain, routed=collected.packed(1 << 20))])).logprobs
        other = model.scores(one_batch([replace(plain, routed=drawn(12))])).logprobs
    assert torch.allclose(own, replayed, atol=1e-6)
    assert not torch.allclose(own, other, atol=1e-2)


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_rows_of_a_micro_batch_keep_their_own_experts(tmp_path: Path, packing: Packing) -> None:
    """Tokens without experts, rows without experts, and padding follow the learner's own choice."""
    model = learner(tmp_path / "m", qwen2_moe)
    rows = [row(1, 9, routed=drawn(8, 1)), row(2, 14), row(3, 12, routed=drawn(5, 2, start=4)), row(4, 7)]
    with torch.no_grad():
        alone = torch.cat([model.scores(one_batch([one], packing)).logprobs for one in rows])
        together = model.scores(one_batch(rows, packing)).logprobs
        without = model.scores(one_batch(rows, packing), replay=False).logprobs
    assert torch.allclose(alone, together, atol=1e-5)
    assert not torch.allclose(together, without, atol=1e-2)


def test_tokens_without_experts_follow_the_own_choice(tmp_path: Path) -> None:
    model = learner(tmp_path / "m", qwen2_moe)
    routes, one = Routes(model), row(3, 12)
    with torch.no_grad():
        model.scores(one_batch([one]))
        own, routes.chosen = routes.chosen[0], []
        model.scores(one_batch([replace(one, routed=drawn(5, 2, start=4))]))
    forced = routes.chosen[0]
    assert (forced[:4] == own[:4]).all()
    assert (forced[9:] == own[9:]).all()
    assert (forced[4:9].numpy() == drawn(5, 2, start=4).array()[:, 0]).all()


@pytest.mark.parametrize("make", FAMILIES)
def test_gradients_flow_through_gates_and_survive_recomputation(tmp_path: Path, make: Any) -> None:
    batches = [one_batch([row(1, 9, routed=drawn(9, 1)), row(2, 6)]), one_batch([row(3, 15, routed=drawn(15, 4))])]
    found = []
    for recompute in (False, True):
        model = learner(tmp_path / "m", make, recompute=recompute)
        for batch in batches:
            model.logprobs(batch).sum().backward()
        found.append({name: p.grad for name, p in model.parameters.items() if p.grad is not None})
    gates = [name for name in found[0] if name.endswith("mlp.gate.weight")]
    assert gates
    assert all(found[0][name].abs().max() > 1e-4 for name in gates)
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert torch.allclose(gradient, found[1][name], atol=1e-5), name


def test_gradients_of_gates_equal_finite_differences(tmp_path: Path) -> None:
    model = learner(tmp_path / "m", qwen3_moe)
    batch = one_batch([row(1, 9, routed=drawn(9, 1))])
    weight = model.module.model.layers[1].mlp.gate.weight
    model.logprobs(batch).sum().backward()
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            weight[2, 5] += sign * 1e-2
            values.append(model.logprobs(batch).sum())
            weight[2, 5] -= sign * 1e-2
    assert float(weight.grad[2, 5]) == pytest.approx(float(values[0] - values[1]) / 2e-2, rel=2e-2)


@pytest.mark.parametrize("scale", [1.0, 40.0, 300.0, 1e4])
def test_experts_without_probability_leave_gradients_finite(tmp_path: Path, scale: float) -> None:
    """A worker may state the experts that the learner's router would choose last."""
    model = learner(tmp_path / "m", partial(qwen2_moe, norm_topk_prob=True))
    with torch.no_grad():
        for layer in model.module.model.layers:
            layer.mlp.gate.weight *= scale
    found = model.logprobs(one_batch([row(1, 40, routed=drawn(40, 3))]))
    found.sum().backward()
    assert found.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters.values() if p.grad is not None)


def test_a_model_whose_routers_are_unknown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not fit a model of the type mixtral: routers are known of qwen2_moe"):
        learner(tmp_path / "m", mixtral)


def test_a_micro_batch_of_another_length_is_an_error(tmp_path: Path) -> None:
    model = learner(tmp_path / "m")
    assert model.replay is not None
    model.replay.follow(one_batch([row(1, 9, routed=drawn(9))]), ALONE.device)
    with pytest.raises(LocalError, match="routes 5 positions of a micro-batch of 9"):
        model.module(input_ids=torch.arange(5)[None])


def rollouts(*routed: RoutedExperts | None, replays: LearnerModel | None) -> tuple[Any, list[TrainingRow]]:
    made = batch_of([(result(routed_experts=one), float(number % 2)) for number, one in enumerate(routed)])
    assert replays is None or replays.replay is not None
    options: dict[str, Any] = {"kind": "grpo", "eps": 1e-4, "overlong": "keep", "step": 5, "staleness": 3}
    if replays is not None and replays.replay is not None:
        options |= {"experts": replays.replay.shape, "expert_layers": replays.replay.expert_layers}
    return made, rows_of(made, vocabulary=23, **options)


def test_rows_have_experts_that_fit_the_model_if_replay_is_on(tmp_path: Path) -> None:
    model, good = learner(tmp_path / "m"), drawn(3, start=4)  # tokens that version 0.4 computed
    dense = RoutedExperts(2, 2, 1, ((0, 1),), bytes(4))
    hostile = [good._replace(layers=4, top_k=1), RoutedExperts(2, 2, 1, ((0, 1),), bytes([0, 1, 0, 4])), dense]
    _, rows = rollouts(good, None, *hostile, replays=model)
    assert [one.routed for one in rows] == [good, None, None, None, None]
    _, rows = rollouts(good, None, replays=None)
    assert [one.routed for one in rows] == [None, None]


@pytest.mark.parametrize(
    ("spans", "spans_kept"),
    [
        # 0.4 has computed the prompt again, and sampled from its own experts' logits.
        ([(3, 3, 5, "recompute"), (4, 6, 8, "recompute")], ((4, 7),)),
        ([(3, 3, 5, "salt"), (4, 6, 8, "salt")], ((4, 7),)),
        ([(3, 3, 5, "keep"), (4, 6, 8, "keep")], ((0, 7),)),
        ([(3, 3, 5, "recompute"), (3, 6, 8, "recompute")], ((0, 7),)),
        ([(3, 3, 5, "recompute"), (4, 6, 7, "recompute"), (5, 7, 8, "recompute")], ((6, 7),)),
        # 0.4 has computed the prompt again, and 0.5 used what 0.4 had computed.
        ([(3, 3, 5, "recompute"), (4, 6, 7, "recompute"), (5, 7, 8, "keep")], ((4, 7),)),
        ([(3, 3, 5, "recompute"), (4, 6, 7, "keep"), (5, 7, 8, "keep")], ((0, 7),)),
    ],
)
def test_experts_before_a_switch_are_replayed_if_their_keys_were_kept(
    tmp_path: Path, spans: list[tuple[int, int, int, str]], spans_kept: tuple[tuple[int, int], ...]
) -> None:
    model, all_of = learner(tmp_path / "m"), drawn(7)
    assert model.replay is not None
    named = tuple(Span(Version(0, step), start, end, HASH, kv) for step, start, end, kv in spans)
    found = rows_of(
        batch_of([(result(routed_experts=all_of, spans=named), float(n)) for n in range(2)]),
        kind="grpo",
        eps=1e-4,
        overlong="keep",
        step=5,
        staleness=3,
        vocabulary=23,
        experts=model.replay.shape,
    )[0].routed
    assert found is not None
    assert found.spans == spans_kept
    assert (found.array() == all_of.array()[spans_kept[0][0] :]).all()


def test_a_step_reports_its_replayed_tokens_and_the_divergence_of_both_routings(tmp_path: Path) -> None:
    """The sampler's log-probabilities are those of the recorded experts, so replay alone finds them again."""
    model = learner(tmp_path / "m")
    assert model.replay is not None
    bad = RoutedExperts(2, 2, 1, ((0, 1),), bytes([0, 1, 0, 4]))
    made, rows = rollouts(drawn(7, 1), drawn(7, 2), bad, None, replays=model)
    scored = []
    for one in rows:
        batch = one_batch([one])
        logprobs = np.zeros(one.tokens, np.float32)
        with torch.no_grad():
            logprobs[one.learnt] = model.logprobs(batch).numpy()
        scored.append(replace(one, logprobs=logprobs))
    weights = TrainedWeights(model.parameters, model.published, OptimizerOptions())
    step = LearnerStep(model, weights, StepOptions(LossOptions(), 64), ALONE)
    found = step_record(made, rows, step.train(scored, 5, lambda: None))
    assert found["replayed_share"] == 6 / 32  # of both rollouts, the tokens that the newer version computed
    assert found["replay_refused"] == 1
    assert found["kl_replayed"] < 1e-9
    assert found["kl_own_routing"] > 1e-4
    assert found["kl_sampler"] < 1e-9

"""Scores of targets in chunks: the values and gradients of plain autograd, and no tensor of positions x vocabulary."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.support.tensor_device import DEVICE
from tests.trainer_node.learning.example_rows import row
from tests.trainer_node.learning.largest_tensor import LargestTensor
from tests.trainer_node.learning.learner_stage import ALONE
from tests.trainer_node.learning.tiny_model import tiny_model
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.objective import token_scores
from trainer_node.learning.objective.micro_batches import MicroBatch, Packing, deal, micro_batches
from trainer_node.learning.objective.token_scores import (
    TokenScores,
    candidate_logprobs,
    most_probable,
    scores_of_hidden,
    scores_of_logits,
)

pytestmark = pytest.mark.device

LN = math.log
F64 = torch.float64
TOKENS = 8192
"""Vocabulary of models: positions x vocabulary are more elements than anything else has."""


def plain(logits: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor) -> TokenScores:
    """By torch's autograd, all positions at once."""
    exact = logits if logits.dtype == F64 else logits.float()
    log_p = torch.log_softmax(exact / temperatures.to(exact).unsqueeze(-1), -1)
    return TokenScores(log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1).detach())


def example(rows: int, width: int, vocabulary: int, dtype: torch.dtype = F64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    return {
        "hidden": noise(rows, width).to(dtype).requires_grad_(),
        "weight": noise(vocabulary, width).to(dtype).requires_grad_(),
        "bias": noise(vocabulary).to(dtype).requires_grad_(),
        "targets": torch.randint(vocabulary, (rows,), generator=generator),
        "temperatures": 0.5 + torch.rand(rows, generator=generator, dtype=F64),
    }


def test_logprobs_and_entropies_by_hand() -> None:
    logits = torch.tensor([[0.0, LN(3), 0.0], [0.0, LN(3), 0.0]])
    found = scores_of_logits(logits, torch.tensor([1, 1]), torch.tensor([1.0, 0.5]))
    assert found.logprobs.tolist() == pytest.approx([LN(3 / 5), LN(9 / 11)])
    entropies = [-(0.6 * LN(0.6) + 0.4 * LN(0.2)), -(9 / 11 * LN(9 / 11) + 2 / 11 * LN(1 / 11))]
    assert found.entropies.tolist() == pytest.approx(entropies)


def test_token_that_cannot_be_sampled_adds_no_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf], [3.0, -math.inf, -math.inf]])
    found = scores_of_logits(logits, torch.tensor([0, 0]), torch.tensor(1.0))
    assert found.entropies.tolist() == pytest.approx([LN(2), 0.0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scores_are_computed_in_float32(dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(5, 50, generator=torch.Generator().manual_seed(1))).to(dtype)
    found = scores_of_logits(logits, torch.arange(5), torch.full((5,), 0.7))
    exact = plain(logits.double(), torch.arange(5), torch.full((5,), 0.7))
    for values, expected in zip(found, exact, strict=True):
        assert values.dtype == torch.float32
        torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-6)


def test_scores_of_float64_stay_float64() -> None:
    assert scores_of_logits(torch.zeros(2, 3, dtype=F64), torch.tensor([0, 1]), torch.ones(2)).logprobs.dtype == F64


@pytest.mark.parametrize("chunk_rows", [1, 4, 7, 11, 12])
@pytest.mark.parametrize("biased", [False, True])
def test_chunks_have_the_values_and_gradients_of_the_whole(chunk_rows: int, biased: bool) -> None:
    given = example(11, 6, 17)
    bias = given["bias"] if biased else None
    leaves = [given["hidden"], given["weight"], *([given["bias"]] if biased else [])]
    weights = torch.linspace(-1, 1, 11, dtype=F64)
    found = scores_of_hidden(
        given["hidden"], given["weight"], bias, given["targets"], given["temperatures"], chunk_logits=17 * chunk_rows
    )
    whole = plain(
        torch.nn.functional.linear(given["hidden"], given["weight"], bias), given["targets"], given["temperatures"]
    )
    assert not found.entropies.requires_grad
    for values, expected in zip(found, whole, strict=True):
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad((found.logprobs * weights).sum(), leaves)
    expected_gradients = torch.autograd.grad((whole.logprobs * weights).sum(), leaves)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_gradients_are_exact() -> None:
    given = example(5, 3, 7)

    def logprobs(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        found = scores_of_hidden(hidden, weight, bias, given["targets"], given["temperatures"], chunk_logits=14)
        return found.logprobs

    assert torch.autograd.gradcheck(logprobs, (given["hidden"], given["weight"], given["bias"]))


@pytest.mark.parametrize("chunk_rows", [1, 2, 5])
def test_gradients_of_candidates_are_exact(chunk_rows: int) -> None:
    """A candidate may be named twice."""
    given = example(5, 3, 7)
    candidates = torch.tensor([[0, 6, 2], [1, 1, 4], [3, 5, 0], [6, 2, 2], [4, 0, 1]])

    def logprobs(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return candidate_logprobs(hidden, weight, bias, candidates, given["temperatures"], chunk_logits=7 * chunk_rows)

    leaves = (given["hidden"], given["weight"], given["bias"])
    assert torch.autograd.gradcheck(logprobs, leaves)
    logits = torch.nn.functional.linear(*leaves) / given["temperatures"].unsqueeze(-1)
    torch.testing.assert_close(logprobs(*leaves), logits.log_softmax(-1).gather(-1, candidates))


@pytest.mark.parametrize("chunk_rows", [1, 3, 16])
def test_most_probable_tokens_follow_the_target(chunk_rows: int) -> None:
    given = example(11, 6, 17)
    args = given["hidden"], given["weight"], given["bias"]
    log_p = (torch.nn.functional.linear(*args) / given["temperatures"].unsqueeze(-1)).log_softmax(-1)
    for count in (1, 4, 17, 50):
        found = most_probable(*args, given["targets"], count, given["temperatures"], chunk_logits=17 * chunk_rows)
        assert torch.equal(found.ids[:, 0], given["targets"])
        assert torch.equal(found.ids[:, 1:], log_p.topk(min(count, 17), -1).indices)
        torch.testing.assert_close(found.logprobs, log_p.gather(-1, found.ids))
    assert most_probable(args[0][:0], *args[1:], given["targets"][:0], 4, torch.tensor(1.0)).ids.shape[0] == 0


def test_many_chunks_lose_no_gradient_to_bfloat16() -> None:
    given = example(512, 8, 32, torch.bfloat16)
    ones = torch.ones(512)

    def gradient(chunk_logits: int) -> torch.Tensor:
        found = scores_of_hidden(
            given["hidden"], given["weight"], None, given["targets"], ones, chunk_logits=chunk_logits
        )
        (of_weight,) = torch.autograd.grad(found.logprobs.sum(), given["weight"])
        return of_weight.double()

    one, many = gradient(512 * 32), gradient(32)
    assert float((one - many).norm() / one.norm()) < 2**-8, "half a unit in the last place of bfloat16"


def test_positions_by_vocabulary_never_exist_whole() -> None:
    rows, width, vocabulary, chunk_rows = 1024, 16, 2048, 8
    given = example(rows, width, vocabulary, torch.float32)
    with LargestTensor() as largest:
        found = scores_of_hidden(
            given["hidden"], given["weight"], None, given["targets"], given["temperatures"],
            chunk_logits=chunk_rows * vocabulary,
        )  # fmt: skip
        found.logprobs.sum().backward()
    assert largest.nbytes / 4 == max(rows * width, vocabulary * width, chunk_rows * vocabulary) < rows * vocabulary / 30


# -- in a model


def micro_batch(packing: Packing) -> MicroBatch:
    (batch,) = micro_batches(deal([row(seed, 40 + seed) for seed in range(6)], 1), 0, 512, packing)
    return batch


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    tiny_model().save_pretrained(base / "plain")
    torch.manual_seed(2)
    sizes = {
        "vocab_size": TOKENS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
    }
    Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)).save_pretrained(base / "tied")
    Gemma2ForCausalLM(
        Gemma2Config(**sizes, final_logit_softcapping=2.0, initializer_range=0.5, tie_word_embeddings=False)
    ).save_pretrained(base / "softcapped")
    return {path.name: path for path in base.iterdir()}


@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize("name", ["plain", "tied", "softcapped"])
def test_model_scores_as_its_own_logits_do(folders: dict[str, Path], name: str, packing: Packing) -> None:
    model, batch = LearnerModel(folders[name], ALONE), micro_batch(packing)
    for _ in range(2):  # a model that changes its logits is found in the first pass
        found = model.scores(batch)
        found.logprobs.sum().backward()
        gradients = {key: p.grad.clone() for key, p in model.parameters.items()}
        model.module.zero_grad()
        logits = model.module(
            input_ids=batch.input_ids.to(DEVICE),
            position_ids=batch.position_ids.to(DEVICE),
            attention_mask=None if batch.attention_mask is None else batch.attention_mask.to(DEVICE),
            use_cache=False,
        ).logits
        at_targets = logits.flatten(0, 1)[batch.logit_positions.to(DEVICE)]
        expected = plain(at_targets, batch.targets.to(DEVICE), batch.temperatures.to(DEVICE))
        for values, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-5)
        expected.logprobs.sum().backward()
        for key, parameter in model.parameters.items():
            torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-4, atol=1e-4)
        model.module.zero_grad()


def test_model_never_holds_all_logits(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(token_scores.scores_of_hidden.__kwdefaults__, "chunk_logits", 8 * TOKENS)
    model, batch = LearnerModel(folders["tied"], ALONE), micro_batch("packed")
    with LargestTensor() as largest:
        model.scores(batch).logprobs.sum().backward()
    assert largest.nbytes / 4 < len(batch.targets) * TOKENS / 2

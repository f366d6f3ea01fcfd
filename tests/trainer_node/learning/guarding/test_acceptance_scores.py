"""Acceptance rates by the learner's forward pass, against a computation by hand; and which tokens are judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from p2pcast.ground.version import Version
from p2pcast.rollouts.result import Span
from p2pcast.rollouts.top_logprobs import TopLogprobs, TopTokens
from tests.trainer_node.learning.example_rows import HASH, VOCABULARY, batch, result, row
from tests.trainer_node.learning.learner_stage import ALONE
from tests.trainer_node.learning.tiny_model import tiny_model
from trainer_node.learning.guarding.acceptance_scores import acceptance_rates
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.objective.judged_tokens import JudgedTokens, judged_tokens
from trainer_node.learning.objective.micro_batches import Packing
from trainer_node.learning.objective.training_rows import TrainingRow, rows_of

COUNT = 5
SCHEDULE = bytes(range(32))


def known(name: bytes) -> bool:
    return name == SCHEDULE


def top(*spans: tuple[int, int]) -> TopLogprobs:
    """Of five equally probable tokens at each position."""
    collected = TopTokens()
    for start, end in spans:
        ids = np.tile(np.arange(start, start + COUNT, dtype=np.uint32), (end - start, 1))
        collected.add(start, ids, np.full(ids.shape, np.log(1 / COUNT), np.float32))
    found = collected.packed()
    assert found is not None
    return found


def judged_row(seed: int, tokens: int, places: list[int], count: int = COUNT) -> TrainingRow:
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.random((len(places), VOCABULARY)).argsort(-1)[:, :count], -1)
    logprobs = np.log(rng.dirichlet(np.ones(count + 1), len(places))[:, :count]).astype("f4")
    judged = JudgedTokens(SCHEDULE, np.array(places), ids.astype(np.int64), logprobs)
    return replace(row(seed, tokens), judged=[judged])


@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize("most_tokens", [16, 4096])
def test_rates_are_sums_of_the_lesser_probabilities(tmp_path: Path, packing: Packing, most_tokens: int) -> None:
    module = tiny_model()
    module.save_pretrained(tmp_path)
    rows = [judged_row(1, 9, [2, 3, 8]), row(2, 7), judged_row(3, 12, [1, 11]), judged_row(4, 5, [4], count=3)]
    found = acceptance_rates(LearnerModel(tmp_path, ALONE), ALONE, rows, most_tokens, packing, known)
    by_places = {tuple(one.positions.tolist()): one for one in found}
    assert len(by_places) == len(found) == 3
    for one in (one for one in rows if one.judged):
        (judged,) = one.judged
        with torch.no_grad():
            logits = module(input_ids=torch.from_numpy(one.token_ids)[None]).logits[0, judged.places - 1]
        p = torch.softmax(logits / one.temperature, -1).gather(-1, torch.from_numpy(judged.ids)).numpy()
        expected = np.minimum(p, np.exp(judged.logprobs)).sum(-1)
        rates = by_places[tuple(judged.places.tolist())]
        assert rates.schedule == SCHEDULE
        assert np.allclose(rates.alphas, expected, atol=1e-5)
        assert ((rates.alphas > 0) & (rates.alphas < 1)).all()


def test_a_model_that_changes_its_logits_is_scored_by_these(tmp_path: Path) -> None:
    """Gemma's head is followed by a cap of the logits."""
    torch.manual_seed(0)
    module = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, final_logit_softcapping=0.5, attn_implementation="eager",
        )
    )  # fmt: skip
    module.save_pretrained(tmp_path)
    one = judged_row(1, 9, [2, 8])
    (found,) = acceptance_rates(LearnerModel(tmp_path, ALONE), ALONE, [one], 64, "padded", known)
    (judged,) = one.judged
    with torch.no_grad():
        logits = module(input_ids=torch.from_numpy(one.token_ids)[None]).logits[0, judged.places - 1]
    p = torch.softmax(logits / one.temperature, -1).gather(-1, torch.from_numpy(judged.ids)).numpy()
    assert np.allclose(found.alphas, np.minimum(p, np.exp(judged.logprobs)).sum(-1), atol=1e-4)


def test_tokens_whose_forward_pass_overflows_are_left_out(tmp_path: Path) -> None:
    module = tiny_model()
    one, other = judged_row(1, 9, [2, 8]), judged_row(2, 9, [3, 8])
    odd = next(token for token in one.token_ids.tolist() if token not in other.token_ids)
    with torch.no_grad():
        module.get_input_embeddings().weight[odd] = torch.nan
    module.save_pretrained(tmp_path)
    found = acceptance_rates(LearnerModel(tmp_path, ALONE), ALONE, [one, other], 9, "padded", known)
    assert [3, 8] in [rates.positions.tolist() for rates in found]
    assert all(len(rates.positions) == len(rates.alphas) and np.isfinite(rates.alphas).all() for rates in found)


def test_rows_without_judged_tokens_cost_no_pass(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    model = LearnerModel(tmp_path, ALONE)
    model.module.forward = None
    assert acceptance_rates(model, ALONE, [row(1, 9)], 64, "packed", known) == []
    assert acceptance_rates(model, ALONE, [judged_row(1, 9, [2])], 64, "packed", lambda name: False) == []


def test_first_tokens_of_turns_and_dense_or_older_versions_are_not_judged() -> None:
    made = result(top_logprobs=top((3, 5), (6, 8)), schedules=[(Version(0, 3), b"a" * 32), (Version(0, 4), b"b" * 32)])
    found = judged_tokens(made, 0)
    assert [(one.schedule[:1], one.places.tolist()) for one in found] == [(b"a", [4]), (b"b", [7])]
    assert found[1].ids.tolist() == [[6, 7, 8, 9, 10]]
    assert [one.schedule[:1] for one in judged_tokens(made, 4)] == [b"b"]
    assert list(judged_tokens(replace(made, schedules=None), 0)) == []
    assert list(judged_tokens(replace(made, top_logprobs=None), 0)) == []


def test_spans_of_one_schedule_are_judged_together() -> None:
    spans = (Span(Version(0, 3), 3, 5, HASH, "recompute"), Span(Version(0, 4), 6, 8, HASH, "recompute"))
    same = [(Version(0, 3), b"a" * 32), (Version(0, 4), b"a" * 32)]
    (found,) = judged_tokens(result(spans=spans, top_logprobs=top((3, 5), (6, 8)), schedules=same), 0)
    assert found.places.tolist() == [4, 7]


def test_rows_have_judged_tokens_if_the_guard_asks() -> None:
    made = result(top_logprobs=top((3, 5)), schedules=[(Version(0, 3), b"a" * 32)])
    options = {"kind": "dr_grpo", "eps": 0.0, "overlong": "keep", "step": 5, "staleness": 3, "vocabulary": VOCABULARY}
    of = batch([(made, 1.0), (result(), 0.0)])
    counts = {
        staleness: [len(one.judged) for one in rows_of(of, **options, judged_staleness=staleness)]
        for staleness in (None, 1, 2)
    }
    assert counts == {None: [0, 0], 1: [0, 0], 2: [1, 0]}

"""Own sampling: log-probabilities of the learner's own forward pass, plays that the ledger would accept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from netem.fleet.small_model import SmallModel, make_small_model
from netem.rollouts.own_sampler import batch_of, sampled_groups
from p2pcast.checkpoint import Checkpoint
from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version
from p2pcast.rollouts.result import fault
from p2pcast.tasks.sums import END, Sums
from p2pcast.tasks.task_loader import load_task
from trainer_node.learning.objective.training_rows import rows_of

TASKS = ("sums", "leduc")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> Any:
    """Of random weights with a wide spread: some tokens are likely, and some are not."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return SmallModel(16, hidden=64, layers=1, spread=0.3).made()


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> Any:
    if request.param == "leduc":
        pytest.importorskip("pyspiel", reason="needs the extra leduc")
    return load_task(request.param)


def groups_of(model: Any, task: Any, seed: int = 0, prompts: int = 12, **changes: Any) -> Any:
    return sampled_groups(model, task, islice(task.jobs(1), prompts), size=4, seed=seed, **changes)


def tokens_of(groups: Any) -> list[list[int]]:
    return [one.result.token_ids.tolist() for group in groups for one in group.rollouts]


def whole_pass(model: Any, token_ids: np.ndarray) -> np.ndarray:
    """The log-probability of each token but the first."""
    tokens = torch.tensor(token_ids.astype(np.int64))[None]
    with torch.no_grad():
        found = torch.log_softmax(model(input_ids=tokens).logits[0, :-1], dim=-1)
    return found.gather(1, tokens[0, 1:, None])[:, 0].numpy()


def test_log_probabilities_match_one_pass_over_the_whole_play(model: Any, task: Any) -> None:
    for group in groups_of(model, task):
        for one in group.rollouts:
            result = one.result
            expected = whole_pass(model, result.token_ids)
            sampled = result.mask[1:] == 1
            np.testing.assert_allclose(result.logprobs[1:][sampled], expected[sampled], atol=2e-5)
            assert not result.logprobs[result.mask == 0].any()


def test_tokens_are_drawn_as_often_as_their_probability_says(model: Any) -> None:
    group = sampled_groups(model, Sums(), islice(Sums().jobs(1), 1), size=4000, seed=3)[0]
    first = len(group.group.prompt) + 2
    said = np.bincount([int(one.result.token_ids[first]) for one in group.rollouts], minlength=16) / 4000
    tokens = torch.tensor(group.rollouts[0].result.token_ids[:first].astype(np.int64))[None]
    with torch.no_grad():
        expected = model(input_ids=tokens).logits[0, -1].softmax(-1).numpy()
    np.testing.assert_allclose(said, expected, atol=4 * np.sqrt(0.25 / 4000))


def test_the_ledger_accepts_the_plays(model: Any, task: Any) -> None:
    version = Version(0, 7)
    groups = groups_of(model, task, version=version)
    for group in groups:
        assert len(group.rollouts) == group.group.size == 4
        for one in group.rollouts:
            assert fault(one.result, task.vocabulary) is None
            assert {span.version for span in one.result.spans} == {version}
    batch = batch_of(groups, step=7)
    assert batch.groups_played == 12
    assert batch.mean_reward == pytest.approx(np.mean([one.reward for group in groups for one in group.rollouts]))
    assert all(len({one.reward for one in group.rollouts}) > 1 for group in batch.groups)
    rows = rows_of(batch, kind="grpo", eps=1e-4, overlong="keep", step=7, staleness=0, vocabulary=task.vocabulary)
    assert len(rows) == 4 * len(batch.groups)


def test_nothing_follows_a_stop_token(model: Any) -> None:
    results = [one.result for group in groups_of(model, Sums(), prompts=64) for one in group.rollouts]
    assert {result.stop for result in results} == {"end", "length"}
    for result in results:
        said = result.token_ids[result.mask == 1].tolist()
        assert (said.index(END) + 1 if END in said else 4) == len(said)
        assert (result.stop == "end") == (END in said)


def test_equal_seeds_give_equal_plays(model: Any, task: Any) -> None:
    first, again, other = (groups_of(model, task, seed) for seed in (0, 0, 1))
    assert tokens_of(first) == tokens_of(again) != tokens_of(other)
    for one, two in zip(first, again, strict=True):
        for a, b in zip(one.rollouts, two.rollouts, strict=True):
            assert a.result.logprobs.tobytes() == b.result.logprobs.tobytes()


def test_greedy_plays_of_one_prompt_are_equal_and_are_evaluations(model: Any, task: Any) -> None:
    groups = groups_of(model, task, temperature=0.0)
    assert {group.group.purpose for group in groups} == {"evaluate"}
    for group in groups:
        assert len({one.result.token_ids.tobytes() for one in group.rollouts}) == 1
    for one in groups[0].rollouts:
        first = one.result.mask.tolist().index(1)
        tokens = torch.tensor(one.result.token_ids[:first].astype(np.int64))[None]
        with torch.no_grad():
            assert int(one.result.token_ids[first]) == int(model(input_ids=tokens).logits[0, -1].argmax())


class Sleeping(Sums):
    async def play(self, sampler: Any, job: Any) -> Any:
        await asyncio.sleep(0)


def test_a_play_that_awaits_something_else_is_refused(model: Any) -> None:
    with pytest.raises(UsageError, match="task sums awaits something else than its sampler"):
        sampled_groups(model, Sleeping(), islice(Sums().jobs(0), 1), size=2, seed=0)


# -- small models


def test_equal_arguments_give_equal_folders(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    words = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        made = make_small_model(tmp_path / name, 16, hidden=64, layers=1, seed=seed)
        words.append((made / "model.safetensors").read_bytes())
    assert words[0] == words[1] != words[2]
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(("dtype", "stored"), [("float32", "F32"), ("bfloat16", "BF16")])
def test_a_small_model_is_a_checkpoint_of_one_dtype(tmp_path: Path, dtype: Any, stored: str) -> None:
    layout = Checkpoint.open(make_small_model(tmp_path / "m", 16, dtype=dtype)).layout()
    assert {tensor.dtype for tensor in layout.tensors} == {stored}
    assert 350_000 < layout.params < 450_000


@pytest.mark.parametrize("sizes", [(16, 100, 1), (16, 0, 1), (0, 64, 1), (16, 64, 0)])
def test_sizes_that_do_not_fit_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match="cannot be made"):
        SmallModel(*sizes)

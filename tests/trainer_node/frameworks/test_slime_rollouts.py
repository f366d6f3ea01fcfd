"""slime's rollout function on a real ledger. slime is played: its loop, its arguments, its samples."""

from __future__ import annotations

import asyncio
import enum
import itertools
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from p2pcast.ground.errors import RetryableError, UsageError
from p2pcast.ground.version import Version
from tests.trainer_node.frameworks.bridge_stage import GROUPS, SIZE, Ledger, batch_states, filled_ledger, played_hub
from trainer_node.frameworks import slime_rollouts
from trainer_node.frameworks.ledger_steps import TRACKER
from trainer_node.frameworks.slime_rollouts import FORMER_REWARDS, JOURNAL, REWARDS, generate_rollout, ledger_rewards

FIRST = Version(0, 1)
"""slime counts its versions from 1."""


@dataclass
class Sample:
    """The fields of slime's own that training reads."""

    class Status(enum.Enum):
        COMPLETED = "completed"
        TRUNCATED = "truncated"

    group_index: int
    index: int
    rollout_id: int
    tokens: list[int]
    response_length: int
    reward: float
    loss_mask: list[int]
    weight_versions: list[str]
    rollout_log_probs: list[float]
    remove_sample: bool
    status: Status
    metadata: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(autouse=True)
def _played_slime(monkeypatch: pytest.MonkeyPatch) -> None:
    types = ModuleType("slime.utils.types")
    types.Sample = Sample  # type: ignore[attr-defined]
    for module in (ModuleType("slime"), ModuleType("slime.utils"), types):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(slime_rollouts, "_rollouts", None)


def arguments(save: Path, **more: Any) -> SimpleNamespace:
    """slime's, for one optimiser step a rollout."""
    given = {
        "rollout_batch_size": GROUPS,
        "n_samples_per_prompt": SIZE,
        "global_batch_size": GROUPS * SIZE,
        "custom_reward_post_process_path": REWARDS,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "advantage_estimator": "grpo",
        "update_weights_interval": 1,
        "async_save": False,
        "save": str(save),
    }
    return SimpleNamespace(**(given | more))


def use(monkeypatch: pytest.MonkeyPatch, ledger: Ledger, hub: str) -> None:
    monkeypatch.setenv("P2PCAST_LEDGER", ledger.url)
    monkeypatch.setenv("P2PCAST_LEDGER_BEARER_FILE", str(ledger.bearer))
    monkeypatch.setenv("P2PCAST_HUB_HTTP", hub)


def trained(args: Any, first: int, last: int, save_at: int) -> list[list[Any]]:
    """Samples of the rollouts from ``first`` to ``last``, as slime's loop flattens them. Megatron names the checkpoint
    of rollout ``save_at`` in its tracker.
    """
    slime_rollouts._rollouts = None
    found = []
    for number in range(first, last + 1):
        groups = generate_rollout(args, number, None)
        assert all(one.rollout_id is not None for group in groups for one in group)
        found.append(list(itertools.chain.from_iterable(groups)))
        if number == save_at:
            (Path(args.save) / TRACKER).write_text(str(number))
    return found


def until_error(args: Any) -> None:
    for number in range(1, 100):
        generate_rollout(args, number, None)


def assert_samples(samples: list[Any]) -> None:
    raw, advantages = ledger_rewards(None, samples)
    for one, reward, advantage in zip(samples, raw, advantages, strict=True):
        assert one.response_length == len(one.loss_mask) == len(one.rollout_log_probs) == 2
        assert one.loss_mask == [1, 1]
        assert one.rollout_log_probs == [-1.0, -1.0]
        assert one.tokens[-2:] == [3 if reward else 4, 2]
        assert advantage == pytest.approx((reward - 0.5) / (0.5 + 1e-4))
        assert one.weight_versions == ["1"]
        assert one.status is Sample.Status.COMPLETED


async def test_each_batch_is_trained_once_though_slime_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, save = tmp_path / "ledger", tmp_path / "save"
    state.mkdir()
    save.mkdir()
    async with filled_ledger(state, served=FIRST) as ledger:
        await ledger.publish(FIRST)
        async with played_hub("0.1") as hub:
            use(monkeypatch, ledger, hub)
            found = await asyncio.to_thread(trained, arguments(save), 0, 3, 1)
        # The checkpoint of rollout 1 is loaded: slime publishes its weights as version 3, and the hub under branch 1.
        async with played_hub("0.1", "0.4", "1.3") as hub:
            use(monkeypatch, ledger, hub)
            again = await asyncio.to_thread(trained, arguments(save), 2, 4, 3)
    for samples in found + again:
        assert len(samples) == GROUPS * SIZE
        assert_samples(samples)
    # Rollout r is step r + 1. No checkpoint contains rollout 4.
    states = [(1, "trained"), (2, "trained"), (3, "reopened"), (3, "trained"), (4, "reopened"), (4, "trained")]
    assert batch_states(state) == [*states, (5, "cut")]
    assert list(json.loads((save / JOURNAL).read_text())["batches"]) == ["5"]


async def test_a_short_batch_is_filled_with_samples_that_are_not_learnt_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with filled_ledger(tmp_path, served=FIRST) as ledger, played_hub("0.1") as hub:
        await ledger.publish(FIRST)
        use(monkeypatch, ledger, hub)
        sizes = {"rollout_batch_size": GROUPS + 1, "global_batch_size": (GROUPS + 1) * SIZE}
        (samples,) = await asyncio.to_thread(trained, arguments(tmp_path, **sizes), 0, 0, 0)
        assert [one.remove_sample for one in samples] == [False] * GROUPS * SIZE + [True] * SIZE
        assert [one.metadata[slime_rollouts.ADVANTAGE] for one in samples[-SIZE:]] == [0.0] * SIZE


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"global_batch_size": 4}, "slime has --global-batch-size 4, and batches of a ledger need 8"),
        ({"custom_reward_post_process_path": None}, "need trainer_node.frameworks.slime_rollouts.ledger_rewards"),
        ({"rollout_top_p": 0.9}, "slime has --rollout-top-p 0.9, and batches of a ledger need 1.0"),
        ({"async_save": True}, "slime has --async-save True"),
        ({"save": None}, "need --save"),
        ({"advantage_estimator": "ppo"}, "--advantage-estimator ppo changes the ledger's advantages"),
    ],
)
def test_settings_that_change_the_batch_are_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        generate_rollout(SimpleNamespace(**(vars(arguments(tmp_path)) | changed)), 0, None)


def test_the_former_name_of_the_rewards_is_taken(tmp_path: Path) -> None:
    slime_rollouts.check(arguments(tmp_path, custom_reward_post_process_path=FORMER_REWARDS))


async def test_a_ledger_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="P2PCAST_LEDGER is not set"):
        generate_rollout(arguments(tmp_path), 0, None)
    with pytest.raises(UsageError, match="the ledger plays evaluations itself"):
        generate_rollout(arguments(tmp_path), 0, None, evaluation=True)
    async with filled_ledger(tmp_path, served=FIRST) as ledger, played_hub("0.1") as hub:
        use(monkeypatch, ledger, hub)
        await ledger.publish(FIRST)
        small = arguments(tmp_path, rollout_batch_size=1, global_batch_size=SIZE)
        for args, first, said in (
            (arguments(tmp_path), 4, "newest version is 0.1, and rollout 4 needs version 5"),
            (arguments(tmp_path, update_weights_interval=9), 0, "starves a ledger with --staleness 8"),
            (small, 0, "has 8 samples, and slime trains 4 a step"),
            (arguments(tmp_path, rollout_temperature=0.7), 0, "temperature 1.0, and the trainer computes with 0.7"),
        ):
            with pytest.raises(UsageError, match=said):
                await asyncio.to_thread(trained, args, first, first, first)


async def test_a_dead_ledger_ends_the_rollout_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with filled_ledger(tmp_path, served=FIRST) as ledger, played_hub("0.1") as hub:
        use(monkeypatch, ledger, hub)
        await ledger.publish(FIRST)
        monkeypatch.setenv("P2PCAST_LEDGER_GIVE_UP_S", "5")
        monkeypatch.setenv("P2PCAST_LEDGER_PATIENCE_S", "5")
        await asyncio.to_thread(trained, arguments(tmp_path), 0, 0, 0)
        await ledger.idle()
        with pytest.raises(RetryableError, match=r"the ledger has had no batch for step \d+ for .* do workers run"):
            await asyncio.to_thread(until_error, arguments(tmp_path))
        await ledger.stop()
        with pytest.raises(RetryableError, match="does not answer"):
            await asyncio.to_thread(trained, arguments(tmp_path), 0, 0, 0)

"""slime: one batch of a ledger for each rollout. Written against slime's source (commit 624b824), not run.

    python train.py … --rollout-function-path trainer_node.frameworks.slime_rollouts.generate_rollout \\
        --custom-reward-post-process-path trainer_node.frameworks.slime_rollouts.ledger_rewards

``settings_of_environment`` names the variables of the environment. The hub publishes slime's folder
``weight_v00000N`` as a version of step N, which has the weights after N - 1 rollouts. So rollout r is step r + 1 of the
ledger.

Guarantees: slime trains on accepted results alone, with the ledger's advantages. Each batch is trained at most once on
the way to any checkpoint that survives. Asking for rollout r says that rollout r - 1 is trained; ``train_async.py``
asks one rollout early. After a restart, batches that the loaded checkpoint does not contain are opened again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from p2pcast.daemon.daemon_requests import DEFAULT_URL
from p2pcast.ground.errors import UsageError
from trainer_node.frameworks.ledger_steps import (
    GIVE_UP_S,
    PATIENCE_S,
    LedgerSettings,
    LedgerSteps,
    filled,
    first_sampled,
    newest_version,
    tracked,
)

if TYPE_CHECKING:
    from trainer_node.learning.objective.training_rows import TrainingRow

REWARDS: Final = "trainer_node.frameworks.slime_rollouts.ledger_rewards"
FORMER_REWARDS: Final = "p2pcast.adapters.slime_rollouts.ledger_rewards"
"""The same function, until 0.3."""
JOURNAL: Final = "p2pcast-ledger.json"
"""In slime's ``--save`` folder."""
ADVANTAGE: Final = "ledger_advantage"
"""In the metadata of a sample."""


def settings_of_environment() -> LedgerSettings:
    """``P2PCAST_LEDGER``: URL, with ``P2PCAST_LEDGER_BEARER_FILE``. For https, ``P2PCAST_HUB`` and
    ``P2PCAST_TOKEN_FILE``. ``P2PCAST_HUB_HTTP``: URL of the hub's HTTP server. ``P2PCAST_LEDGER_PATIENCE_S``: longest
    wait for a batch, in seconds. ``P2PCAST_LEDGER_GIVE_UP_S``: for an answer. Raises UsageError.
    """
    if not (ledger := os.environ.get("P2PCAST_LEDGER")):
        raise UsageError("P2PCAST_LEDGER is not set: give slime the ledger's URL")
    try:
        patience_s = float(os.environ.get("P2PCAST_LEDGER_PATIENCE_S", PATIENCE_S))
        give_up_s = float(os.environ.get("P2PCAST_LEDGER_GIVE_UP_S", GIVE_UP_S))
    except ValueError as error:
        raise UsageError(f"a wait for the ledger is no number of seconds: {error}") from None
    return LedgerSettings(
        ledger,
        os.environ.get("P2PCAST_LEDGER_BEARER_FILE") or None,
        os.environ.get("P2PCAST_HUB") or None,
        os.environ.get("P2PCAST_TOKEN_FILE") or None,
        os.environ.get("P2PCAST_HUB_HTTP", DEFAULT_URL),
        patience_s,
        give_up_s,
    )


class SlimeRollouts:
    """Of one process of slime, from the first rollout on. ``args``: slime's. Raises UsageError, LocalError, and errors
    of the ledger.
    """

    def __init__(self, args: Any, first: int) -> None:
        check(args)
        settings = settings_of_environment()
        newest = newest_version(settings.hub_http)
        if newest.step != first + 1:
            raise UsageError(
                f"the hub's newest version is {newest}, and rollout {first} needs version {first + 1}: give slime"
                f" `update_weight_start_version: {first}` in --custom-config-path, as examples/slime_trainer.sh does"
            )
        self._patience_s = settings.patience_s
        self._folder = Path(args.save)
        self._samples = 0
        self._steps = LedgerSteps(settings.client(), self._folder / JOURNAL)
        facts = self._steps.begin_by_journal(newest.branch, first + 1, checkpoint=first > 0)
        if args.update_weights_interval > max(1, facts.staleness):
            raise UsageError(
                f"--update-weights-interval {args.update_weights_interval} starves a ledger with --staleness"
                f" {facts.staleness}: give slime {max(1, facts.staleness)} or less"
            )
        self._saved = tracked(self._folder)
        """The newest checkpoint that the ledger knows, or that an earlier run has left behind."""

    def rollout(self, args: Any, number: int) -> list[list[Any]]:
        """Samples by group, as many as slime trains in a step."""
        batch = self._steps.take(number + 1, self._patience_s)
        # Megatron's checkpoint of rollout r is named r. It contains r + 1 rollouts.
        saved = tracked(self._folder)
        if saved is not None and saved != self._saved and saved < number:
            self._steps.acknowledge(saved + 2)
            self._saved = saved
        rows = self._steps.rows(batch, temperature=args.rollout_temperature)
        whole = filled(rows, args.rollout_batch_size * args.n_samples_per_prompt, "slime", number)
        groups = list(_divided(whole, len(rows)))
        return [[self._sample(row, number, filler=filler) for row, filler in group] for group in groups]

    def _sample(self, row: TrainingRow, number: int, *, filler: bool) -> Any:
        from slime.utils.types import Sample

        begins = first_sampled(row)
        versions = sorted({int(step) for step in row.versions[begins:] if step >= 0})
        self._samples += 1
        return Sample(
            group_index=row.group,
            index=self._samples,
            rollout_id=self._samples,
            tokens=row.token_ids.tolist(),
            response_length=row.tokens - begins,
            reward=row.reward,
            loss_mask=row.learnt[begins:].astype(int).tolist(),
            weight_versions=[str(step) for step in versions],
            rollout_log_probs=row.logprobs[begins:].tolist(),
            # slime learns from no token of such a sample.
            remove_sample=filler,
            status=Sample.Status.TRUNCATED if row.truncated else Sample.Status.COMPLETED,
            metadata={
                ADVANTAGE: float(row.advantages[row.learnt][0]) if row.learnt.any() else 0.0,
                "ledger_staleness": number + 1 - row.oldest_version,
            },
        )


_rollouts: SlimeRollouts | None = None


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> list[list[Any]]:
    """slime's rollout function; its errors end slime's training. Raises UsageError for settings that do not fit, and
    RetryableError for a ledger without an answer or a batch.
    """
    global _rollouts
    if evaluation:
        raise UsageError("the ledger plays evaluations itself: leave out --eval-interval")
    if _rollouts is None:
        _rollouts = SlimeRollouts(args, rollout_id)
    return _rollouts.rollout(args, rollout_id)


def ledger_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """slime's hook after a rollout: rewards as they are, and the ledger's advantages in place of normalised rewards."""
    return [sample.reward for sample in samples], [sample.metadata[ADVANTAGE] for sample in samples]


def check(args: Any) -> None:
    """Raises UsageError for settings of slime that would train something other than the ledger's batch."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    rewards = args.custom_reward_post_process_path
    if rewards == FORMER_REWARDS:
        rewards = REWARDS
    wanted = {
        "--custom-reward-post-process-path": (rewards, REWARDS),
        "--global-batch-size": (args.global_batch_size, samples),
        "--rollout-top-p": (getattr(args, "rollout_top_p", 1.0), 1.0),
        "--async-save": (bool(getattr(args, "async_save", False)), False),
    }
    for option, (found, value) in wanted.items():
        if found != value:
            raise UsageError(f"slime has {option} {found}, and batches of a ledger need {value}")
    if not args.save:
        raise UsageError("batches of a ledger need --save: the folder of checkpoints names those that they contain")
    if args.advantage_estimator not in ("grpo", "gspo", "cispo"):
        raise UsageError(f"slime's --advantage-estimator {args.advantage_estimator} changes the ledger's advantages")


def _divided(rows: Sequence[TrainingRow], own: int) -> Iterator[list[tuple[TrainingRow, bool]]]:
    """Rows by group, and fillers at the end; with each row, whether it is a filler."""
    groups: dict[int, list[tuple[TrainingRow, bool]]] = {}
    for row in rows[:own]:
        groups.setdefault(row.group, []).append((row, False))
    yield from groups.values()
    if len(rows) > own:
        yield [(row, True) for row in rows[own:]]

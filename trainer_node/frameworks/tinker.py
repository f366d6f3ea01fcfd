"""Tinker: the batches of a ledger as lists of ``tinker.Datum``. Tried with tinker 0.38.0.

    ledger = LedgerDatums("http://127.0.0.1:7079", "run/ledger.json", bearer_file="ledger/http.token")
    ledger.begin(branch=0, step=0)
    for step in range(1000):
        data = ledger.take(step)
        training_client.forward_backward(data, loss_fn="importance_sampling").result()
        training_client.optim_step(adam).result()
        # publish the weights of step + 1, write a checkpoint now and then, and name each to the ledger:
        ledger.acknowledge(step + 1)

A datum is shifted by one: position i of ``model_input`` predicts position i of ``target_tokens``. Log-probabilities,
advantages and masks lie at the token that is predicted.

Guarantee: each batch is trained at most once on the way to any checkpoint that survives. Taking step t says that step
t - 1 is trained, and ``begin`` opens all batches again that the checkpoint does not contain.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from p2pcast.ground.errors import UsageError
from trainer_node.frameworks.ledger_steps import GIVE_UP_S, PATIENCE_S, LedgerSteps

if TYPE_CHECKING:
    from trainer_node.learning.objective.advantages import AdvantageKind
    from trainer_node.learning.objective.training_rows import TrainingRow

TRIED: Final = ("0.38.0",)
"""Versions of tinker."""
IMPORTANCE: Final = ("target_tokens", "logprobs", "advantages")
"""Inputs of Tinker's losses ``importance_sampling``, ``ppo`` and ``cispo``, which refuse others."""
INPUTS: Final = (*IMPORTANCE, "weights", "mask")
"""``weights``: the mask under the name that ``cross_entropy`` takes. ``mask``: under the name of tinker-cookbook, whose
metrics read it, and whose training loop removes it before the loss.
"""


class LedgerDatums:
    """``journal``: a file of this run alone, which names the batches since the last acknowledged checkpoint.

    ``url``, ``bearer_file``, ``hub``, ``token_file``: as of ``BatchClient``. ``advantages``, ``eps``: as of
    ``group_advantages``. ``temperature``: of the ledger's samples. ``inputs``: of each datum, some of INPUTS.
    ``give_up_s``: time for one request to a ledger that does not answer. Raises UsageError, LocalError.
    """

    def __init__(
        self,
        url: str,
        journal: str | os.PathLike[str],
        *,
        bearer_file: str | os.PathLike[str] | None = None,
        hub: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        advantages: AdvantageKind = "grpo",
        eps: float = 1e-4,
        temperature: float = 1.0,
        inputs: Sequence[str] = IMPORTANCE,
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        from p2pcast.ledger_api.batch_client import BatchClient

        if unknown := [name for name in inputs if name not in INPUTS]:
            raise UsageError(f"no input of a datum is named {unknown[0]!r}: use some of {', '.join(INPUTS)}")
        client = BatchClient(url, bearer_file=bearer_file, hub=hub, token_file=token_file, give_up_s=give_up_s)
        self._steps = LedgerSteps(client, Path(journal))
        self._kind, self._eps, self._temperature, self._inputs = advantages, eps, temperature, tuple(inputs)

    def begin(self, branch: int, step: int) -> None:
        """Train on from a checkpoint of ``step`` steps, whose weights are published as version ``branch.step``. Raises
        RefusedError, RemoteError, RetryableError, UsageError.
        """
        self._steps.begin_by_journal(branch, step, checkpoint=step > 0)

    def take(self, step: int, patience_s: float = PATIENCE_S) -> list[Any]:
        """Data of the batch of ``step``, as soon as there is one; the batch before it is trained. Raises as
        ``LedgerSteps.take`` does, and IntegrityError.
        """
        batch = self._steps.take(step, patience_s)
        rows = self._steps.rows(batch, temperature=self._temperature, kind=self._kind, eps=self._eps)
        return [datum(row, self._inputs) for row in rows]

    def acknowledge(self, step: int) -> None:
        """A checkpoint of ``step`` steps is whole. Raises RefusedError, RemoteError, RetryableError, LocalError."""
        self._steps.acknowledge(step)


def datum(row: TrainingRow, inputs: Sequence[str] = IMPORTANCE) -> Any:
    """A ``tinker.Datum`` of n - 1 positions, for a row of n tokens."""
    import numpy as np
    import tinker

    mask = row.learnt[1:].astype(np.float32)
    arrays = {
        "target_tokens": row.token_ids[1:],
        "logprobs": row.logprobs[1:],
        "advantages": row.advantages[1:],
        "weights": mask,
        "mask": mask,
    }
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(row.token_ids[:-1].tolist()),
        loss_fn_inputs={name: tinker.TensorData.from_numpy(arrays[name]) for name in inputs},
    )

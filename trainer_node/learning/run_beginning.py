"""Whether a learner begins where its run stands. A wrong folder of checkpoints, older or empty, would undo the run: the
ledger would open trained batches again, and engines would get the old weights.

Guarantee: ledger and hub are asked before the first publication. A learner that crashed is never refused. Its newest
checkpoint is the last acknowledged one, or a later one. The hub's versions after it are steps that the ledger knows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from p2pcast.ground.errors import RefusedError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import RunFacts
from trainer_node.learning.checkpoints import StoredCheckpoint
from trainer_node.ledger.lineage import KEPT_BATCHES, least_step

logger = logging.getLogger("p2pcast.learner")


@dataclass(frozen=True, slots=True)
class RunBeginning:
    """``stored``: the newest checkpoint in ``folder``. ``facts``: of the ledger. ``every``: steps between two
    checkpoints. ``ledger``: URL.
    """

    folder: Path
    stored: StoredCheckpoint | None
    facts: RunFacts
    every: int
    ledger: str

    @property
    def first(self) -> bool:
        """Whether the learner begins without a checkpoint."""
        return self.stored is None

    @property
    def step(self) -> int:
        return 0 if self.stored is None else self.stored.position.step

    def check_ledger(self) -> None:
        """Raises RefusedError."""
        facts = self.facts
        # A learner writes its first checkpoint before it trains: without one, no step of the ledger is its own.
        least = facts.step if self.first else least_step(facts.step, facts.acknowledged, checkpoint=True)
        held = f"the ledger {self.ledger} holds this run to step {facts.step}"
        if self.step < least:
            self._refuse(held)
        if self.step < facts.acknowledged:
            logger.warning("%s: going back to step %d opens trained batches again", held, self.step)

    def check_hub(self, address: str, newest: Version | None) -> None:
        """``newest``: version at the hub with this address. Raises RefusedError."""
        step = 0 if newest is None else newest.step
        if self.first:
            least = step
        elif step <= self.facts.step:
            least = 0  # steps of this run, which the ledger knows
        else:
            least = step - max(KEPT_BATCHES, self.every)
        if self.step < least:
            self._refuse(f"the hub {address} holds version {newest}")

    def _refuse(self, held: str) -> None:
        found = "no checkpoint" if self.stored is None else f"{self.stored.folder.name}"
        raise RefusedError(
            f"{self.folder} holds {found}, so the learner would begin at step {self.step}, and {held}: the steps after"
            f" {self.step} would be undone. Name the folder of this run's checkpoints in [checkpoint] folder. A new run"
            " takes new state folders for ledger and hub. To undo these steps, say --from-start"
        )


def other_base(address: str, folder: Path) -> str:
    return (
        f"version 0.0 of the hub {address} is not the model {folder}: the learner would replace the weights that"
        " engines have. Start the hub with --base of the same folder and a new state folder, or name the hub's model in"
        " [model] path. To replace them, say --from-start"
    )

"""Evaluation of a published version: held-out problems, sampled greedily by an engine that serves the version.

Guarantees: problems are never trained on (``Task.evaluation_jobs``). An evaluation is of one version alone. An
evaluation that no engine plays in time is recorded with the number of its answers, and ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import blake3

from p2pcast.ground.errors import P2PCastError
from p2pcast.ground.version import Version
from p2pcast.rollouts.job import Group
from p2pcast.tasks.task import Prompt, Task

logger = logging.getLogger("p2pcast.learner")

CHECK_S: Final = 0.25
"""Interval in seconds at which the answers are counted."""
RECORD_S: Final = 10.0
"""Time in seconds for the last look and the record, after the time that an evaluation has for its answers."""
_LABEL: Final = b"p2pcast evaluation 1\0"


class GroupClient(Protocol):
    def add_groups(self, groups: Sequence[Group]) -> int: ...
    def read_groups(self, groups: Sequence[bytes]) -> Sequence[Any]: ...
    def stay(self, for_s: float) -> None: ...


class Evaluator:
    """One at a time, in a thread. ``every``: learner steps. ``hold_s``: longest time that ``busy`` delays the next
    publication. ``write``: of the run's log. ``prompts``: of held-out problems.
    """

    def __init__(
        self,
        client: GroupClient,
        task: Task,
        prompts: Sequence[Prompt],
        write: Callable[[Mapping[str, object]], object],
        *,
        every: int,
        hold_s: float,
    ) -> None:
        self._client, self._task, self._write = client, task, write
        self._every, self._hold_s = every, hold_s
        self._prompts = prompts
        self._thread: threading.Thread | None = None
        self._until_s = 0.0
        self._last = -every

    @property
    def busy(self) -> bool:
        """Whether engines should keep serving the version under evaluation."""
        return self._thread is not None and self._thread.is_alive() and time.monotonic() < self._until_s

    def published(self, version: Version, step: int) -> None:
        """A version is live; it is evaluated if it is due, and no other evaluation runs."""
        if step - self._last < self._every or (self._thread is not None and self._thread.is_alive()):
            return
        self._last, self._until_s = step, time.monotonic() + self._hold_s
        self._thread = threading.Thread(
            target=self._run, args=(version,), name=f"p2pcast evaluation {version}", daemon=True
        )
        self._thread.start()

    def keep_workers(self, live_s: float) -> None:
        """Workers stay after the run's last step, whose version may be evaluated once it is live. ``live_s``: longest
        time until then.
        """
        self._client.stay(live_s + self._hold_s + RECORD_S)

    def join(self) -> None:
        """Wait for the record of the evaluation that runs: later the log is closed. Then workers may end."""
        if self._thread is not None:
            self._thread.join(max(0.0, self._until_s - time.monotonic()) + RECORD_S)
        # The ledger may be gone by now, and a request waits until it is back.
        last = threading.Thread(target=self._release_workers, name="p2pcast evaluations end", daemon=True)
        last.start()
        last.join(RECORD_S)

    def _release_workers(self) -> None:
        try:
            self._client.stay(0.0)
        except P2PCastError as error:
            logger.warning("the ledger was not told that evaluations have ended: %s", error)

    def _run(self, version: Version) -> None:
        began_s = time.monotonic()
        try:
            groups = [self._group(version, number, prompt) for number, prompt in enumerate(self._prompts)]
            self._client.add_groups(groups)
            rewards = self._rewards([group.id for group in groups])
        except P2PCastError as error:
            logger.warning("the evaluation of %s ended: %s", version, error)
            return
        except Exception:
            logger.exception("the evaluation of %s failed", version)
            return
        self._write(
            {
                "event": "evaluation",
                "version": str(version),
                "step": version.step,
                "problems": len(groups),
                "answered": len(rewards),
                "reward": sum(rewards) / len(rewards) if rewards else None,
                "seconds": round(time.monotonic() - began_s, 3),
            }
        )

    def _rewards(self, ids: Sequence[bytes]) -> list[float]:
        while True:
            found = self._client.read_groups(ids)
            if all(one.ended for one in found) or time.monotonic() > self._until_s:
                return [reward for one in found for reward in one.rewards]
            time.sleep(CHECK_S)

    def _group(self, version: Version, number: int, prompt: Prompt) -> Group:
        named = _LABEL + self._task.hash + str(version).encode() + number.to_bytes(8, "little")
        drawn = blake3.blake3(named).digest(24)
        return Group(
            id=drawn[:16],
            size=1,
            purpose="evaluate",
            task=self._task.name,
            task_hash=self._task.hash,
            prompt=prompt.prompt,
            seed=int.from_bytes(drawn[16:], "little"),
            temperature=0.0,
            max_tokens=prompt.max_tokens,
            stop_token_ids=tuple(self._task.stop_token_ids),
            pinned=version,
        )

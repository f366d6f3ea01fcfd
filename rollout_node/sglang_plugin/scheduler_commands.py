"""A peer's commands in SGLang's schedulers, which every rank runs between two batches, in the same order.

Guarantees: ``answer`` never raises, because SGLang's scheduler would exit. All ranks make the same decision, based on
what all of them reported, so none runs on while another is paused. The engine resumes only if every rank has proved the
requested version while the caller is still waiting; from then on, the commit cannot be undone. Otherwise the engine
stays paused, nothing is undone here, and the caller receives every rank's report and decides.

Commands are JSON objects whose ``do`` is one of ``DO``. The answer is a JSON object from the first rank.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from p2pcast.ground.version import NO_VERSION, Version
from rollout_node.in_engine.rank_installer import Command, Introduction, RankInstaller
from rollout_node.in_engine.switch_order import SwitchOrder
from rollout_node.sglang_plugin import SOCKET_VARIABLE, drain
from rollout_node.sglang_plugin.rank_model import SglangRankModel

log = logging.getLogger("sglang.p2pcast")
Answer = dict[str, Any]

_installers: list[RankInstaller] = []
"""This process's installer, from its first command on."""


def held() -> str | None:
    """The version from which this process's rank computes."""
    return _installers[0].serves if _installers else None


def answer(updater: Any, text: str) -> Any:
    """Execute a command, and return its answer as the message of SGLang's answer to a weight check."""
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    try:
        body = json.loads(text)
        found = DO[body.pop("do")](Scheduler(updater), body)
        return CheckWeightsReqOutput(success=True, message=json.dumps(found))
    except Exception as error:
        log.exception("p2pcast: a command failed")
        return CheckWeightsReqOutput(success=False, message=f"p2pcast: {type(error).__name__}: {error}"[:2000])


class Scheduler:
    """One rank's scheduler."""

    def __init__(self, updater: Any) -> None:
        self._updater, self._scheduler = updater, updater.scheduler

    @property
    def installer(self) -> RankInstaller:
        if not _installers:
            _installers.append(
                RankInstaller(SglangRankModel(self._updater), Path(os.environ.get(SOCKET_VARIABLE, "")), log)
            )
        return _installers[0]

    def state(self, _: Mapping[str, Any]) -> Answer:
        from sglang.srt.runtime_context import get_parallel, get_serving

        parallel = get_parallel()
        return {
            "ranks": parallel.tp_size * parallel.pp_size,
            "groups": parallel.dp_size,
            "stages": parallel.pp_size,
            "paused": self._paused,
            "version": get_serving().weight_version,
        }

    def hold(self, _: Mapping[str, Any]) -> Answer:
        """Hold new requests. ``over``: whether all earlier ones have finished; a caller that waits must ask again."""
        drain.hold(self._scheduler)
        return {"over": drain.is_over(self._scheduler)}

    def label(self, body: Mapping[str, Any]) -> Answer:
        self._scheduler.record_weight_version_change(new_version=str(Version.parse(body["version"])))
        return {}

    def introduce(self, body: Mapping[str, Any]) -> Answer:
        known = {field.name: body[field.name] for field in fields(Introduction) if field.name in body}
        self.installer.introduce(Introduction(**known | {"core": self._switches_at_once}))
        if held() is None:  # a different run's peer, or one that distrusts the weights
            self._scheduler.record_weight_version_change(NO_VERSION)
        return {}

    def begin(self, _: Mapping[str, Any]) -> Answer:
        self.installer.begin()
        return {}

    def obey(self, body: Mapping[str, Any]) -> Answer:
        if body.get("phase") == "commit":
            if not self._scheduler._engine_paused:
                raise RuntimeError("a commit by its own needs a paused engine")
            _synchronize()
        self.installer.obey(Command.read(body))
        return {}

    def finish(self, _: Mapping[str, Any]) -> Answer:
        self.installer.finish()
        return {}

    def switch(self, body: Mapping[str, Any]) -> Answer:
        """Switch. Returns the ranks' reports and ``core``: ``switched``, ``resumed``, and ``pause_us``, the time
        without a batch. If a cache could not be cleared, nothing is written and an earlier pause stays; there are then
        no reports, and ``busy`` is set.
        """
        order = SwitchOrder(**body)
        Version.parse(order.version)
        if any(self._of_all(order.expired)):
            raise TimeoutError(f"the deadline of the switch to version {order.version} has passed; nothing was changed")
        paused = self._paused
        lift = order.ours or not paused
        began = time.monotonic()
        if not all(self._of_all(self._stop(order))):
            if not paused:
                self._resume()
            return {"reports": [], "core": {"switched": False, "resumed": not paused, "busy": True}}
        report = self._commit(order)
        reports = self._of_all((report, order.expired))
        good = all(order.is_proved_by(one) and not late for one, late in reports)
        if good:
            try:
                self._scheduler.record_weight_version_change(new_version=order.version)
                self.installer.settle()
            finally:
                # The other ranks resume too.
                if lift:
                    self._resume()
        pause_us = int((time.monotonic() - began) * 1e6)
        return {
            "reports": [one for one, _ in reports if one is not None],
            "core": {"switched": good, "resumed": good and lift, "pause_us": pause_us},
        }

    def _stop(self, order: SwitchOrder) -> bool:
        """Pause, and drop what the old weights computed. False if SGLang cannot do so now, say while compiling a
        grammar.
        """
        try:
            self._pause("retract" if order.clear_cache else "in_place")
            return not order.clear_cache or bool(self._scheduler.flush_cache(empty_cache=False))
        except Exception:
            log.exception("p2pcast: no pause for version %s", order.version)
            return False

    def _commit(self, order: SwitchOrder) -> dict[str, Any] | None:
        """Commit, and return this rank's report; None after a failure, so that the other ranks learn of it."""
        try:
            _synchronize()
            return self.installer.commit_here(order.version, order.nonce)
        except Exception:
            log.exception("p2pcast: commit of version %s failed", order.version)
            return None

    def _pause(self, mode: str) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._scheduler.pause_generation(PauseGenerationReqInput(mode=mode))

    def _resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    @property
    def _paused(self) -> bool:
        return drain.holds() or bool(self._scheduler._engine_paused)

    @property
    def _switches_at_once(self) -> bool:
        """Whether all of the engine's ranks can see each other here."""
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        return bool(parallel.pp_size == 1 and parallel.dp_size == 1)

    def _of_all(self, mine: Any) -> list[Any]:
        """Gather all ranks' values, in order of rank."""
        group = self._updater.tp_cpu_group
        found: list[Any] = [None] * torch.distributed.get_world_size(group=group)
        torch.distributed.all_gather_object(found, mine, group=group)
        return found


DO: dict[str, Callable[[Scheduler, Mapping[str, Any]], Answer]] = {
    "state": Scheduler.state,
    "hold": Scheduler.hold,
    "label": Scheduler.label,
    "introduce": Scheduler.introduce,
    "begin": Scheduler.begin,
    "obey": Scheduler.obey,
    "finish": Scheduler.finish,
    "switch": Scheduler.switch,
}


def _synchronize() -> None:
    """Wait for the accelerator, where a batch may still be running while the scheduler handles requests."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()

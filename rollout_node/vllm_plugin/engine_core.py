"""The switch inside vLLM's engine core: pause, commit on all ranks and resume, in one command between two steps.

Over vLLM's routes, each of these takes one command. Each command waits for the API server, the engine and the peer in
turn, and ``/pause`` itself sleeps for 20 ms. On a small model, these waits are nearly all of the pause. Inside the
core, the engine only stops for one message to its ranks and their answers.

Guarantee: the engine resumes only if every rank has proved the requested version while the caller is still waiting;
from then on, the commit cannot be undone. Otherwise the engine stays paused, nothing is undone here, and the caller
receives every rank's report and decides.

Guarantee: **the label names what the ranks hold** (``HeldLabel``). So a server that has just started answers with
``none`` until a peer's first install, whatever label an earlier process had.

``POST /collective_rpc {"method": "p2pcast_switch", "kwargs": {…}}`` reaches ``switch``, because ``install`` wraps the
engine core's own method for that route. At init, the core adds ``core: true`` to the ranks' information. Their reports
repeat it, so the peer knows that this command is available. It is unavailable with data parallelism, where several
cores would have to switch at once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache, wraps
from pathlib import Path
from typing import Any

from p2pcast.ground.version import NO_VERSION
from rollout_node.in_engine.heartbeat import Heartbeat
from rollout_node.in_engine.switch_order import SwitchOrder
from rollout_node.vllm_plugin import SOCKET_VARIABLE

COMMAND = "p2pcast_switch"
_INIT = "init_weight_transfer_engine"
_INSTALLED = "_p2pcast"
_LABEL, _PROVED = "_p2pcast_label", "_p2pcast_proved"

log = logging.getLogger("vllm.p2pcast")


def install() -> None:
    """Change the engine core's class. Called in each of vLLM's processes, but only has an effect in the engine core.
    vLLM may load plugins in the core's constructor, before the core has a label.
    """
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    if not hasattr(EngineCoreProc.collective_rpc, _INSTALLED):
        EngineCoreProc.collective_rpc = wrap_collective_rpc(EngineCoreProc.collective_rpc)
        EngineCore._weight_version = HeldLabel()


class HeldLabel:
    """A core's label: ``none``, or the version that all its ranks hold. Setting any other raises ValueError."""

    def __get__(self, core: Any, kind: type | None = None) -> Any:
        return self if core is None else core.__dict__.get(_LABEL, NO_VERSION)

    def __set__(self, core: Any, label: str) -> None:
        if not hasattr(core, "model_executor"):  # the constructor's own label
            return
        if label not in (NO_VERSION, core.__dict__.pop(_PROVED, None)) and label != (held := _held(core)):
            raise ValueError(f"p2pcast: the weights cannot be labelled {label[:40]!r}: the ranks hold {held}")
        core.__dict__[_LABEL] = label


def _held(core: Any) -> str:
    """Return the version that all ranks hold, or ``none``."""
    found = set(core.model_executor.collective_rpc(held_here))
    return found.pop() or NO_VERSION if len(found) == 1 else NO_VERSION


def wrap_collective_rpc(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the engine core's ``collective_rpc`` so that it handles ``p2pcast_switch``."""

    @wraps(inner)  # vLLM inspects the signature
    def collective_rpc(self: Any, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None) -> Any:
        if method == COMMAND:
            return switch(self, SwitchOrder(**kwargs))
        if method != _INIT:
            return inner(self, method, timeout, args, kwargs)
        if engine := kwargs["init_info"].get("engine"):
            _heartbeat().begin(engine=engine, rank=0)
        if self.vllm_config.parallel_config.data_parallel_size == 1:
            kwargs = {"init_info": {**kwargs["init_info"], "core": True}}
        found = inner(self, method, timeout, args, kwargs)
        # A different run's peer, or one that distrusts the weights, has made the ranks forget their version.
        if self._weight_version != NO_VERSION and self._weight_version != _held(self):
            self._weight_version = NO_VERSION
        return found

    setattr(collective_rpc, _INSTALLED, True)
    return collective_rpc


@cache
def _heartbeat() -> Heartbeat:
    """This process's heartbeat."""
    return Heartbeat(Path(os.environ.get(SOCKET_VARIABLE, "")), "the engine core")


def switch(core: Any, order: SwitchOrder) -> list[dict[str, Any]] | Future[list[dict[str, Any]]]:
    """Switch, and return the ranks' reports followed by the core's own: ``resumed``, and ``pause_us``, the time
    unscheduled.

    If the caller's deadline has already passed, it raises TimeoutError and changes nothing.
    """
    from vllm.v1.core.sched.interface import PauseState

    if order.expired:
        raise TimeoutError(f"the deadline of the switch to version {order.version} has passed; nothing was changed")
    lift = order.ours or not core.is_scheduler_paused()
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    began = time.monotonic()
    if not core.has_work():
        return _commit(core, order, lift, began)
    found: Future[list[dict[str, Any]]] = Future()  # running steps finish first

    def idle(_: Any) -> None:
        try:
            found.set_result(_commit(core, order, lift, began))
        except Exception as error:  # noqa: BLE001  (the future passes it to the caller)
            found.set_exception(error)

    core._idle_state_callbacks.append(idle)
    return found


def _commit(core: Any, order: SwitchOrder, lift: bool, began: float) -> list[dict[str, Any]]:
    if order.clear_cache:
        _clear_caches(core)
    reports = core.model_executor.collective_rpc(commit_here, args=(order.version, order.nonce, order.clear_cache))
    good = all(order.is_proved_by(report) for report in reports) and not order.expired
    if good:
        setattr(core, _PROVED, order.version)
        core.set_weight_version(order.version)
        core.model_executor.collective_rpc(settle_here, non_block=True)
        if lift:
            core.resume_scheduler()
    pause_us = int((time.monotonic() - began) * 1e6)
    return [*(report for report in reports if report is not None), {"resumed": good and lift, "pause_us": pause_us}]


def _clear_caches(core: Any) -> None:
    """Like ``EngineCore._reset_caches``, except that ranks clear their caches in the commit. Raises RuntimeError before
    anything is written.
    """
    if not core.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
        raise RuntimeError("the KV connector's cache could not be reset")
    core.scheduler.reset_encoder_cache()
    if core.mm_receiver_cache is not None:
        core.mm_receiver_cache.clear_cache()


def commit_here(worker: Any, version: str, nonce: str, clear_cache: bool) -> dict[str, Any] | None:
    """Commit on one rank; runs in each rank's process. Returns the report, or None after a failure.

    It must not raise, because the other ranks' answers would stay unread.
    """
    try:
        worker.synchronize_device()
        if clear_cache:
            worker.reset_mm_cache()
            worker.reset_encoder_cache()
        report: dict[str, Any] | None = worker.weight_transfer_engine.commit_here(version, nonce)
    except Exception:
        log.exception("p2pcast: commit of version %s failed", version)
        return None
    return report


def held_here(worker: Any) -> str | None:
    """Return the version of one rank; runs in each rank's process, and must not raise."""
    return getattr(getattr(worker, "weight_transfer_engine", None), "held", None)


def settle_here(worker: Any) -> None:
    """Make the commit permanent; runs on each rank before its next step. Nobody waits for it."""
    worker.weight_transfer_engine.settle_here()

"""The switch itself, inside vLLM's engine core: pause, commit on all ranks, resume, in one command and between two steps.

Over vLLM's routes the same takes a command each, and every one waits for the API server, the engine and the peer in turn; ``/pause`` alone sleeps for
20 ms. On a small model that is nearly all of the pause. Here the engine stands still for one message to its workers and their answers.

Promise: the engine goes on only if every rank has proved the version that was asked for, while the caller still waits; from then on the commit can't
be undone. Otherwise it stays paused, as it stands, and the caller, who gets every rank's report, decides: nothing is undone here.

``POST /collective_rpc {"method": "p2pcast_switch", "kwargs": {…}}`` reaches ``switch``: ``install`` puts it before the engine core's own method of
that route. What workers are told at their init then says ``core: true``, which they repeat to the peer: so it knows that this way is open. It is not
with data parallelism, where several cores would have to switch as one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import wraps
from typing import Any

COMMAND = "p2pcast_switch"
_INIT = "init_weight_transfer_engine"
_INSTALLED = "_p2pcast"

log = logging.getLogger("vllm.p2pcast")


def install() -> None:
    """To be called in each of vLLM's processes; has an effect in the engine core's alone."""
    from vllm.v1.engine.core import EngineCoreProc

    if not hasattr(EngineCoreProc.collective_rpc, _INSTALLED):
        EngineCoreProc.collective_rpc = before(EngineCoreProc.collective_rpc)


def before(inner: Callable[..., Any]) -> Callable[..., Any]:
    """What stands before the engine core's own method."""

    @wraps(inner)  # vLLM looks at its signature
    def collective_rpc(self: Any, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None) -> Any:
        if method == COMMAND:
            return switch(self, Order(**kwargs))
        if method == _INIT and self.vllm_config.parallel_config.data_parallel_size == 1:
            kwargs = {"init_info": {**kwargs["init_info"], "core": True}}
        return inner(self, method, timeout, args, kwargs)

    setattr(collective_rpc, _INSTALLED, True)
    return collective_rpc


@dataclass(frozen=True, slots=True)
class Order:
    """``marks``: rank (in decimal) → what it has to have read back after writing. ``ours``: a pause that is there already may be lifted.
    ``clear_cache``: running requests compute their keys and values anew, and nothing that older weights computed is found again. ``until_unix_s``: when
    the caller, who is on this host, gives up."""

    version: str
    nonce: str
    marks: dict[str, int]
    clear_cache: bool
    ours: bool
    until_unix_s: float

    @property
    def late(self) -> bool:
        return time.time() > self.until_unix_s


def switch(core: Any, order: Order) -> list[dict[str, Any]] | Future[list[dict[str, Any]]]:
    """The ranks' reports, and at last the core's own: ``resumed``, and ``pause_us``, for how long it scheduled nothing. Raises TimeoutError, and leaves
    everything as it is, when the caller has given up before it begins."""
    from vllm.v1.core.sched.interface import PauseState

    if order.late:
        raise TimeoutError(f"whoever asked for version {order.version} has given up")
    lift = order.ours or not core.is_scheduler_paused()
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    began = time.monotonic()
    if not core.has_work():
        return _commit(core, order, lift, began)
    found: Future[list[dict[str, Any]]] = Future()  # steps are under way, and end first

    def idle(_: Any) -> None:
        try:
            found.set_result(_commit(core, order, lift, began))
        except Exception as error:  # noqa: BLE001  (it is the caller's, by way of the future)
            found.set_exception(error)

    core._idle_state_callbacks.append(idle)
    return found


def _commit(core: Any, order: Order, lift: bool, began: float) -> list[dict[str, Any]]:
    if order.clear_cache:
        _clear_caches(core)
    reports = core.model_executor.collective_rpc(commit_here, args=(order.version, order.nonce, order.clear_cache))
    good = all(_proved(report, order) for report in reports) and not order.late
    if good:
        core.set_weight_version(order.version)
        core.model_executor.collective_rpc(settle_here, non_block=True)
        if lift:
            core.resume_scheduler()
    pause_us = int((time.monotonic() - began) * 1e6)
    return [*(report for report in reports if report is not None), {"resumed": good and lift, "pause_us": pause_us}]


def _clear_caches(core: Any) -> None:
    """As ``EngineCore._reset_caches``; but the workers are told with the commit. Raises RuntimeError, before anything is written."""
    if not core.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
        raise RuntimeError("the KV connector's cache could not be reset")
    core.scheduler.reset_encoder_cache()
    if core.mm_receiver_cache is not None:
        core.mm_receiver_cache.clear_cache()


def _proved(report: dict[str, Any] | None, order: Order) -> bool:
    if report is None or report["error"] is not None or report["held"] != order.version:
        return False
    mark = report.get("mark")
    return mark is not None and mark == order.marks.get(str(report["rank"]))


def commit_here(worker: Any, version: str, nonce: str, clear_cache: bool) -> dict[str, Any] | None:
    """In each worker: its report. None when there is none; it must not raise, for then other workers' answers would stay unread."""
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


def settle_here(worker: Any) -> None:
    """In each worker, before its next step. Nobody waits for the answer."""
    worker.weight_transfer_engine.settle_here()

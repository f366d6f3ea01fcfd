"""Holds new requests in a SGLang scheduler while running ones finish, for the safe point ``drain``.

Guarantee: a request that the scheduler had when the hold started is finished, even if it has to wait again meanwhile
(for memory or a grammar). A later one stays in the waiting queue, where its client can still abort it. Every rank holds
the same requests, because all ranks receive requests and commands in the same order.
"""

from __future__ import annotations

from typing import Any

_begun: set[str] | None = None
"""Ids of the requests that may run; None if all may. A process has one scheduler."""


def hold(scheduler: Any) -> None:
    """Hold new requests from now on. Raises RuntimeError if a different server computes a part of each request."""
    global _begun
    if scheduler.disaggregation_mode.value != "null":
        raise RuntimeError("a server with --disaggregation-mode cannot be drained")
    if _begun is None:
        live = [*scheduler.collect_inflight_reqs(), *scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
        chunked = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
        _begun = {request.rid for request in [*live, *chunked]}


def holds() -> bool:
    return _begun is not None


def is_over(scheduler: Any) -> bool:
    """Whether every request that had started has finished."""
    begun = _begun or set()
    waiting = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
    running = not scheduler.is_fully_idle(for_health_check=True, ignore_waiting=True)
    return not running and not any(request.rid in begun for request in waiting)


def next_prefill(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrapper of ``Scheduler.get_new_batch_prefill``, which takes requests from the waiting queue."""
    if _begun is None:
        return original(scheduler, *args, **kwargs)
    queue = scheduler.waiting_queue
    held = [request for request in queue if request.rid not in _begun]
    scheduler.waiting_queue = [request for request in queue if request.rid in _begun]
    try:
        return original(scheduler, *args, **kwargs)
    finally:
        scheduler.waiting_queue = [*scheduler.waiting_queue, *held]


def resume(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrapper of ``Scheduler.continue_generation`` that also ends a hold."""
    global _begun
    _begun = None
    return original(scheduler, *args, **kwargs)

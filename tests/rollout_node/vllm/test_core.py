"""The switch inside vLLM's engine core: when it resumes the engine, and when not.

The core here is a stub; real cores are in ``test_vllm_server`` and ``test_faults``.
"""

from __future__ import annotations

import inspect
import math
from concurrent.futures import Future
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM", exc_type=ImportError)

from vllm.v1.core.sched.interface import PauseState

from rollout_node.in_engine.switch_order import SwitchOrder
from rollout_node.vllm_plugin import engine_core as plugin
from rollout_node.vllm_plugin.engine_core import (
    COMMAND,
    commit_here,
    held_here,
    settle_here,
    switch,
    wrap_collective_rpc,
)

pytestmark = pytest.mark.vllm

ORDER = SwitchOrder("0.2", "n", {"0": 5, "1": 6}, clear_cache=True, ours=False, until_unix_s=math.inf)


def report(rank: int, mark: int | None, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "held": "0.2", "error": None, "mark": mark, "nonce": "n"} | more


GOOD = [report(0, 5), report(1, 6)]


class Core:
    """The parts of an engine core that the switch uses. ``calls``: calls in order."""

    def __init__(self, reports: list[Any], *, paused: bool = False, steps_under_way: bool = False) -> None:
        self._weight_version = "none"
        self.calls: list[Any] = []
        self.state = PauseState.PAUSED_ALL if paused else PauseState.UNPAUSED
        self.reports, self.steps_under_way = reports, steps_under_way
        self.scheduler = self.model_executor = self
        self.mm_receiver_cache = None
        self.cache_clears = True
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
        self._idle_state_callbacks: list[Any] = []

    def is_scheduler_paused(self) -> bool:
        return self.state is not PauseState.UNPAUSED

    def set_pause_state(self, state: PauseState) -> None:
        self.state = state
        self.calls.append(state.name)

    def resume_scheduler(self) -> None:
        self.set_pause_state(PauseState.UNPAUSED)

    def has_work(self) -> bool:
        return self.steps_under_way

    def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        self.calls.append(("clear", reset_running_requests, reset_connector))
        return self.cache_clears

    def reset_encoder_cache(self) -> None:
        self.calls.append("clear encoder")

    def set_weight_version(self, version: str) -> None:
        self.calls.append(version)

    def collective_rpc(self, method: Any, args: tuple[Any, ...] = (), non_block: bool = False) -> Any:
        self.calls.append((method, args, non_block))
        return None if non_block else self.reports


COMMIT, SETTLE = (commit_here, ("0.2", "n", True), False), (settle_here, (), True)
CLEAR = [("clear", True, True), "clear encoder"]


def test_engine_resumes_after_all_ranks_prove_the_version() -> None:
    core = Core(GOOD)
    found = switch(core, ORDER)
    assert isinstance(found, list)
    assert found[:2] == GOOD
    assert (found[2]["resumed"], found[2]["pause_us"] >= 0) == (True, True)
    assert core.calls == ["PAUSED_ALL", *CLEAR, COMMIT, "0.2", SETTLE, "UNPAUSED"]


@pytest.mark.parametrize(
    "wrong",
    [
        report(1, 7),
        report(1, None),
        report(1, 6, held="0.1"),
        report(1, 6, held=None),
        report(1, 6, error="no room"),
        report(2, 6),
        report(2, None),
        None,
    ],
)
def test_engine_stays_paused_without_every_ranks_proof(wrong: Any) -> None:
    core = Core([GOOD[0], wrong])
    found = switch(core, ORDER)
    assert isinstance(found, list)
    assert found[:-1] == ([GOOD[0], wrong] if wrong else [GOOD[0]])
    assert found[-1]["resumed"] is False
    assert core.calls == ["PAUSED_ALL", *CLEAR, COMMIT], "not resumed, not labelled, not settled"


def test_foreign_pause_is_not_lifted() -> None:
    core = Core(GOOD, paused=True)
    found = switch(core, ORDER)
    assert isinstance(found, list)
    assert (found[-1]["resumed"], core.state) == (False, PauseState.PAUSED_ALL)
    core = Core(GOOD, paused=True)
    switch(core, replace(ORDER, ours=True))
    assert core.state is PauseState.UNPAUSED


def test_running_steps_end_before_the_switch() -> None:
    core = Core(GOOD, steps_under_way=True)
    found = switch(core, ORDER)
    assert isinstance(found, Future)
    assert (found.done(), core.calls) == (False, ["PAUSED_ALL"])
    core._idle_state_callbacks[0](core)
    assert found.result()[:2] == GOOD
    assert core.state is PauseState.UNPAUSED


def test_keys_and_values_may_be_kept() -> None:
    core = Core(GOOD)
    switch(core, replace(ORDER, clear_cache=False))
    assert core.calls[:2] == ["PAUSED_ALL", (commit_here, ("0.2", "n", False), False)]


def test_switch_after_its_deadline_does_not_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core(GOOD)
    with pytest.raises(TimeoutError):
        switch(core, replace(ORDER, until_unix_s=0.0))
    assert core.calls == []
    now_s = iter([1.0, 3.0])  # at the start, and after the ranks' answers
    monkeypatch.setattr(plugin.time, "time", lambda: next(now_s))
    found = switch(core, replace(ORDER, until_unix_s=2.0))
    assert isinstance(found, list)
    assert (found[:2], found[2]["resumed"]) == (GOOD, False)
    assert core.calls == ["PAUSED_ALL", *CLEAR, COMMIT], "the commit can still be undone"


@pytest.mark.parametrize("steps_under_way", [False, True])
def test_failed_cache_reset_prevents_the_commit(steps_under_way: bool) -> None:
    core = Core(GOOD, steps_under_way=steps_under_way)
    core.cache_clears = False

    def run() -> None:
        found = switch(core, ORDER)
        core._idle_state_callbacks[0](core)
        assert isinstance(found, Future)
        found.result()

    with pytest.raises(RuntimeError, match="could not be reset"):
        run()
    assert COMMIT not in core.calls
    assert core.state is PauseState.PAUSED_ALL


def test_failed_worker_reports_none_and_raises_nothing() -> None:
    worker = SimpleNamespace(synchronize_device=lambda: 1 // 0)
    assert commit_here(worker, "0.2", "n", True) is None


def test_a_label_names_the_version_of_every_rank() -> None:
    held: list[str | None] = [None, None]

    class Labelled(Core):
        _weight_version: Any = plugin.HeldLabel()

        def __init__(self) -> None:
            self._weight_version = "default"
            super().__init__(GOOD)

        def collective_rpc(self, method: Any, *args: Any, **more: Any) -> Any:
            worker = (SimpleNamespace(weight_transfer_engine=SimpleNamespace(held=one)) for one in held)
            return list(map(held_here, worker)) if method is held_here else super().collective_rpc(method, *args)

    core: Any = Labelled()
    assert core._weight_version == "none", "not the constructor's own label"
    for ranks in ([None, None], ["0.1", None], ["0.1", "0.2"]):
        held[:] = ranks
        with pytest.raises(ValueError, match=r"labelled '0\.1': the ranks hold none"):
            core._weight_version = "0.1"
        assert core._weight_version == "none"
    held[:] = ["0.1", "0.1"]
    core._weight_version = "0.1"
    method = wrap_collective_rpc(lambda *_: "answer")
    for ranks, label in ((["0.1", "0.1"], "0.1"), (["0.1", None], "none")):
        held[:] = ranks
        method(core, "init_weight_transfer_engine", None, (), {"init_info": {}})
        assert core._weight_version == label, "a rank is new, or another run's peer has come"
    assert held_here(SimpleNamespace()) is None


def test_other_calls_pass_through() -> None:
    """Except the init of an engine without data parallelism, whose workers are informed of the command."""
    asked: list[Any] = []

    def inner(self: Any, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None) -> str:
        asked.append((method, kwargs))
        return "answer"

    method = wrap_collective_rpc(inner)
    assert inspect.signature(method) == inspect.signature(inner)
    core: Any = Core(GOOD)
    assert method(core, "init_weight_transfer_engine", None, (), {"init_info": {"run": "r"}}) == "answer"
    assert method(core, "update_weights", None, (), {"update_info": {}}) == "answer"
    core.vllm_config.parallel_config.data_parallel_size = 2
    method(core, "init_weight_transfer_engine", None, (), {"init_info": {"run": "r"}})
    assert asked == [
        ("init_weight_transfer_engine", {"init_info": {"run": "r", "core": True}}),
        ("update_weights", {"update_info": {}}),
        ("init_weight_transfer_engine", {"init_info": {"run": "r"}}),
    ]
    assert method(core, COMMAND, None, (), asdict(ORDER))[:2] == GOOD
    assert len(asked) == 3

"""The user's code around a switch: every kind of function, and every fault that it can have."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from types import SimpleNamespace

import pytest

from p2pcast.ground.errors import UsageError
from rollout_node.engine.callbacks import Callbacks, check, load


def called(**functions) -> Callbacks:
    return Callbacks(SimpleNamespace(**functions), max_defer_s=10.0, call_s=30.0)


async def test_plain_functions_run_in_a_thread_and_coroutines_on_the_loop():
    here, threads = threading.get_ident(), []

    def before_commit(version: str) -> float:
        threads.append(threading.get_ident())
        return 1.5

    async def after_commit(version: str, error: str | None) -> None:
        threads.append(threading.get_ident())

    callbacks = called(before_commit=before_commit, after_commit=after_commit)
    assert await callbacks.before("0.1") == 1.5
    await callbacks.after("0.1", None)
    assert threads[0] != here == threads[1]


async def test_an_object_with_an_async_call_is_awaited():
    class Asked:
        async def __call__(self, version: str) -> float:
            return 2.0

    assert await called(before_commit=Asked()).before("0.1") == 2.0


async def test_missing_callbacks_are_skipped():
    assert await Callbacks().before("0.1") == 0.0
    await Callbacks().after("0.1", None)
    assert await called(after_commit=lambda version, error: None).before("0.1") == 0.0


@pytest.mark.parametrize("answer", ["soon", True, float("nan"), [], object()])
async def test_answers_that_are_no_seconds_defer_nothing(answer, caplog):
    assert await called(before_commit=lambda version: answer).before("0.1") == 0.0
    assert "seconds or None" in caplog.text


@pytest.mark.parametrize(
    ("answer", "seconds"), [(None, 0.0), (0, 0.0), (-3, 0.0), (2, 2.0), (float("inf"), float("inf"))]
)
async def test_answers(answer, seconds):
    assert await called(before_commit=lambda version: answer).before("0.1") == seconds


@pytest.mark.parametrize("error", [ValueError("mine"), StopIteration(), SystemExit(3), KeyboardInterrupt()])
async def test_a_callbacks_exception_is_logged(error, caplog):
    def before_commit(version: str) -> None:
        raise error

    assert await called(before_commit=before_commit).before("0.1") == 0.0
    assert "before_commit(0.1) failed" in caplog.text


async def test_an_async_callbacks_exception_is_logged(caplog):
    async def after_commit(version: str, error: str | None) -> None:
        raise ValueError("mine")

    await called(after_commit=after_commit).after("0.1", "no")
    assert "after_commit(0.1) failed" in caplog.text


async def test_a_hanging_callback_is_not_called_again_before_its_return(caplog):
    caplog.set_level(logging.WARNING)
    go, calls = threading.Event(), []

    def before_commit(version: str) -> float:
        calls.append(version)
        go.wait(600)
        return 1.0

    callbacks = Callbacks(SimpleNamespace(before_commit=before_commit), max_defer_s=10.0, call_s=0.05)
    assert await callbacks.before("0.1") == 0.0
    assert "no longer waited for" in caplog.text
    assert await callbacks.before("0.2") == 0.0
    assert "has not come back" in caplog.text
    assert calls == ["0.1"]
    go.set()
    callbacks._call_s = 600.0
    for _ in range(30_000):
        if await callbacks.before("0.3") == 1.0:
            break
        await asyncio.sleep(0.001)
    assert calls == ["0.1", "0.3"]


async def test_a_hanging_async_callback_is_cancelled():
    ended = asyncio.Event()

    async def before_commit(version: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    assert (
        await Callbacks(SimpleNamespace(before_commit=before_commit), max_defer_s=10.0, call_s=0.01).before("0.1")
        == 0.0
    )
    assert ended.is_set()


async def test_one_call_at_a_time():
    inside, most = [], []

    def after_commit(version: str, error: str | None) -> None:
        inside.append(version)
        most.append(len(inside))
        inside.remove(version)

    callbacks = called(after_commit=after_commit)
    await asyncio.gather(*(callbacks.after(f"0.{n}", None) for n in range(20)))
    assert most == [1] * 20


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the user's, in a folder that is not on Python's path."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "orchestrator_hooks.py").write_text(
        "class Hooks:\n    def before_commit(self, version):\n        return 1\n"
        "hooks = Hooks()\nclass nested:\n    inner = hooks\n"
        "nothing = 3\nbad = type('Bad', (), {'before_commit': 3})()\n"
        "def after_commit(version, error):\n    pass\n"
    )
    (tmp_path / "broken_hooks.py").write_text("1 / 0\n")
    yield tmp_path
    for name in ("orchestrator_hooks", "broken_hooks"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("text", ["orchestrator_hooks", "orchestrator_hooks:hooks", "orchestrator_hooks:nested.inner"])
def test_valid_callback_names_are_loaded(module, text):
    check(load(text, module), text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no_such_module:x", "No module named"),
        ("broken_hooks", "ZeroDivisionError"),
        ("orchestrator_hooks:absent", "has no 'absent'"),
        ("orchestrator_hooks:Hooks", "is a class"),
        ("orchestrator_hooks:nothing", "needs a function before_commit or after_commit"),
        ("orchestrator_hooks:bad", "needs a function"),
        ("", "cannot import"),
        (":hooks", "cannot import"),
    ],
)
def test_invalid_callback_names_are_refused(module, text, said):
    with pytest.raises(UsageError, match=said):
        load(text, module)


def test_a_callbacks_object_without_functions_is_refused():
    with pytest.raises(UsageError, match="needs a function"):
        Callbacks(object())

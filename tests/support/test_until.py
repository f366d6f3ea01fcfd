"""Waiting returns what was seen, stops where it is in vain, and says what it saw last."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import until as module
from tests.support.until import check_runs, until, wait_until


@pytest.fixture(params=["awaits", "blocks"])
def wait(request: pytest.FixtureRequest) -> Callable[..., Any]:
    if request.param == "blocks":
        return wait_until
    return lambda *words, **options: asyncio.run(until(*words, **options))


def test_the_first_value_that_holds_is_returned(wait: Callable[..., Any]) -> None:
    numbers = iter(range(300))
    assert wait(lambda: next(numbers), holds=lambda number: number == 120) == 120
    assert next(numbers) == 121


def test_a_failure_shows_the_last_value(wait: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEADLINE_S", 0.0)
    with pytest.raises(AssertionError, match=r"not within 0 s: two ended; last seen: 1$"):
        wait(lambda: 1, "two ended", holds=lambda ended: ended == 2)
    with pytest.raises(AssertionError, match=r"not within 0 s: picture; last seen: 0$"):
        wait(lambda: 0, lambda: "picture")
    with pytest.raises(AssertionError, match=r"test_until.py:\d+; last seen: None$"):
        wait(lambda: None)


def test_a_check_ends_a_wait_in_vain(wait: Callable[..., Any], tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("no such file")
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(AssertionError, match="ended with 3: no such file"):
        wait(lambda: False, check=lambda: check_runs(process, log))


async def test_values_over_http_are_awaited() -> None:
    numbers = iter(range(300))

    async def look() -> int:
        return next(numbers)

    assert await until(look, holds=lambda number: number > 60) == 61

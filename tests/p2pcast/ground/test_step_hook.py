"""A watcher is active during its block; the previous watcher is active again afterwards."""

from __future__ import annotations

import contextlib

from p2pcast.ground.step_hook import StepHook


def test_previous_watcher_is_restored_after_an_exception() -> None:
    watch: StepHook[str] = StepHook()
    with watch.by("outer"):
        with contextlib.suppress(OSError), watch.by("inner"):
            assert watch.watcher == "inner"
            raise OSError
        assert watch.watcher == "outer"
    assert watch.watcher is None

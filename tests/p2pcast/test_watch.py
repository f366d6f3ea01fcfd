"""Whoever watches a seam does so for a block, and what was there before is back after it."""

from __future__ import annotations

import contextlib

from p2pcast.watch import Watch


def test_the_watcher_before_is_back_whatever_the_block_raised() -> None:
    watch: Watch[str] = Watch()
    with watch.by("outer"):
        with contextlib.suppress(OSError), watch.by("inner"):
            assert watch.watcher == "inner"
            raise OSError
        assert watch.watcher == "outer"
    assert watch.watcher is None

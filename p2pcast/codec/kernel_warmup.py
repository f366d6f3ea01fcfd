"""Compiles or loads the codec's kernels before the first delta arrives.

A kernel is compiled, or loaded from its cache, at its first call with each kind of array. That takes seconds on a slow
machine and blocks the interpreter. A daemon that blocks for seconds during a broadcast looks dead to its peers. So a
daemon runs every codec path of its layout once before it joins a broadcast. It does so in steps, so that it can stop
between two of them. Before a compilation, the log says why the process is silent and where the result is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
from numba.core.event import Listener, install_listener

from p2pcast.codec.cell import apply, decode, encode
from p2pcast.codec.digest import digest, digest_change, word_dtype
from p2pcast.codec.layout import Cell, Layout

logger = logging.getLogger("p2pcast.codec")
COMPILES: Final = "numba:compile"
"""The event when a kernel is in no cache."""
WORDS = 4096
"""Words of the test cell: many changes have one-byte gaps, and a single change has a two-byte gap."""


class Announcement(Listener):  # type: ignore[misc]
    """Logs once, at ``level``, that kernels are being compiled."""

    def __init__(self, level: int) -> None:
        self._level, self._begun = level, False

    def on_start(self, event: Any) -> None:
        if self._begun:
            return
        self._begun = True
        folder = event.data["dispatcher"].stats.cache_path
        where = (
            "at every start: no folder can keep them; set NUMBA_CACHE_DIR to one"
            if folder is None
            else f"once for this machine; they are kept in {folder}"
        )
        logger.log(self._level, "compiling the codec's kernels for up to a minute, %s", where)

    def on_end(self, event: Any) -> None: ...

    def done(self) -> None:
        if self._begun:
            logger.log(self._level, "the codec's kernels are compiled")


def steps(widths: Iterable[int] = (2,), level: int = logging.INFO) -> Iterator[None]:
    """Run every codec path for cells with these word widths in bytes; each step runs one or a few kernels. ``level``:
    log level of the messages about compilation.
    """
    told = Announcement(level)
    with install_listener(COMPILES, told):
        yield from _all_steps(widths)
    told.done()


def _all_steps(widths: Iterable[int]) -> Iterator[None]:
    for width in sorted(set(widths)):
        cell = Cell(0, 0, 0, WORDS + 1, width, 0, 64)
        old = np.arange(WORDS + 1).astype(word_dtype(width))
        old.flags.writeable = False
        for positions in (np.arange(0, WORDS, 7), np.array([WORDS // 2])):
            for step in (1, (1 << (8 * width - 1)) - 1):
                new = old.copy()
                new[positions] += np.array(step, new.dtype)
                yield from _codec_paths(cell, old, new)


def warm_up(widths: Iterable[int] = (2,), level: int = logging.INFO) -> None:
    """Run all of ``steps``."""
    for _ in steps(widths, level):
        pass


def warm_up_for(layout: Layout, level: int = logging.INFO) -> None:
    """Run every codec path that this layout's cells can use."""
    warm_up((t.word_bytes for t in layout.tensors), level)


def _codec_paths(cell: Cell, old: np.ndarray, new: np.ndarray) -> Iterator[None]:
    new.flags.writeable = False
    before = digest(old, cell)
    yield
    for codec in ("auto", "flat", "dense", "context"):
        coded = encode(cell, old, new, before=before, codec=codec)
        assert coded is not None
        yield
        patch = decode(cell, coded.codec, coded.payload, old, coded.before, coded.after)
        yield
        target = old.copy()
        apply(patch, target)
        if patch.positions is not None:
            # A patch mapped from its file is read-only, which is a different kind of array to the compiler.
            positions, words = patch.positions.copy(), patch.words.copy()
            positions.flags.writeable = words.flags.writeable = False
            digest_change(positions, old[positions], words, cell)
        digest(target, cell)
        yield

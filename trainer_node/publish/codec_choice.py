"""Chooses the codec of the next version from costs measured here and from what is known of the fleet.

Guarantees: a configured codec is used. Otherwise ``codec.codec_prediction`` predicts which codec will deliver first,
and that one is used. Costs are measured in this process on samples of a published version (on one thread, with digests
taken and checked, as for a version). Until then, recorded costs from other machines are used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pcast.codec.cell import decode, digest, encode
from p2pcast.codec.codec_prediction import MEASURED_BEFORE, BroadcastPath, Choice, Cost, StateSize, choose
from p2pcast.codec.join_parts import within
from p2pcast.codec.layout import Cell, Layout
from p2pcast.state.patch_file import PatchFile
from p2pcast.state.shadow import Shadow

AUTO = "auto"
SAMPLED_BYTES = 16 << 20
PART_WORDS = 1 << 19
"""Most words per sample of a cell: with smaller parts, samples come from more places."""
AGAIN_AFTER = 50
"""Number of versions until costs are measured again."""
SOONER_AFTER = 10
"""Number of versions until then if payloads have become twice or half as large as the sample's."""

Words = npt.NDArray[Any]
Sample = tuple[Cell, Words, Words]
"""A part of a cell, with its words before and after."""


class CodecChoice:
    """``configured``: a codec, or ``auto``. ``way`` returns the current path to the last peer."""

    def __init__(self, configured: str, way: Callable[[], BroadcastPath]) -> None:
        self.costs: Mapping[str, Cost] = MEASURED_BEFORE
        self._configured = configured
        self._way = way
        self._since: int | None = None
        """Versions since costs were last measured; None if never."""

    def next(self, layout: Layout) -> Choice:
        """Choose the codec for the next version with this layout."""
        if self._configured != AUTO:
            return Choice(self._configured)
        largest = max((cell.nbytes for cell in layout.cells), default=1)
        return choose(self.costs, self._way(), StateSize(layout.nbytes, largest))

    def is_lesson(self, codec: str, payload_bytes: int, state_bytes: int) -> bool:
        """Whether costs should be measured on this version. Counts versions: call it once for each published one."""
        if self._configured != AUTO or not payload_bytes:
            return False
        if self._since is None:
            return True
        self._since += 1
        moved = abs(math.log2(payload_bytes / (state_bytes * self.costs[codec].share)))
        return self._since >= (AGAIN_AFTER if moved < 1 else SOONER_AFTER)

    def learn(self, shadow: Shadow, patch: Path) -> None:
        """Measure costs on a patch that is not yet applied to the shadow. Blocks for a few tenths of a second. Raises
        IntegrityError or LocalError.
        """
        found = samples(shadow, PatchFile.open(patch, shadow.layout))
        if any(bool((old != new).any()) for _, old, new in found):
            self.costs = {codec: measured(codec, found) for codec in MEASURED_BEFORE}
        self._since = 0


def samples(shadow: Shadow, patch: PatchFile) -> list[Sample]:
    """Return parts of cells, spread evenly over the state's bytes."""
    layout = shadow.layout
    changes = {change.cell: change for change in patch.cells}
    parts = [(cell, at) for cell in layout.cells for at in range(0, cell.words, PART_WORDS)]
    ends = np.cumsum([min(PART_WORDS, cell.words - at) * cell.word_bytes for cell, at in parts])
    wanted = max(1, SAMPLED_BYTES // (PART_WORDS * max(cell.word_bytes for cell in layout.cells)))
    places = (np.arange(wanted) + 0.5) * (layout.nbytes / wanted)
    out: list[Sample] = []
    for number in np.unique(np.searchsorted(ends, places)).tolist():
        cell, at = parts[number]
        part = within(cell, at, min(PART_WORDS, cell.words - at))
        old = shadow.words(cell)[at : at + part.words]
        new = old.copy()
        change = changes.get(cell.index)
        if change is not None and change.positions is None:
            new[:] = change.words[at : at + part.words]
        elif change is not None and change.positions is not None:
            first, last = np.searchsorted(change.positions, [at, at + part.words])
            new[change.positions[first:last] - np.uint32(at)] = change.words[first:last]
        out.append((part, old, new))
    return out


def measured(codec: str, found: list[Sample]) -> Cost:
    """Measure a codec's cost on samples: CPU time of one thread, in the second of two rounds."""
    known = [digest(old, cell) for cell, old, _ in found]
    encode_s = decode_s = 0.0
    for _ in range(2):
        begun = time.thread_time()
        coded = [encode(c, old, new, before=b, codec=codec) for (c, old, new), b in zip(found, known, strict=True)]
        encoded = time.thread_time()
        for (cell, old, _new), one in zip(found, coded, strict=True):
            if one is not None:
                decode(cell, one.codec, one.payload, old, one.before, one.after)
        encode_s, decode_s = encoded - begun, time.thread_time() - encoded
    nbytes = sum(old.nbytes for _, old, _ in found)
    payload = sum(len(one.payload) for one in coded if one is not None)
    return Cost(nbytes / max(encode_s, 1e-9), nbytes / max(decode_s, 1e-9), payload / nbytes)

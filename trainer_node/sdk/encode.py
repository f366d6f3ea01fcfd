"""Encodes this rank's parts against the previous state: on the host with the compiled scan, or on the device that
holds both states.

Guarantee: both ways produce the same bytes and digests. On a device, torch's own operations compare many parts at once.
Only changed entries are copied to the host, where the CPU encodes them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from p2pcast.codec.cell import CONTEXT, FLAT, Encoded
from p2pcast.codec.codec_prediction import Choice
from p2pcast.codec.digest import MASK, digest_change, word_dtype
from p2pcast.codec.encode_cell import encode_as_chosen
from p2pcast.codec.flat_codec import encode_flat
from p2pcast.codec.layout import Cell
from p2pcast.device import RUN_BYTES, Changes, compare, encode_context_on_device
from trainer_node.sdk.snapshot import Room, Slot

DENSE_FROM = 16
"""If a payload takes more than 1/16 of a part's bytes, the part is encoded on the host, which may choose ``dense`` (see
``codec.cell``).
"""

AUTO = "auto"
CONTEXT_CODED = "context"


def codec_of(told: str, cell: Cell, whole: Cell) -> str:
    """Return the codec for a part of a version with codec ``told``. With ``context``, a whole cell is encoded here and
    the hub takes it unchanged. The hub itself encodes cells that it joins from parts, once it has all their changes.
    """
    return CONTEXT_CODED if told == CONTEXT_CODED and cell.words == whole.words else AUTO


def encode_on_device(
    cell: Cell, old: torch.Tensor, new: torch.Tensor, before: int, codec: str = AUTO
) -> Encoded | None:
    """Encode 1-D tensors on one device, as ``delta_builder.code`` does. ``before``: the digest of ``old``. ``codec``:
    ``auto`` or ``context``. Returns None if no word changed.
    """
    found = compare(old, new, [(0, cell.words)], DENSE_FROM)
    return encode_changes(cell, None if found is None else found[0], old, new, before, codec)


def encode_changes(
    cell: Cell, changes: Changes | None, old: torch.Tensor, new: torch.Tensor, before: int, codec: str = AUTO
) -> Encoded | None:
    """Encode known changes as ``encode_on_device`` does. ``changes`` is None if there are too many to list."""
    if changes is not None and not changes.positions.size:
        return None
    if changes is not None and changes.positions.size * DENSE_FROM <= cell.words:
        steps = np.subtract(changes.new, changes.old)
        in_context = codec == CONTEXT_CODED
        payload = (
            encode_context_on_device(cell, old, changes, steps)
            if in_context
            else encode_flat(changes.positions, steps, cell.words)
        )
        if len(payload) * DENSE_FROM <= cell.nbytes:
            after = (before + digest_change(changes.positions, changes.old, changes.new, cell)) & MASK
            return Encoded(cell.index, CONTEXT if in_context else FLAT, payload, before, after, changes.positions.size)
    return encode_as_chosen(cell, _words(old), _words(new), before, Choice(codec))


@dataclass(slots=True)
class _Run:
    """Parts ``first`` to ``end``, exclusive, adjacent in one segment. ``left``: how many are yet to be asked for."""

    first: int
    end: int
    lock: threading.Lock
    left: int
    compared: bool = False
    found: list[Changes] | None = None


class ComparedRooms:
    """The changes between two rooms on a device. A run of parts is compared when its first part is asked for. Each part
    may be asked for once, from any thread.
    """

    def __init__(self, slots: Sequence[Slot], previous: Room, latest: Room, *, run_bytes: int | None = None) -> None:
        self._slots, self._previous, self._latest = slots, previous, latest
        self._run_of: list[_Run] = []
        for number, slot in enumerate(slots):
            run = self._run_of[-1] if self._run_of else None
            if run is None or not _joins(slots[run.first], slot, run_bytes or RUN_BYTES):
                run = _Run(number, number, threading.Lock(), 0)
            run.end, run.left = number + 1, run.left + 1
            self._run_of.append(run)

    def encode(self, cell: Cell, number: int, before: int, codec: str = AUTO) -> Encoded | None:
        """Encode part ``number``, which covers ``cell``, as ``encode_on_device`` does."""
        run, slot = self._run_of[number], self._slots[number]
        with run.lock:
            if not run.compared:
                run.found, run.compared = self._compare(run), True
            changes = None if run.found is None else run.found[number - run.first]
            run.left -= 1
            if not run.left:
                run.found = None
        if changes is None and run.end - run.first > 1:  # the run has too many changes, but this part may have few
            return encode_on_device(cell, self._previous.tensor(slot), self._latest.tensor(slot), before, codec)
        return encode_changes(cell, changes, self._previous.tensor(slot), self._latest.tensor(slot), before, codec)

    def _compare(self, run: _Run) -> list[Changes] | None:
        slots = self._slots[run.first : run.end]
        origin, width = slots[0].offset, slots[0].word_bytes
        parts = [((slot.offset - origin) // width, slot.words) for slot in slots]
        return compare(
            self._previous.span(slots[0], slots[-1]), self._latest.span(slots[0], slots[-1]), parts, DENSE_FROM
        )


def _joins(first: Slot, slot: Slot, run_bytes: int) -> bool:
    """Whether ``slot`` may join the run that begins with ``first``."""
    end = slot.offset + slot.words * slot.word_bytes
    return (slot.segment, slot.word_bytes) == (first.segment, first.word_bytes) and end - first.offset <= run_bytes


def _words(row: torch.Tensor) -> npt.NDArray[Any]:
    words: npt.NDArray[Any] = row.view(torch.uint8).cpu().numpy().view(word_dtype(row.element_size()))
    return words

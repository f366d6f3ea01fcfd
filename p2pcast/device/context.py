"""``context`` (docs/delta-format.md §3) of a cell whose old words lie on a device: what that codec has to know of all of them is found there, the bytes are
made here.

Promise: the bytes that ``codec.context.encode_context`` makes. What crosses for them, beside the changed words: 4 bytes a change down to the device, 4 back,
and a census of 256 numbers. Memory on the device: that of ``class_ranks`` for one cell, however many threads ask.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from p2pcast.codec.context import SHIFTS, choose_window, note, pace_of, payload_of
from p2pcast.codec.layout import Cell
from p2pcast.device.ranks import census, ranks_by_class
from p2pcast.device.scan import Changes, to_host

Words = npt.NDArray[Any]

_turn = threading.Lock()
"""One cell at a time: a chunk of each would be much memory beside a trainer, and the device is busy with one."""


def encode_context_on_device(cell: Cell, old: torch.Tensor, changes: Changes, steps: Words) -> bytes:
    """Payload of a cell with words ``old`` (a row), of which ``changes`` (at least one) move by ``steps``."""
    noted = note(cell, changes.positions, changes.old, steps)
    with _turn:
        counted, places = census(old, pace_of(cell.words), SHIFTS[cell.word_bytes][0]), _sent(changes.positions, old.device)
        (counts,) = to_host(counted)
        window, ends = choose_window(cell, counts, noted.counts)
        (ranked,) = to_host(ranks_by_class(old, places, window.shift, window.base, window.top))
    return payload_of(cell, noted, window, ends, ranked.view(np.uint32))


def _sent(positions: npt.NDArray[np.uint32], device: torch.device) -> torch.Tensor:
    """As int64, widened there."""
    return torch.from_numpy(positions.view(np.int32)).to(device).to(torch.int64)

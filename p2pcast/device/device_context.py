"""Codec ``context`` (docs/formats/delta-format.md §3) for a cell whose old words are on a device.

The device computes what depends on all old words; the host writes the payload. Guarantee: the payload equals that of
``codec.context_codec.encode_context``. In addition to the changed words, 4 bytes per change go to the device; 4 bytes
per change and a census of 256 numbers come back. With any number of threads, the device memory is that of
``class_ranks`` for one cell.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from p2pcast.codec.context_codec import SHIFTS, census_stride, choose_window, describe_changes, encode_payload
from p2pcast.codec.layout import Cell
from p2pcast.device.device_ranks import census, ranks_by_class
from p2pcast.device.scan import Changes, to_host

Words = npt.NDArray[Any]

_device_lock = threading.Lock()
"""Allows one cell at a time: several would take too much memory next to a trainer, and one keeps the device busy."""


def encode_context_on_device(cell: Cell, old: torch.Tensor, changes: Changes, steps: Words) -> bytes:
    """Return the payload of a cell with words ``old`` (a row on the device), of which ``changes`` (at least one) move
    by ``steps``.
    """
    described = describe_changes(cell, changes.positions, changes.old, steps)
    with _device_lock:
        counted, places = (
            census(old, census_stride(cell.words), SHIFTS[cell.word_bytes][0]),
            _to_device(changes.positions, old.device),
        )
        (counts,) = to_host(counted)
        window, ends = choose_window(cell, counts, described.counts)
        (ranked,) = to_host(ranks_by_class(old, places, window.shift, window.base, window.top))
    return encode_payload(cell, described, window, ends, ranked.view(np.uint32))


def _to_device(positions: npt.NDArray[np.uint32], device: torch.device) -> torch.Tensor:
    """Copy positions to the device and widen them to int64 there."""
    return torch.from_numpy(positions.view(np.int32)).to(device).to(torch.int64)

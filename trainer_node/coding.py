"""Coding a part of the state against the one before: on the host by the compiled scan, or on the device that both lie on.

Promise: both ways make payloads that decode to the same words, with the same digests. On the device a part is compared and compacted with torch's own
operations; only the entries that changed cross to the host, where the CPU makes the bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from p2pcast.codec.cell import FLAT, Encoded, encode
from p2pcast.codec.digest import MASK, digest_change, word_dtype
from p2pcast.codec.flat import encode_flat
from p2pcast.codec.layout import Cell

DENSE_FROM = 16
"""Once ``flat`` takes more than 1/16 of a part's bytes the host decides, which knows ``dense`` too: as in ``codec.cell``."""

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def encode_on_device(cell: Cell, old: torch.Tensor, new: torch.Tensor, before: int) -> Encoded | None:
    """As ``codec.cell.encode``, for 1-D tensors on one device; ``before``: the digest of ``old``. None if no word changed."""
    signed = _SIGNED[cell.word_bytes]
    was, now = old.view(signed), new.view(signed)
    places = torch.nonzero(was != now).view(-1)
    changed = places.numel()
    if changed == 0:
        return None
    if changed * DENSE_FROM <= cell.words:
        positions = _to_host(places.to(torch.int32), 4)
        old_values, new_values = _to_host(was[places], cell.word_bytes), _to_host(now[places], cell.word_bytes)
        payload = encode_flat(positions, np.subtract(new_values, old_values), cell.words)
        if len(payload) * DENSE_FROM <= cell.nbytes:
            after = (before + digest_change(positions, old_values, new_values, cell)) & MASK
            return Encoded(cell.index, FLAT, payload, before, after, changed)
    return encode(cell, _to_host(was, cell.word_bytes), _to_host(now, cell.word_bytes), before=before)


def _to_host(values: torch.Tensor, word_bytes: int) -> npt.NDArray[Any]:
    words: npt.NDArray[Any] = values.cpu().numpy().view(word_dtype(word_bytes))
    return words

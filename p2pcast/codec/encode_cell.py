"""Encodes one cell's change in the codec chosen for its version, or in a smaller one.

Pure: the choice is passed in (``codec.codec_prediction``).
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from p2pcast.codec.cell import DENSE_PAYS_FROM, FLAT, Encoded, apply, decode, encode
from p2pcast.codec.codec_prediction import Choice
from p2pcast.codec.layout import Cell

Words = npt.NDArray[Any]


def encode_as_chosen(cell: Cell, old: Words, new: Words, before: int, choice: Choice) -> Encoded | None:
    """Encode a cell in the version's codec, or in a smaller one if many of its words changed.

    A configured codec is always used, except for ``context``, whose payload may become larger than the cell.
    """
    coded = encode(cell, old, new, before=before, codec=choice.codec)
    configured = choice.times is None and choice.codec != "context"
    if coded is None or configured or len(coded.payload) * DENSE_PAYS_FROM <= cell.nbytes:
        return coded
    other = encode(cell, old, new, before=before)
    return other if other is not None and len(other.payload) < len(coded.payload) else coded


def recode_in_context(cell: Cell, coded: Encoded, old: Words) -> Encoded:
    """Encode the same change as ``context`` if it was coded as ``flat`` and ``context`` is smaller."""
    if coded.codec != FLAT:
        return coded
    new = old.copy()
    apply(decode(cell, FLAT, coded.payload, old, coded.before, coded.after, check_before=False), new)
    other = encode(cell, old, new, before=coded.before, codec="context")
    return coded if other is None or len(other.payload) >= len(coded.payload) else other

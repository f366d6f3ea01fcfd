"""Random numbers from a seed, equal on every machine and in every release of Python. Pure."""

from __future__ import annotations

import blake3

_DRAW_BYTES = 16
"""Of each draw: so many bits that the bias of a remainder is below 2^-64."""


def draw_below(most: int, *seed: int | str) -> int:
    """A number from 0 to ``most`` - 1; equal seeds give equal numbers."""
    text = "\0".join(map(str, seed)).encode()
    return int.from_bytes(blake3.blake3(text).digest(_DRAW_BYTES), "little") % most

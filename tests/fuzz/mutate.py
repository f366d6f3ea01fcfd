"""Changes that often break decoders: flipped bits, lengths at their limits, and pieces removed, repeated or taken from
another input.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

NUMBERS = (
    0,
    1,
    2,
    7,
    8,
    15,
    16,
    31,
    32,
    63,
    64,
    127,
    128,
    254,
    255,
    256,
    1499,
    1500,
    1501,
    32767,
    32768,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**64 - 1,
)
PROMISES = (b"\xdd\xff\xff\xff\xff", b"\xdf\x00\x01\x00\x00", b"\xc6\x7f\xff\xff\xff", b"\xc9", b"\xc1", b"\xd6\xff")
"""Headers of msgpack that promise more than there is, or that msgpack does not have."""
HEAD_BYTES = 64
"""Every other change falls within these bytes, which hold lengths and counts."""


def mutated(data: bytes, others: Sequence[bytes], draw: random.Random) -> bytes:
    """``data`` after one to six changes."""
    out = bytearray(data)
    for _ in range(1 << draw.randrange(3) if draw.random() < 0.9 else 6):
        reach = min(len(out), HEAD_BYTES) if draw.random() < 0.5 else len(out)
        _change(out, draw.randrange(reach + 1), others, draw)
    return bytes(out)


def _change(out: bytearray, at: int, others: Sequence[bytes], draw: random.Random) -> None:
    kind, span = draw.randrange(10), draw.choice((1, 1, 2, 3, 4, 8, 16, 100, 1000))
    if kind == 0 and at < len(out):
        out[at] ^= 1 << draw.randrange(8)
    elif kind == 1 and at < len(out):
        out[at] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
    elif kind == 2:
        width = draw.choice((1, 2, 4, 8))
        number = draw.choice(NUMBERS) % (1 << 8 * width)
        out[at : at + width] = number.to_bytes(width, draw.choice(("little", "big")))
    elif kind == 3:
        del out[at : at + span]
    elif kind == 4:
        out[at:at] = out[at : at + span]
    elif kind == 5:
        out[at:at] = draw.randbytes(span)
    elif kind == 6:
        del out[at:]
    elif kind == 7 and at < len(out):
        out[at] = (out[at] + draw.choice((-1, 1))) % 256
    elif kind == 8:
        out[at:at] = draw.choice(PROMISES)
    else:
        other = draw.choice(others)
        begin = draw.randrange(len(other) + 1)
        out[at : at + draw.choice((0, span))] = other[begin : begin + span]

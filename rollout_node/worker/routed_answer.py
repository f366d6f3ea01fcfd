"""Tokens' experts in an answer of vLLM's ``/inference/v1/generate``. ``routed_experts`` is a base64-encoded ``.npy``
file of an array tokens × layers × experts per token. It does no I/O.

An engine started with ``--enable-return-routed-experts`` sends the array once, with an answer's last part. Its rows are
the prompt's from ``routed_experts_prompt_start`` on, and those of all sampled tokens except the last, which the engine
never computes. Rows of a cached prefix come from the request that computed the prefix.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Sequence
from typing import Final

import numpy as np

from p2pcast.rollouts.routed_experts import MAX_LAYERS, MAX_TOP_K

_BASE64: Final = 4 / 3
_HEADER_BYTES: Final = 1024
_NPY: Final = re.compile(
    rb"\x93NUMPY\x01\x00(?P<length>[\x00-\xff]{2})(?P<header>\{'descr': '(?P<dtype>\|u1|<u2)', 'fortran_order': False, "
    rb"'shape': \((?P<tokens>[0-9]{1,9}), (?P<layers>[0-9]{1,9}), (?P<top_k>[0-9]{1,9})\), \} *\n)",
    re.DOTALL,
)
"""The header as numpy writes it. numpy's own reader evaluates the header as Python, and can fail in many ways."""


def routed_line_bytes(tokens: int, token_bytes: int) -> int:
    """Bytes that experts add to the last line of an answer. ``token_bytes``: size of one token's ids."""
    return math.ceil(_BASE64 * (_HEADER_BYTES + tokens * token_bytes)) if token_bytes else 0


def routed_ids(text: str) -> np.ndarray:
    """Decode tokens × layers × experts per token, as uint8 or uint16. Raises ValueError for any other array, or if the
    header does not match the size of the content.
    """
    content = base64.b64decode(text, validate=True)
    found = _NPY.match(content)
    if found is None or len(found["header"]) != int.from_bytes(found["length"], "little"):
        raise ValueError
    shape = tuple(int(found[part]) for part in ("tokens", "layers", "top_k"))
    if not 0 < shape[1] <= MAX_LAYERS or not 0 < shape[2] <= MAX_TOP_K:
        raise ValueError
    return np.frombuffer(content, found["dtype"].decode(), offset=found.end()).reshape(shape)


class KnownTokens:
    """Tokens whose experts a play has received, so that its next request only asks for the others."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []

    def first_unknown(self, prompt_ids: Sequence[int]) -> int:
        """Return the index of the first prompt token whose experts are unknown. If the prompt does not continue the
        last answer's tokens, none are known.
        """
        known = self._token_ids
        return len(known) if len(known) <= len(prompt_ids) and list(prompt_ids[: len(known)]) == known else 0

    def received(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> None:
        """Note that the experts of all tokens except the last are known."""
        self._token_ids = [*prompt_ids, *sampled_ids][:-1]

"""Experts of tokens in an answer of vLLM's ``/inference/v1/generate``: ``routed_experts``, in base64 the file ``.npy``
of an array tokens × layers × experts a token. Pure.

An engine that was started with ``--enable-return-routed-experts`` sends the array once, with an answer's last part. The
rows are those of the prompt from ``routed_experts_prompt_start`` on, and of all sampled tokens but the last, which the
engine never computes. Rows of a cached prefix are those of the request that computed the prefix.
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
"""As numpy writes it. numpy's reader evaluates the header as Python, and fails in many ways."""


def routed_line_bytes(tokens: int, token_bytes: int) -> int:
    """Of experts in the last line of an answer. ``token_bytes``: of one token's ids."""
    return math.ceil(_BASE64 * (_HEADER_BYTES + tokens * token_bytes)) if token_bytes else 0


def routed_ids(text: str) -> np.ndarray:
    """Tokens × layers × experts a token, uint8 or uint16. Raises ValueError for another array, or one whose header does
    not state the size of its content.
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
    """Tokens whose experts a play has received, so that its next request asks for the other ones alone."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []

    def first_unknown(self, prompt_ids: Sequence[int]) -> int:
        """Place of the first token of a prompt whose experts are not known. A prompt that does not continue the tokens
        of the last answer has none that are known.
        """
        known = self._token_ids
        return len(known) if len(known) <= len(prompt_ids) and list(prompt_ids[: len(known)]) == known else 0

    def received(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> None:
        """All tokens but the last have their experts."""
        self._token_ids = [*prompt_ids, *sampled_ids][:-1]

"""The probe set: fixed token sequences that a learner and all engines score with each version of the weights. Pure.

A score is the log-probability of a token given the tokens before it in its sequence, at temperature 1. A sequence's
first token has no score. Scores are in the order of the sequences and their tokens: float32, little-endian, in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import blake3
import numpy as np

from p2pcast.ground.errors import RemoteError, UsageError

MAX_SEQUENCES: Final = 32
MAX_PROBE_TOKENS: Final = 4096
"""Most tokens of all sequences: their scores take 16 KiB, and an engine reads them in one prefill."""
MAX_VOCABULARY: Final = 1 << 32
SCORE_BYTES: Final = 4
MAX_SCORE: Final = 1e-4
"""A log-probability that exceeds 0 by at most this much counts as 0, because of rounding."""


@dataclass(frozen=True)
class ProbeSet:
    """At least one sequence, each with at least two tokens. ``checked`` raises UsageError otherwise."""

    sequences: tuple[tuple[int, ...], ...]

    @classmethod
    def checked(cls, sequences: Any, vocabulary: int = MAX_VOCABULARY) -> ProbeSet:
        """Make a probe set from untrusted values. ``vocabulary``: number of token ids. Raises UsageError."""
        if not isinstance(sequences, list | tuple) or not 1 <= len(sequences) <= MAX_SEQUENCES:
            raise UsageError(f"a probe set has 1 to {MAX_SEQUENCES} sequences")
        left = MAX_PROBE_TOKENS
        for sequence in sequences:
            if not isinstance(sequence, list | tuple) or not 2 <= len(sequence) <= left:
                raise UsageError(
                    f"each sequence of a probe set has at least 2 tokens, and all together at most {MAX_PROBE_TOKENS}"
                )
            left -= len(sequence)
            if any(type(token) is not int or not 0 <= token < vocabulary for token in sequence):
                raise UsageError(f"a token of a probe set is no integer from 0 to {vocabulary - 1}")
        return cls(tuple(tuple(sequence) for sequence in sequences))

    @cached_property
    def id(self) -> bytes:
        """16 bytes, derived from the tokens."""
        lengths = np.array([len(self.sequences), *map(len, self.sequences)], "<u4")
        tokens = np.concatenate([np.array(sequence, "<u4") for sequence in self.sequences])
        return blake3.blake3(b"p2pcast probe set 1\0" + lengths.tobytes() + tokens.tobytes()).digest(16)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))

    @property
    def scores(self) -> int:
        """Number of tokens that have a score."""
        return self.tokens - len(self.sequences)

    @property
    def score_bytes(self) -> int:
        return SCORE_BYTES * self.scores


def packed_scores(scores: Sequence[np.ndarray]) -> bytes:
    """Encode scores. ``scores``: for each sequence, those of all its tokens but the first."""
    return bytes(np.concatenate(scores).astype("<f4").tobytes())


def unpacked_scores(packed: bytes) -> np.ndarray:
    """Decode scores to float32, with shape (scores,). Raises RemoteError for values that are not log-probabilities."""
    if len(packed) % SCORE_BYTES:
        raise RemoteError(f"{len(packed)} bytes are no float32 values")
    found = np.frombuffer(packed, "<f4")
    if not np.isfinite(found).all() or (found > MAX_SCORE).any():
        raise RemoteError("the scores of the probe set are no log-probabilities")
    return found

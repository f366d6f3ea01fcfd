"""Messages between a worker and its processes of plays: pairs in the frames of ``child_channel``.

    first      ["ready", [hash, null]] or ["failed", text]
    to child   ["play", [play, job]]          begin a play; plays have numbers
               ["end", play]                  cancel a play
               ["said", [ask, token_ids, logprobs, spans, stop]]
               ["no answer", [ask, error's class, text]]
               ["alive", null]                say so, by a step
    to parent  ["ask", Ask]                   a turn, sampled by the parent
               ["played", Ended]
               ["raised", [play, text, memory]]  memory: the process had none left

A step of a play is what runs between two waits. Before each step the child writes into the memory that both map: the
number of the play, or 0 between steps, and the count of steps so far. A process whose steps do not go on is blocked.

Vectors are little-endian bytes. The parent decodes with limits, and a message that breaks one ends the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple

import numpy as np

from p2pcast.rollouts.result import Tags
from p2pcast.rollouts.rollout_fields import MAX_TURNS, Array, Count, Mask, Real, Seed, TokenIds
from p2pcast.tasks.child_processes.child_faults import MAX_TEXT
from p2pcast.wire.constraints import AtMost, Integer, OneOf, Text, constraint_of

MAX_STOPS: Final = 4096
"""Most stop tokens of one turn."""
SLOT_BYTES: Final = 16
"""Two u64 in native order: the number of the play that takes a step, and steps so far."""

Number = Annotated[int, Integer(0, (1 << 63) - 1)]
TokenId = Annotated[int, Integer(0, (1 << 32) - 1)]


class SampleRequest(NamedTuple):
    """A question of a play to its sampler. ``ask``: number of the question, unique in its process."""

    play: Number
    ask: Number
    prompt_ids: TokenIds
    seed: Seed
    temperature: Annotated[float, Real()]
    max_tokens: Count
    stop_token_ids: Annotated[Sequence[TokenId], AtMost(MAX_STOPS)]


class PlayEnded(NamedTuple):
    """The part of a trajectory that a play decides. All else of a trajectory is the engine's, and the parent has it."""

    play: Number
    token_ids: TokenIds
    mask: Mask
    turns: Annotated[np.ndarray, Array("<u4", MAX_TURNS)]
    stop: Annotated[str, OneOf(("end", "length", "task"))]
    tags: Tags
    loss_mask: Mask | None


class Raised(NamedTuple):
    play: Number
    text: Annotated[str, Text(MAX_TEXT)]
    memory: bool


READERS: Final[dict[str, Any]] = {
    "ask": constraint_of(SampleRequest).reader(),
    "played": constraint_of(PlayEnded).reader(),
    "raised": constraint_of(Raised).reader(),
}


def as_bytes(record: SampleRequest | PlayEnded) -> list[Any]:
    """The fields, vectors as their bytes."""
    return [value.tobytes() if isinstance(value, np.ndarray) else value for value in record]

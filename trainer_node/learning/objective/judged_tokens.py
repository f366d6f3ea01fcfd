"""Sampled tokens whose most probable alternatives the sampler told, by the schedule that sampled them. Pure.

Guarantees: a batch costs the learner at most MOST_JUDGED forward passes of one rollout. A worker that tells the
alternatives of all its rollouts leaves the other workers their turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from p2pcast.rollouts.result import Result

MOST_JUDGED: Final = 64
"""Most JudgedTokens of a batch. Each costs a forward pass of its rollout, and the workers decide how many they send. A
decision of the guard needs 400 tokens of a bin, which a few rollouts hold.
"""


@dataclass(frozen=True, slots=True, eq=False)
class JudgedTokens:
    """n tokens of one row. ``schedule``: BLAKE3 of the schedule's file, 32 bytes. ``places`` (n,) int64: ascending, in
    the row. ``ids`` (n, k) int64, ``logprobs`` (n, k) float32: the sampler's most probable tokens there.
    """

    schedule: bytes
    places: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]


def judged_tokens(result: Result, since: int) -> Sequence[JudgedTokens]:
    """Of versions from step ``since`` on, one for each schedule. The first token of a turn is left out, since the pass
    over the prompt gives it, and prompts are dense.
    """
    top = result.top_logprobs
    if top is None:
        return ()
    (ids, values), positions = top.arrays(), top.positions
    decoded = (positions > 0) & result.mask[positions - 1].astype(bool)
    schedules = dict(result.schedules or ())
    by_schedule: dict[bytes, npt.NDArray[np.bool_]] = {}
    for span in result.spans:
        name = schedules.get(span.version)
        if name is not None and span.version.step >= since:
            # A worker may send thousands of spans: each costs its own tokens alone.
            within = slice(*np.searchsorted(positions, (span.start, span.end)))
            by_schedule.setdefault(name, np.zeros(len(positions), bool))[within] = decoded[within]
    return [
        JudgedTokens(name, positions[chosen], ids[chosen].astype(np.int64), values[chosen])
        for name, chosen in by_schedule.items()
        if chosen.any()
    ]


def in_turns(
    found: Sequence[Sequence[JudgedTokens]], workers: Sequence[str], seed: bytes
) -> Sequence[Sequence[JudgedTokens]]:
    """``found`` without those beyond MOST_JUDGED. Workers take turns in an order that the seed draws, each time with
    one of their own that the seed draws too. ``found``, ``workers``: of each rollout of a batch, and the workers'
    names. ``seed``: no worker can know it before the batch is cut.
    """
    entries = [(number, one) for number, own in enumerate(found) for one in own]
    if len(entries) <= MOST_JUDGED:
        return found
    drawn = {at: blake3(seed + at.to_bytes(8, "big")).digest() for at in range(len(entries))}
    turns: Counter[str] = Counter()
    queue: list[tuple[int, bytes, int]] = []
    for at in sorted(drawn, key=drawn.__getitem__):
        worker = workers[entries[at][0]]
        queue.append((turns[worker], blake3(seed + worker.encode()).digest(), at))
        turns[worker] += 1
    chosen: list[list[JudgedTokens]] = [[] for _ in found]
    for _, _, at in sorted(queue)[:MOST_JUDGED]:
        number, one = entries[at]
        chosen[number].append(one)
    return chosen

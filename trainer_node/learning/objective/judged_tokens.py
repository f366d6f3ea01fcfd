"""Sampled tokens whose most probable alternatives the sampler told, by the schedule that sampled them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2pcast.rollouts.result import Result


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
            within = decoded & (positions >= span.start) & (positions < span.end)
            by_schedule[name] = by_schedule.get(name, np.zeros(len(positions), bool)) | within
    return [
        JudgedTokens(name, positions[chosen], ids[chosen].astype(np.int64), values[chosen])
        for name, chosen in by_schedule.items()
        if chosen.any()
    ]

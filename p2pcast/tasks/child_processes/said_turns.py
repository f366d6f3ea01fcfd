"""The engine's turns in one play, and the trajectory that follows from it. Pure.

Promise: each sampled token of a trajectory, with its log-probability and its version, was said by the engine after the
tokens before it, at the job's temperature. A play decides on the other tokens alone.
"""

from __future__ import annotations

from typing import Final

import blake3
import numpy as np

from p2pcast.ground import limits
from p2pcast.rollouts.job import Job
from p2pcast.tasks.child_processes.play_messages import PlayEnded
from p2pcast.tasks.play import Play
from p2pcast.tasks.task import ForgedPlayError, Sample, Trajectory

MAX_SAID_BYTES: Final = 256 * limits.MIB
"""Of the samples of one play. A result has at most 16 MiB; a play may ask for more samples than it keeps."""
_TOKEN_BYTES: Final = 64
"""Of a token and its log-probability, as Python has them."""


class SaidTurns:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._said: dict[bytes, list[Sample]] = {}
        self._bytes = 0

    def add(self, prompt_ids: np.ndarray, temperature: float, sample: Sample) -> None:
        """Raises ForgedPlayError for more samples than a play may have."""
        arrays = [*(() if sample.experts is None else (sample.experts.ids,)), *(sample.top or ())]
        self._bytes += _TOKEN_BYTES * (1 + len(sample.token_ids)) + sum(array.nbytes for array in arrays)
        if self._bytes > MAX_SAID_BYTES:
            raise ForgedPlayError(f"the play samples more than {MAX_SAID_BYTES} bytes")
        if temperature == self._job.temperature:
            self._said.setdefault(blake3.blake3(prompt_ids.tobytes()).digest(), []).append(sample)

    def trajectory(self, ended: PlayEnded) -> Trajectory:
        """Raises ForgedPlayError for sampled tokens that the engine did not say."""
        token_ids, mask, turns = ended.token_ids, ended.mask, ended.turns.tolist()
        if len(mask) != len(token_ids) or not turns:
            raise ForgedPlayError(f"{len(token_ids)} tokens, {len(mask)} values of the mask and {len(turns)} turns")
        play, before, at = Play(()), blake3.blake3(), 0
        for begin, following in zip(turns, [*turns[1:], len(token_ids)], strict=True):
            if not at <= begin < following <= len(token_ids):
                raise ForgedPlayError(f"turns begin at {begin} and at {following}, of {len(token_ids)} tokens")
            before.update(token_ids[len(play.token_ids) : begin].tobytes())
            play.add_environment(token_ids[at:begin].tolist())
            sample = self._turn(before.digest(), token_ids[begin:following], mask[begin:following])
            if sample is None:
                raise ForgedPlayError(f"the turn from token {begin} on is not what the engine said")
            play.add_turn(sample)
            at = begin + len(sample.token_ids)
            before.update(token_ids[begin:at].tobytes())
        play.add_environment(token_ids[at:].tolist())
        played = play.end(ended.stop, ended.tags)  # type: ignore[arg-type]
        if not np.array_equal(played.mask, mask):
            raise ForgedPlayError("the mask is 1 on tokens that the engine did not say, or 0 on others")
        return played

    def _turn(self, prompt: bytes, token_ids: np.ndarray, mask: np.ndarray) -> Sample | None:
        """The newest sample after the prompt whose tokens are the first ones, up to the end of the mask's ones."""
        count = len(mask) if mask.all() else int(mask.argmin())
        said = token_ids[:count].tolist()
        return next((one for one in reversed(self._said.get(prompt, ())) if list(one.token_ids) == said), None)

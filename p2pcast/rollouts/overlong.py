"""How truncated rollouts are rewarded: one rule for the learner and the ledger. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, get_args

from p2pcast.ground.errors import UsageError

Overlong = Literal["keep", "mask", "zero"]
"""How truncated rollouts are treated. ``keep``: like others. ``mask``: no token is trained on, but the reward counts in
its group. ``zero``: the reward counts as 0 in its group, or as the worst reward of the group's complete rollouts
if that is below 0.
"""
TREATMENTS: Final[tuple[Overlong, ...]] = get_args(Overlong)
MAX_TREATMENT: Final = 32
"""Most characters of a treatment in a request."""


def overlong_of(name: str) -> Overlong:
    """Return the treatment with this name. Raises UsageError."""
    if name not in TREATMENTS:
        raise UsageError(f"no treatment of overlong rollouts is named {name!r}: use keep, mask or zero")
    return name


def paid(rewards: Sequence[float], cut_off: Sequence[bool], overlong: Overlong) -> list[float]:
    """The rewards of one group's rollouts as the learner counts them, in the rollouts' order. ``cut_off``: whether each
    was truncated.
    """
    if overlong != "zero":
        return list(rewards)
    whole = [reward for reward, cut in zip(rewards, cut_off, strict=True) if not cut]
    worst = min([0.0, *whole])
    return [worst if cut else reward for reward, cut in zip(rewards, cut_off, strict=True)]

"""Advantages: how much better each reward of a group is than the group's others. Pure.

    grpo            (r - mean) / (std + eps)      DeepSeekMath (arXiv 2402.03300), section 4.1.2; population std
    dr_grpo         r - mean                      Dr. GRPO (arXiv 2503.20783), section 3.2
    leave_one_out   r_i - mean of the others      RLOO (arXiv 2402.14740), section 2.2

Guarantees: equal rewards give advantages of exactly 0; a permutation of the rewards permutes the advantages bit for
bit.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from p2pcast.ground.errors import UsageError
from p2pcast.rollouts.result import reward_fault

AdvantageKind = Literal["grpo", "dr_grpo", "leave_one_out"]


def group_advantages(rewards: npt.ArrayLike, kind: AdvantageKind, eps: float) -> npt.NDArray[np.float64]:
    """Advantages of one group, (G,) from rewards (G,). ``eps``: added to the standard deviation, so in units of reward.

    Raises UsageError for fewer than two rewards, one that is not finite or beyond MAX_REWARD, a negative ``eps``, an
    unknown kind.
    """
    values = np.asarray(rewards, np.float64)
    if values.ndim != 1 or len(values) < 2:
        raise UsageError(f"advantages compare at least 2 rewards of one group, not an array of shape {values.shape}")
    if wrong := [fault for fault in map(reward_fault, values.tolist()) if fault is not None]:
        raise UsageError(f"{wrong[0]}: advantages of the group are undefined")
    if kind not in get_args(AdvantageKind):
        raise UsageError(f"no advantages are named {kind!r}: use one of {', '.join(get_args(AdvantageKind))}")
    if not 0 <= eps < math.inf:
        raise UsageError(f"eps is {eps}: it is added to a standard deviation, and must be finite and at least 0")
    if values.min() == values.max():
        return np.zeros_like(values)
    # fsum rounds once, so the order of a group's results changes no bit.
    centred = values - math.fsum(values) / len(values)
    if kind == "dr_grpo":
        return centred
    if kind == "leave_one_out":
        # r_i - (sum - r_i) / (G - 1) = (r_i - mean) * G / (G - 1)
        return centred * (len(values) / (len(values) - 1))
    return centred / (math.sqrt(math.fsum(centred**2) / len(values)) + eps)

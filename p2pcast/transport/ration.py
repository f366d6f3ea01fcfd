"""The rate limit on a node's requests, its ration: what each message costs the node that answers it, and how fast the sender may spend. Pure: time is passed in.

A certificate lets a node send requests, and a stolen or broken node sends them without end. Requests over the ration are not refused but wait: the daemon stops reading from the link,
so the sender's own buffers fill, and an honest node with a short burst loses nothing. One unit is what answering a PING costs, some 50 µs of the loop.
"""

from __future__ import annotations

from typing import Final

from p2pcast import limits
from p2pcast.transport.turnstile import Allowance
from p2pcast.wire.messages import PLAIN, Type

LINK_COST: Final = 50.0
"""A link that came up: a handshake, buffers, an owner."""

COST: Final[dict[Type, float]] = dict.fromkeys(Type, 0.0) | {
    # Either side.
    Type.PING: 1.0,
    Type.PONG: 1.0,
    # Of a peer to the hub.
    Type.JOIN: 200.0,  # the plan changes, and everybody near hears of it
    Type.REPORT: 10.0,  # plan, barrier, metrics
    Type.SEEK: 20.0,
    Type.CALL: 50.0,  # another peer is told, and dials
    Type.UNREACHED: 50.0,  # another peer is told, the hub dials back, ways are told anew
    Type.SQUASH: 100.0,
    Type.ENROL: 500.0,  # a signature, and the ledger on disk
    Type.LEAVE: 1.0,
    # Of a child to its parent.
    Type.ATTACH: 100.0,
    Type.WANT: 20.0,  # all pieces of an artifact are lined up
    Type.SPARE: 2.0,
    Type.ASK: 2.0,
    Type.RECALL: 5.0,
    Type.EASE: 5.0,
    # Of a parent to its child.
    Type.ATTACHED: 50.0,
    Type.PATH: 50.0,  # it is passed on to everybody below
    Type.ALIVE: 1.0,
    Type.GONE: 20.0,  # a puller marks each piece
    Type.HAVE: 5.0,
    Type.UNSENT: 5.0,
    Type.ABORT: 5.0,
    Type.CONFIRM: 5.0,
    Type.LAYOUT: 20.0,
    # Of a rank to the hub; what a version is made of is held back by `Coming.balance`.
    Type.RANK: 100.0,
    Type.BEGIN: 20.0,
    Type.ABORTED: 20.0,
    # Of a member to its lead, and back.
    Type.MEMBER: 50.0,
    Type.HELD: 2.0,
    Type.REPORTED: 20.0,
    Type.STILL: 5.0,
    Type.SERVES: 5.0,
}
"""Free are pieces and what vouches for them, whatever the hub tells its peers and ranks, and handshakes, which have limits of their own."""

BYTES_PER_UNIT: Final = 1024
"""Of a long message: ranges and rows are gone through one by one."""


def cost(kind: Type, size: int) -> float:
    """Of a message whose body has ``size`` bytes."""
    fixed = COST[kind]
    return fixed + size / BYTES_PER_UNIT if fixed and kind not in PLAIN else fixed


class Ration:
    """One node's, over all links that it has brought up; or one link's."""

    def __init__(self, now: float) -> None:
        self._allowance = Allowance(limits.RATION_BURST, limits.RATION_PER_S, limits.RATION_BURST, now)

    def spend(self, cost: float, now: float) -> float:
        """Seconds for which the daemon is not to read from this node; 0 within the ration."""
        left = self._allowance.look(now) - cost
        self._allowance.left = left
        return max(0.0, -left / limits.RATION_PER_S)


class Rations:
    """By node; bounded in number: those that were idle longest are forgotten first, and have a full ration again by then."""

    def __init__(self) -> None:
        self._of: dict[bytes, Ration] = {}

    def of(self, node: bytes, now: float) -> Ration:
        found = self._of.pop(node, None) or Ration(now)
        self._of[node] = found
        if len(self._of) > limits.MAX_RATIONS:
            del self._of[next(iter(self._of))]
        return found

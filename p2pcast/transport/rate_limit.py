"""The rate limit on a node's requests: what each message costs the node that answers, and the sender's budget. Pure:
time is passed in.

A certificate lets a node send requests, and a stolen or broken node may send them without end. Requests over the limit
are not refused but delayed: the daemon stops reading from the link, so the sender's own buffers fill up. An honest node
with a short burst loses nothing. One unit is the cost of answering a PING: about 50 µs of the event loop.
"""

from __future__ import annotations

from typing import Final

from p2pcast.ground import limits
from p2pcast.sockets.handshake_admission import TokenBucket
from p2pcast.wire.messages import PLAIN, Type

LINK_COST: Final = 50.0
"""Units for a new link: a handshake, buffers, an owner."""

COST: Final[dict[Type, float]] = dict.fromkeys(Type, 0.0) | {
    # Either side.
    Type.PING: 1.0,
    Type.PONG: 1.0,
    # From a peer to the hub.
    Type.JOIN: 200.0,  # a new plan, sent to the peers near the newcomer
    Type.REPORT: 10.0,  # plan, barrier, metrics
    Type.FIND_SOURCES: 20.0,
    Type.CALL: 50.0,  # a message to another peer, which dials
    Type.UNREACHABLE: 50.0,  # the hub dials the other peer back and sends new addresses
    Type.SQUASH: 100.0,
    Type.ENROL: 500.0,  # a signature, and a write of the token ledger
    Type.LEAVE: 1.0,
    # From a child to its parent.
    Type.ATTACH: 100.0,
    Type.WANT: 20.0,  # the parent queues all pieces of an artifact
    Type.SKIP: 2.0,
    Type.REQUEST: 2.0,
    Type.CANCEL: 5.0,
    Type.SET_RATE: 5.0,
    # From a parent to its child.
    Type.ATTACHED: 50.0,
    Type.PATH: 50.0,  # the child forwards it to its whole subtree
    Type.ALIVE: 1.0,
    Type.GONE: 20.0,  # a pulling peer marks each piece
    Type.HAVE: 5.0,
    Type.CANCELLED: 5.0,
    Type.ABORT: 5.0,
    Type.CONFIRM: 5.0,
    Type.LAYOUT: 20.0,
    # From a rank to the hub; `rank_intake` limits the parts of a version.
    Type.RANK: 100.0,
    Type.BEGIN: 20.0,
    Type.ABORTED: 20.0,
    # Between a group member and its lead.
    Type.MEMBER: 50.0,
    Type.HELD: 2.0,
    Type.WORKER_REPORT: 20.0,
    Type.FREEZE: 5.0,
    Type.SERVING: 5.0,
}
"""Units by message type. Pieces and their signatures, messages from the hub, and handshakes are free; they have
separate limits.
"""

BYTES_PER_UNIT: Final = 1024
"""A long message costs one more unit per this many bytes, because the receiver processes ranges and rows one by one."""


def cost(kind: Type, size: int) -> float:
    """Return the units that a message with a body of ``size`` bytes costs."""
    fixed = COST[kind]
    return fixed + size / BYTES_PER_UNIT if fixed and kind not in PLAIN else fixed


class RateLimit:
    """The budget of one node for all links that it has dialled, or of one link."""

    def __init__(self, now: float) -> None:
        self._bucket = TokenBucket(
            limits.REQUEST_UNITS_BURST, limits.REQUEST_UNITS_PER_S, limits.REQUEST_UNITS_BURST, now
        )

    def spend(self, cost: float, now: float) -> float:
        """Charge ``cost`` units, and return for how many seconds the daemon must not read from this node (0 if within
        the limit).
        """
        left = self._bucket.refilled(now) - cost
        self._bucket.tokens = left
        return max(0.0, -left / limits.REQUEST_UNITS_PER_S)


class RateLimits:
    """Rate limits by node, bounded in number. The node that has been idle longest is forgotten first; its budget is
    full by then.
    """

    def __init__(self) -> None:
        self._of: dict[bytes, RateLimit] = {}

    def of(self, node: bytes, now: float) -> RateLimit:
        found = self._of.pop(node, None) or RateLimit(now)
        self._of[node] = found
        if len(self._of) > limits.MAX_RATE_LIMITS:
            del self._of[next(iter(self._of))]
        return found

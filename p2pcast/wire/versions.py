"""Which protocol two nodes speak: the greatest that both know (docs/wire-protocol.md, section 2). Pure.

Promises: a node without a protocol in common is refused before anything else of its HELLO is read, whatever later protocols put there; the refusal names the protocols
of both sides, and which side has to be updated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from p2pcast.errors import IncompatibleError, RefusedError, RemoteError
from p2pcast.release import RELEASE

MAX_PROTOCOL = 1 << 31
_FIRST = 1
"""The protocol of p2pcast 0.1, whose READY names none."""
_SPEAKS = re.compile(r"\bspeaks? protocols? \d")
"""In what a node says that refuses another for its protocol."""
_FIRST_SAID = re.compile(r"this side speaks protocol (\d{1,9}), the other \d{1,9}: use one release of p2pcast")
"""The refusal by p2pcast 0.1, which does not say which side is to be updated."""


@dataclass(frozen=True, slots=True)
class Speaks:
    """The least and the greatest protocol that a node speaks, and each between them."""

    least: int
    greatest: int

    def __str__(self) -> str:
        return f"protocol {self.least}" if self.least == self.greatest else f"protocols {self.least} to {self.greatest}"

    def __contains__(self, protocol: object) -> bool:
        return isinstance(protocol, int) and self.least <= protocol <= self.greatest


SPOKEN = Speaks(2, 2)
"""By this release."""

Sides = tuple[str, str]
"""What the dialer and the listener of a connection are called in messages."""


def sides(purpose: object, role: object) -> Sides:
    """By the HELLO's words; those of a later protocol may be unknown."""
    if purpose == "enrol" and role in ("peer", "trainer"):
        return str(role), "hub"
    known = {"control": ("peer", "hub"), "publish": ("trainer", "hub"), "engine": ("engine's member", "engine's lead")}
    return known.get(purpose if isinstance(purpose, str) else "", ("dialing node", "answering node"))


def offered(hello: dict[str, Any]) -> Speaks | None:
    """What the dialer speaks: ``least`` to ``greatest``; ``v`` alone where these are missing, as in protocol 1. None: a malformed HELLO."""
    least, greatest = hello.get("least", hello.get("v")), hello.get("greatest", hello.get("v"))
    if type(least) is int and type(greatest) is int and 0 <= least <= greatest <= MAX_PROTOCOL:
        return Speaks(least, greatest)
    return None


def settle(dialer: Speaks, listener: Speaks, called: Sides) -> int:
    """The protocol to be spoken. Decided by the listener. Raises IncompatibleError."""
    if max(dialer.least, listener.least) <= (greatest := min(dialer.greatest, listener.greatest)):
        return greatest
    older = called[0] if dialer.greatest < listener.greatest else called[1]
    raise IncompatibleError(
        f"the {called[1]} (p2pcast {RELEASE}) speaks {listener}, the {called[0]} {dialer}: update p2pcast on the {older}"
    )


def check_settled(protocol: int, own: Speaks, before: int | None) -> None:
    """What a listener says that it has settled on, at the dialer. ``before``: what it said first. Raises RemoteError."""
    if protocol not in own or before not in (None, protocol):
        why = f"this side offered {own}" if before is None else f"settled on protocol {before} before"
        raise RemoteError(f"the other side settled on protocol {protocol}, but {why}")


def settled(ready: dict[str, Any]) -> int:
    """The protocol that a READY names."""
    found: int = ready.get("v", _FIRST)
    return found


def refusal(message: str, own: Speaks, called: Sides) -> RefusedError:
    """The dialer's error for a refusal by the listener."""
    if (first := _FIRST_SAID.search(message)) is not None:
        return IncompatibleError(
            f"the {called[1]} speaks protocol {first[1]}, this {called[0]} (p2pcast {RELEASE}) {own}: update p2pcast on the {called[1]}"
        )
    kind = IncompatibleError if _SPEAKS.search(message) else RefusedError
    return kind(f"the other side says: {message}")

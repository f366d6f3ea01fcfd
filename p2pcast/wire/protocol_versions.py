"""Protocol negotiation: the highest protocol that both nodes support (docs/formats/wire-protocol.md, section 2). Pure.

Guarantees: a node without a common protocol is refused before the other keys of its HELLO are checked. The refusal
names both sides' protocols and the side to update.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from p2pcast.ground.errors import IncompatibleError, RefusedError, RemoteError
from p2pcast.ground.release import RELEASE
from p2pcast.trust.dial_permissions import BOUGHT

MAX_PROTOCOL = 1 << 31
_FIRST = 1
"""The protocol of p2pcast 0.1, whose READY does not name it."""
_SPEAKS = re.compile(r"\bspeaks? protocols? \d")
"""Matches the refusal of a node because of its protocol."""
_FIRST_SAID = re.compile(r"this side speaks protocol (\d{1,9}), the other \d{1,9}: use one release of p2pcast")
"""Matches the refusal by p2pcast 0.1, which does not name the side to update."""


@dataclass(frozen=True, slots=True)
class ProtocolRange:
    """The protocols that a node supports: ``least`` to ``greatest``."""

    least: int
    greatest: int

    def __str__(self) -> str:
        return f"protocol {self.least}" if self.least == self.greatest else f"protocols {self.least} to {self.greatest}"

    def __contains__(self, protocol: object) -> bool:
        return isinstance(protocol, int) and self.least <= protocol <= self.greatest


SPOKEN = ProtocolRange(2, 2)
"""The protocols that this release supports."""

Sides = tuple[str, str]
"""What error messages call the dialer and the listener."""


def sides(purpose: object, role: object) -> Sides:
    """Return the names for a HELLO's purpose and role, which may be unknown if the protocol is newer."""
    if purpose == "enrol" and role in BOUGHT:
        return str(role), "hub"
    known = {"control": ("peer", "hub"), "publish": ("trainer", "hub"), "engine": ("engine's member", "engine's lead")}
    return known.get(purpose if isinstance(purpose, str) else "", ("dialing node", "answering node"))


def offered(hello: dict[str, Any]) -> ProtocolRange | None:
    """Return the dialer's protocols: ``least`` to ``greatest``, or only ``v`` if both are missing, as in protocol 1.
    Returns None if the HELLO is malformed.
    """
    least, greatest = hello.get("least", hello.get("v")), hello.get("greatest", hello.get("v"))
    if type(least) is int and type(greatest) is int and 0 <= least <= greatest <= MAX_PROTOCOL:
        return ProtocolRange(least, greatest)
    return None


def settle(dialer: ProtocolRange, listener: ProtocolRange, called: Sides) -> int:
    """Choose the connection's protocol, as the listener. Raises IncompatibleError."""
    if max(dialer.least, listener.least) <= (greatest := min(dialer.greatest, listener.greatest)):
        return greatest
    older = called[0] if dialer.greatest < listener.greatest else called[1]
    raise IncompatibleError(
        f"the {called[1]} (p2pcast {RELEASE}) speaks {listener}, the {called[0]} {dialer}: "
        f"update p2pcast on the {older}"
    )


def check_settled(protocol: int, own: ProtocolRange, before: int | None) -> None:
    """Check the listener's choice, as the dialer. ``before``: the choice in CHALLENGE. Raises RemoteError."""
    if protocol not in own or before not in (None, protocol):
        why = f"this side offered {own}" if before is None else f"settled on protocol {before} before"
        raise RemoteError(f"the other side settled on protocol {protocol}, but {why}")


def settled(named: int | None) -> int:
    """Return the protocol that a READY names, which is the first if it names none."""
    return _FIRST if named is None else named


def refusal(message: str, own: ProtocolRange, called: Sides) -> RefusedError:
    """Return the dialer's error for a refusal by the listener."""
    if (first := _FIRST_SAID.search(message)) is not None:
        return IncompatibleError(
            f"the {called[1]} speaks protocol {first[1]}, this {called[0]} (p2pcast {RELEASE}) {own}: "
            f"update p2pcast on the {called[1]}"
        )
    kind = IncompatibleError if _SPEAKS.search(message) else RefusedError
    return kind(f"the other side says: {message}")

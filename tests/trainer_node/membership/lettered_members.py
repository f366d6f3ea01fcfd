"""Members named by single letters, for tests of ``Membership``."""

from __future__ import annotations

from trainer_node.membership.membership import Membership
from trainer_node.membership.peer_record import PeerRecord

GBIT = 1e9


def peer(name: str, region: str = "") -> PeerRecord:
    return PeerRecord(name.encode().hex(), name, region, "host", 1, 0.0)


def ident(name: str) -> str:
    return name.encode().hex()


def joined(names: str, chains: int | None = 1, incarnation: int = 1) -> Membership:
    members = Membership(incarnation, GBIT, chains)
    for name in names:
        members.join(peer(name), 0.0)
    return members


def links(members: Membership) -> dict[str, str]:
    return {bytes.fromhex(p).decode(): bytes.fromhex(above).decode() for p, above in members.plan.parent.items()}

"""Every kind of connection: how often, and what it does. One table for daemons behind TLS, one for those in plain text."""

from __future__ import annotations

from netem.siege import knocking, talking, web
from netem.siege.assault import Act
from netem.siege.orders import Orders, Place

Kinds = dict[str, tuple[float, Act]]

TLS: Kinds = {
    "garbage": (4, knocking.garbage),
    "frames in plain text": (4, knocking.frames),
    "silence": (2, knocking.silent),
    "half a ClientHello": (4, knocking.half_greeting),
    "a ClientHello byte by byte": (2, knocking.slow_greeting),
    "a ClientHello alone": (3, knocking.greeting_alone),
    "a ClientHello, and gone": (14, knocking.greeting_and_gone),
    "a broken ClientHello": (5, knocking.broken_greeting),
    "old TLS": (2, knocking.old_tls),
    "a slow handshake": (2, knocking.slow_answer),
    "a forged certificate": (3, knocking.forged),
    "no certificate, silence": (1, knocking.stalled_answer),
    "no certificate, frames": (4, talking.before_hello),
    "no certificate, a HELLO": (4, talking.uncertified),
    "no certificate, a broken HELLO": (5, talking.broken_hello),
    "no certificate, a HELLO byte by byte": (1, talking.slow_hello),
    "no certificate, a wrong token": (5, talking.wrong_token),
    "no certificate, an oversized frame": (2, talking.oversized),
    "no certificate, records": (2, talking.strangers_records),
    "broken HTTP": (5, web.broken),
    "HTTP byte by byte": (2, web.slow),
    "buys a certificate": (1, talking.buyer),
    "stolen: a child": (10, talking.insider_data),
    "stolen: a peer": (6, talking.insider_control),
    "stolen: a parent": (2, talking.insider_parent),
    "stolen: what it is not for": (3, talking.impostor),
    "stolen: records": (3, talking.records),
    "joins and is gone": (1, talking.joined),
}
PLAIN: Kinds = {
    "garbage": (10, knocking.garbage),
    "frames before the handshake": (12, knocking.frames),
    "a broken HELLO": (15, talking.broken_hello),
    "a wrong token": (12, talking.wrong_token),
    "an oversized frame": (4, talking.oversized),
    "silence": (3, knocking.silent),
    "a HELLO byte by byte": (3, talking.slow_hello),
    "broken HTTP": (8, web.broken),
    "HTTP byte by byte": (3, web.slow),
    "a child with the token": (17, talking.insider_data),
    "a peer with the token": (11, talking.insider_control),
    "joins and is gone": (2, talking.joined),
}
TALKERS = {
    knocking.frames, talking.before_hello, talking.broken_hello, talking.wrong_token, talking.uncertified,
    talking.insider_data, talking.insider_control, talking.impostor,
}  # fmt: skip
"""Those that send as many frames as are ordered."""


def kinds(*, tls: bool) -> Kinds:
    return TLS if tls else PLAIN


def orders(
    daemons: list[Place], https: list[Place], token: str, connections: int, all_frames: int, at_once: int, seed: int, *, tls: bool
) -> Orders:
    """About ``all_frames`` in all."""
    table = kinds(tls=tls)
    talkers = sum(weight for weight, act in table.values() if act in TALKERS) / sum(weight for weight, _ in table.values())
    each = max(1, round(all_frames / (connections * talkers)))
    return Orders(daemons, https, token, connections, each, at_once, seed, tls)

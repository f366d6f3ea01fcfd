"""Every kind of attack connection with its weight: one table for daemons behind TLS, one for daemons in plain text.

``python -m tests.chaos.siege.attack_table`` reads ``SiegeSettings`` as JSON on its input, attacks, and writes a tally
to its output.
"""

from __future__ import annotations

import json
import sys

from p2pcast.process import event_loop
from tests.chaos.siege import outside_attacks, wire_attacks
from tests.chaos.siege.siege import Attack, Place, Siege, SiegeSettings

AttackTable = dict[str, tuple[float, Attack]]

TLS: AttackTable = {
    "garbage": (4, outside_attacks.garbage),
    "frames in plain text": (4, outside_attacks.frames),
    "silence": (2, outside_attacks.silent),
    "half a ClientHello": (4, outside_attacks.half_client_hello),
    "a ClientHello byte by byte": (2, outside_attacks.slow_client_hello),
    "a ClientHello alone": (3, outside_attacks.client_hello_alone),
    "a ClientHello, and gone": (14, outside_attacks.client_hello_and_gone),
    "a broken ClientHello": (5, outside_attacks.broken_client_hello),
    "old TLS": (2, outside_attacks.old_tls),
    "a slow handshake": (2, outside_attacks.slow_answer),
    "a forged certificate": (3, outside_attacks.forged),
    "no certificate, silence": (1, outside_attacks.stalled_answer),
    "no certificate, frames": (4, wire_attacks.before_hello),
    "no certificate, a HELLO": (4, wire_attacks.hello_without_certificate),
    "no certificate, a broken HELLO": (5, wire_attacks.broken_hello),
    "no certificate, a HELLO byte by byte": (1, wire_attacks.slow_hello),
    "no certificate, a wrong token": (5, wire_attacks.wrong_token),
    "no certificate, an oversized frame": (2, wire_attacks.oversized),
    "no certificate, records": (2, wire_attacks.records_without_certificate),
    "broken HTTP": (5, outside_attacks.broken_http),
    "HTTP byte by byte": (2, outside_attacks.slow_http),
    "buys a certificate": (1, wire_attacks.enrol_unknown_node),
    "stolen: a child": (10, wire_attacks.insider_data),
    "stolen: a peer": (6, wire_attacks.insider_control),
    "stolen: a parent": (2, wire_attacks.insider_parent),
    "stolen: what it is not for": (3, wire_attacks.impostor),
    "stolen: records": (3, wire_attacks.records),
    "joins and is gone": (1, wire_attacks.join_and_leave),
}
PLAIN: AttackTable = {
    "garbage": (10, outside_attacks.garbage),
    "frames before the handshake": (12, outside_attacks.frames),
    "a broken HELLO": (15, wire_attacks.broken_hello),
    "a wrong token": (12, wire_attacks.wrong_token),
    "an oversized frame": (4, wire_attacks.oversized),
    "silence": (3, outside_attacks.silent),
    "a HELLO byte by byte": (3, wire_attacks.slow_hello),
    "broken HTTP": (8, outside_attacks.broken_http),
    "HTTP byte by byte": (3, outside_attacks.slow_http),
    "a child with the token": (17, wire_attacks.insider_data),
    "a peer with the token": (11, wire_attacks.insider_control),
    "joins and is gone": (2, wire_attacks.join_and_leave),
}
FRAME_SENDERS = {
    outside_attacks.frames,
    wire_attacks.before_hello,
    wire_attacks.broken_hello,
    wire_attacks.wrong_token,
    wire_attacks.hello_without_certificate,
    wire_attacks.insider_data,
    wire_attacks.insider_control,
    wire_attacks.impostor,
}
"""The kinds that send the ordered number of frames."""


def kinds(*, tls: bool) -> AttackTable:
    return TLS if tls else PLAIN


def settings(
    daemons: list[Place],
    https: list[Place],
    token: str,
    connections: int,
    all_frames: int,
    at_once: int,
    seed: int,
    *,
    tls: bool,
) -> SiegeSettings:
    """Settings for about ``all_frames`` frames in total."""
    table = kinds(tls=tls)
    frame_senders = sum(weight for weight, act in table.values() if act in FRAME_SENDERS) / sum(
        weight for weight, _ in table.values()
    )
    each = max(1, round(all_frames / (connections * frame_senders)))
    return SiegeSettings(daemons, https, token, connections, each, at_once, seed, tls)


def main() -> None:
    given = SiegeSettings.parse(sys.stdin.read())
    print(json.dumps(event_loop.run(Siege(given, kinds(tls=given.tls)).run())))


if __name__ == "__main__":
    main()

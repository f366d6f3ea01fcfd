"""Attacks in p2pcast frames: by strangers, behind TLS or in plain text, and by attackers with a stolen token or peer
certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets

from p2pcast.ground.version import Version
from p2pcast.transport.enrolment import enrol
from p2pcast.trust.certificates import new_key
from p2pcast.trust.join_token import JoinToken
from p2pcast.trust.tls_contexts import first_contact
from p2pcast.wire import messages
from p2pcast.wire.connection import HEADER
from p2pcast.wire.messages import Type, encode
from tests.chaos.siege.siege import JOINED_S, Intruder, Siege
from tests.chaos.siege.tls_records import (
    ALERT,
    CHANGE_CIPHER_SPEC,
    DATA,
    HANDSHAKE,
    MOST_BYTES,
    WARNING,
    Sealer,
    handshake,
)

RECORDS = 2000
"""TLS records in one flood."""
ROLES = [
    ("control", "peer"),
    ("data", "child"),
    ("data", "parent"),
    ("publish", "rank"),
    ("engine", "member"),
    ("enrol", "peer"),
]

# -- attacks by strangers


async def before_hello(siege: Siege) -> None:
    """Send broken frames behind TLS, without a HELLO."""
    await siege.send_all(siege.broken(), siege.hub, first_contact())


async def broken_hello(siege: Siege) -> None:
    """Send a HELLO with one to five wrong bytes, followed by broken frames."""
    said = [
        siege.mutated(siege.hello(purpose="enrol", role="peer") if siege.settings.tls else siege.hello()),
        *siege.broken(),
    ]
    await (siege.send_all(said, siege.hub, first_contact()) if siege.settings.tls else siege.send_all(said))


async def wrong_token(siege: Siege) -> None:
    """Send a handshake without the secret, then continue as if it had been accepted."""
    token = JoinToken(siege.token.run, secrets.token_bytes(len(siege.token.secret)))
    # Behind TLS, use the id of an existing token, so that the handshake reaches its proofs.
    hello = siege.hello(purpose="enrol", role="peer") if siege.settings.tls else siege.hello(token)
    proof = encode(messages.Proof(secrets.token_bytes(32)))
    said = [hello, HEADER.pack(len(proof), Type.PROOF, 0, 0) + proof, *siege.broken()]
    await (siege.send_all(said, siege.hub, first_contact()) if siege.settings.tls else siege.send_all(said))


async def oversized(siege: Siege) -> None:
    """Send a frame header that announces 4 GiB, and as many bytes as the daemon accepts."""
    size = siege.draw.choice([(1 << 32) - 1, 1 << 31, 1 << 24])
    said = [HEADER.pack(size, siege.draw.choice(list(Type)), 0, 0), *([bytes(65536)] * 16)]
    await (siege.send_all(said, siege.hub, first_contact()) if siege.settings.tls else siege.send_all(said))


async def slow_hello(siege: Siege) -> None:
    """Send a HELLO byte by byte."""
    place, context = (siege.hub, first_contact()) if siege.settings.tls else (None, None)
    async with siege.connection(place, context) as (reader, writer):
        await siege.send_slowly(reader, writer, siege.hello(purpose="enrol", role="peer"))


async def hello_without_certificate(siege: Siege) -> None:
    """Send a HELLO without a certificate, as if there were one."""
    purpose, role = siege.draw.choice(ROLES[:-1])
    await siege.send_all([siege.hello(purpose=purpose, role=role), *siege.broken()], tls=first_contact())


async def records_without_certificate(siege: Siege) -> None:
    """Send an endless stream of meaningless TLS records, without a certificate."""
    async with siege.connection(siege.hub) as (reader, writer):
        sealer = await handshake(reader, writer, first_contact())
        writer.write(_flood(siege, sealer))
        await siege.read_to_end(reader, writer)


# -- attacks with a stolen certificate or token


async def insider_data(siege: Siege) -> None:
    """As a child, send frames that are broken or out of place."""
    await _inside(siege, "data", "child")


async def insider_parent(siege: Siege) -> None:
    """As a parent that no peer has asked to dial, send frames that are broken or out of place."""
    await _inside(siege, "data", "parent")


async def insider_control(siege: Siege) -> None:
    """As a peer on a control connection, send frames that are broken or out of place."""
    await _inside(siege, "control", "peer")


async def impostor(siege: Siege) -> None:
    """Use a stolen certificate for another node's name, or in the role of a trainer or group member."""
    node, context = siege.stolen_context()
    purpose, role = siege.draw.choice(ROLES)
    said = siege.hello(purpose=purpose, role=role, node=siege.draw.choice([node, secrets.token_bytes(16)]))
    await siege.send_all([said, *siege.broken()], tls=context)


async def records(siege: Siege) -> None:
    """Use a stolen certificate and a correct HELLO, then send an endless stream of meaningless TLS records."""
    node, context = siege.stolen_context()
    async with siege.connection() as (reader, writer):
        sealer = await handshake(reader, writer, context)
        writer.write(sealer.data(siege.hello(node=node)) + _flood(siege, sealer))
        await siege.read_to_end(reader, writer)


async def enrol_unknown_node(siege: Siege) -> None:
    """Enrol a certificate for a node that does not exist."""
    node = secrets.token_bytes(16)
    await enrol(*siege.hub, siege.token, node, f"nobody-{node.hex()[:6]}", "peer", new_key())


async def join_and_leave(siege: Siege) -> None:
    """Join correctly with an address on which no process listens, and disconnect a second later."""
    name = f"intruder-{siege.draw.randrange(1 << 30)}"
    join = messages.Join(name, "r", ("127.0.0.1", 9), held=Version(0, 3), engine=None)
    owner = Intruder()
    link = await siege.enter(owner, "control", "peer", siege.hub)
    link.send(join)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(JOINED_S):
            await owner.closed.wait()
    link.abort()


async def _inside(siege: Siege, purpose: str, role: str) -> None:
    owner = Intruder()
    # Behind TLS, only the hub answers control connections.
    place = siege.hub if purpose == "control" and siege.settings.tls else siege.any_daemon()
    link = await siege.enter(owner, purpose, role, place)
    try:
        half = siege.settings.frames // 2
        said = [*siege.out_of_place(half), *siege.broken(siege.settings.frames - half)]
        siege.draw.shuffle(said)
        link.stripes[0].write(b"".join(said))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JOINED_S):
                await owner.closed.wait()
    finally:
        link.abort()


def _flood(siege: Siege, sealer: Sealer) -> bytes:
    """Records of one kind behind a correct handshake: key updates, non-fatal alerts, empty records, or bytes that are
    no record. Key updates replace renegotiation, which TLS 1.3 does not have.
    """
    draw = siege.draw
    match draw.randrange(6):
        case 0 | 1 as asking:
            return b"".join(sealer.key_update(asking=bool(asking)) for _ in range(RECORDS))
        case 2:
            return b"".join(sealer.record(ALERT, WARNING) for _ in range(RECORDS))
        case 3:
            return b"".join(sealer.record(DATA, b"") for _ in range(RECORDS))
        case 4:
            return b"".join(
                sealer.record(draw.choice([CHANGE_CIPHER_SPEC, HANDSHAKE, 99]), draw.randbytes(9)) for _ in range(9)
            )
        case _:
            too_long = sealer.record(DATA, bytes(MOST_BYTES + 300))
            spoilt = bytearray(sealer.record(DATA, bytes(100)))
            spoilt[-1] ^= 1
            return draw.choice([too_long, bytes(spoilt), b"\x14\x03\x03\x00\x01\x01" * RECORDS])

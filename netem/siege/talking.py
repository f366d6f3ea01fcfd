"""What is said to daemons: by strangers, behind TLS or in plain text, and by one who has a token or a peer's certificate that was stolen."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

from netem.malformed import SAMPLES, mutated
from netem.siege.assault import JOINED_S, Assault, Intruder
from netem.siege.records import ALERT, CHANGE_CIPHER_SPEC, DATA, HANDSHAKE, MOST_BYTES, WARNING, Sealer, shake
from p2pcast.transport.enrol import enrol
from p2pcast.trust.certificates import new_key
from p2pcast.trust.contexts import first_contact
from p2pcast.wire.connection import HEADER
from p2pcast.wire.messages import Type, encode
from p2pcast.wire.token import Token

RECORDS = 2000
"""In a flood of them."""
ROLES = [("control", "peer"), ("data", "child"), ("data", "parent"), ("publish", "rank"), ("engine", "member"), ("enrol", "peer")]

# -- by strangers


async def before_hello(siege: Assault) -> None:
    """Broken frames behind TLS, without a HELLO."""
    await siege.say(siege.broken(), siege.hub, first_contact())


async def broken_hello(siege: Assault) -> None:
    """A HELLO with a byte or five wrong, and broken frames behind it."""
    said = [
        mutated(siege.draw, siege.hello(purpose="enrol", role="peer") if siege.orders.tls else siege.hello()),
        *siege.broken(),
    ]
    await (siege.say(said, siege.hub, first_contact()) if siege.orders.tls else siege.say(said))


async def wrong_token(siege: Assault) -> None:
    """A handshake without the secret, and on as if it had been let in."""
    token = Token(siege.token.run, secrets.token_bytes(len(siege.token.secret)))
    # Behind TLS the ident of a token that there is: then it comes to proofs.
    hello = siege.hello(purpose="enrol", role="peer") if siege.orders.tls else siege.hello(token)
    proof = encode(Type.PROOF, {"proof": secrets.token_bytes(32)})
    said = [hello, HEADER.pack(len(proof), Type.PROOF, 0, 0) + proof, *siege.broken()]
    await (siege.say(said, siege.hub, first_contact()) if siege.orders.tls else siege.say(said))


async def oversized(siege: Assault) -> None:
    """A frame that promises 4 GiB, and as many bytes as are taken."""
    size = siege.draw.choice([(1 << 32) - 1, 1 << 31, 1 << 24])
    said = [HEADER.pack(size, siege.draw.choice(list(Type)), 0, 0), *([bytes(65536)] * 16)]
    await (siege.say(said, siege.hub, first_contact()) if siege.orders.tls else siege.say(said))


async def slow_hello(siege: Assault) -> None:
    """A HELLO byte by byte."""
    place, context = (siege.hub, first_contact()) if siege.orders.tls else (None, None)
    async with siege.connected(place, context) as (reader, writer):
        await siege.drip(reader, writer, siege.hello(purpose="enrol", role="peer"))


async def uncertified(siege: Assault) -> None:
    """No certificate, and a HELLO as if there were one."""
    purpose, role = siege.draw.choice(ROLES[:-1])
    await siege.say([siege.hello(purpose=purpose, role=role), *siege.broken()], tls=first_contact())


async def strangers_records(siege: Assault) -> None:
    """No certificate, and TLS records that mean nothing, without end."""
    async with siege.connected(siege.hub) as (reader, writer):
        sealer = await shake(reader, writer, first_contact())
        writer.write(_flood(siege, sealer))
        await siege.heard(reader, writer)


# -- from inside


async def insider_data(siege: Assault) -> None:
    """A child that sends frames which are broken, or make no sense."""
    await _inside(siege, "data", "child")


async def insider_parent(siege: Assault) -> None:
    """A parent that nobody has called, which does."""
    await _inside(siege, "data", "parent")


async def insider_control(siege: Assault) -> None:
    """A peer that does."""
    await _inside(siege, "control", "peer")


async def impostor(siege: Assault) -> None:
    """A stolen certificate, for what it is not good for: another node's name, a trainer's or a member's work."""
    node, context = siege.thief_context()
    purpose, role = siege.draw.choice(ROLES)
    said = siege.hello(purpose=purpose, role=role, node=siege.draw.choice([node, secrets.token_bytes(16)]))
    await siege.say([said, *siege.broken()], tls=context)


async def records(siege: Assault) -> None:
    """A stolen certificate, a HELLO in order, and TLS records that mean nothing, without end."""
    node, context = siege.thief_context()
    async with siege.connected() as (reader, writer):
        sealer = await shake(reader, writer, context)
        writer.write(sealer.data(siege.hello(node=node)) + _flood(siege, sealer))
        await siege.heard(reader, writer)


async def buyer(siege: Assault) -> None:
    """A certificate for somebody who does not exist."""
    node = secrets.token_bytes(16)
    await enrol(*siege.hub, siege.token, node, f"nobody-{node.hex()[:6]}", "peer", new_key())


async def joined(siege: Assault) -> None:
    """A peer that joins in order, at an address where nobody listens, and is gone a second later."""
    sample = next(body for kind, body in SAMPLES if kind is Type.JOIN)
    body = sample | {"name": f"intruder-{siege.draw.randrange(1 << 30)}", "listen": ["127.0.0.1", 9], "engine": None}
    owner = Intruder()
    link = await siege.enter(owner, "control", "peer", siege.hub)
    link.send(Type.JOIN, body)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(JOINED_S):
            await owner.closed.wait()
    link.abort()


async def _inside(siege: Assault, purpose: str, role: str) -> None:
    owner = Intruder()
    # Behind TLS nobody but the hub answers to control.
    place = siege.hub if purpose == "control" and siege.orders.tls else siege.somebody()
    link = await siege.enter(owner, purpose, role, place)
    try:
        half = siege.orders.frames // 2
        said = [*siege.senseless(half), *siege.broken(siege.orders.frames - half)]
        siege.draw.shuffle(said)
        link.stripes[0].write(b"".join(said))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JOINED_S):
                await owner.closed.wait()
    finally:
        link.abort()


def _flood(siege: Assault, sealer: Sealer) -> bytes:
    """Records of one kind, behind an honest beginning: in place of TLS's renegotiation, which 1.3 has no more, its key updates; alerts that end nothing; nothing at all; and what is no record."""
    draw = siege.draw
    match draw.randrange(6):
        case 0 | 1 as asking:
            return b"".join(sealer.key_update(asking=bool(asking)) for _ in range(RECORDS))
        case 2:
            return b"".join(sealer.record(ALERT, WARNING) for _ in range(RECORDS))
        case 3:
            return b"".join(sealer.record(DATA, b"") for _ in range(RECORDS))
        case 4:
            return b"".join(sealer.record(draw.choice([CHANGE_CIPHER_SPEC, HANDSHAKE, 99]), draw.randbytes(9)) for _ in range(9))
        case _:
            too_long = sealer.record(DATA, bytes(MOST_BYTES + 300))
            spoilt = bytearray(sealer.record(DATA, bytes(100)))
            spoilt[-1] ^= 1
            return draw.choice([too_long, bytes(spoilt), b"\x14\x03\x03\x00\x01\x01" * RECORDS])

"""Those who should not get in, or not far: with the token, with certificates, and with what they could make of them."""

from __future__ import annotations

import asyncio

from p2pcast.transport.dial import dial
from p2pcast.transport.enrol import enrol
from p2pcast.transport.link import QuietOwner
from p2pcast.trust.certificates import new_key
from p2pcast.trust.contexts import Tls
from p2pcast.trust.credentials import Credentials
from p2pcast.wire.connection import Identity
from p2pcast.wire.messages import Type
from p2pcast.wire.token import Token

NODE = b"n" * 16


def token_of(swarm) -> Token:
    return Token.parse((swarm.folder / "token").read_text())


class Nobody(QuietOwner):
    """Owns links of those who should not have one; keeps what came, and why it ended."""

    def __init__(self):
        self.said = []
        self.over = asyncio.get_running_loop().create_future()

    def on_link_event(self, link, stripe, event):
        self.said.append(event)

    def on_link_closed(self, link, error):
        if not self.over.done():
            self.over.set_result(error)


async def bought(swarm, *, node=NODE, role="peer", token=None, name="x", key=None) -> Credentials:
    return await enrol(*swarm.address, token or token_of(swarm), node, name, role, key or new_key())


async def knock(swarm, papers: Credentials, *, at=None, owner=None, node=None, **options):
    given = {"purpose": "data", "role": "child"} | options
    identity = Identity(node or papers.who.node, "x", Token(papers.who.run, bytes(20)))
    return await dial(owner or Nobody(), *(at or swarm.address), identity, tls=Tls(papers).client, **given)


def at(peer) -> tuple[str, int]:
    return ("127.0.0.1", peer.listener.address[1])


async def joined(swarm, papers: Credentials, name: str = "x", owner=None, **extra):
    """A control connection that has said JOIN."""
    link = await knock(swarm, papers, purpose="control", role="peer", owner=owner)
    link.send(Type.JOIN, {"name": name, "region": "", "listen": ["", 1], "held": None, "engine": None} | extra)
    return link

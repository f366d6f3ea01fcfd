"""Clients for attack tests: strangers, holders of a token, and holders of a certificate."""

from __future__ import annotations

import asyncio

from p2pcast.transport.dial import dial
from p2pcast.transport.enrolment import enrol
from p2pcast.transport.link import QuietOwner
from p2pcast.transport.node_certificate import NodeCertificate
from p2pcast.trust.certificates import new_key
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.dial_permissions import Role
from p2pcast.trust.join_token import JoinToken
from p2pcast.trust.tls_contexts import Tls
from p2pcast.wire.connection import Identity
from p2pcast.wire.messages import Join

NODE = b"n" * 16


def token_of(swarm) -> JoinToken:
    return JoinToken.parse((swarm.folder / "token").read_text())


class Nobody(QuietOwner):
    """Owns links of strangers that should get none; keeps their messages, and why each link ended."""

    def __init__(self):
        self.said = []
        self.over = asyncio.get_running_loop().create_future()

    def on_link_event(self, link, stripe, event):
        self.said.append(event)

    def on_link_closed(self, link, error):
        if not self.over.done():
            self.over.set_result(error)


async def bought(swarm, *, node=NODE, role="peer", token=None, name="x", key=None) -> Credentials:
    host, port = swarm.address
    return await enrol(host, port, token or token_of(swarm), node, name, role, key or new_key())


async def knock(swarm, papers: Credentials, *, at=None, owner=None, node=None, **options):
    given = {"purpose": "data", "role": "child"} | options
    identity = Identity(node or papers.who.node, "x", JoinToken(papers.who.run, bytes(20)))
    return await dial(owner or Nobody(), *(at or swarm.address), identity, tls=Tls(papers).client, **given)


def at(peer) -> tuple[str, int]:
    return ("127.0.0.1", peer.startup.listener.address[1])


async def joined(swarm, papers: Credentials, name: str = "x", owner=None, **extra):
    """A control connection that has said JOIN."""
    link = await knock(swarm, papers, purpose="control", role="peer", owner=owner)
    link.send(Join(**{"name": name, "region": "", "listen": ("", 1), "held": None, "engine": None} | extra))
    return link


async def token_for(hub, role: str, **options) -> JoinToken:
    made = await hub.state.admission.commands.create({"role": role} | options)
    return JoinToken.parse(made["token"])


def node(swarm, token: JoinToken | None, role: Role = "worker", folder: str = "w") -> NodeCertificate:
    state = swarm.folder / folder
    state.mkdir(exist_ok=True, mode=0o700)
    return NodeCertificate(state, role, folder, swarm.address, token, lambda low, high: low)


async def working(swarm, token: JoinToken, role: Role = "worker", folder: str = "w") -> NodeCertificate:
    made = node(swarm, token, role, folder)
    await made.ready()
    return made

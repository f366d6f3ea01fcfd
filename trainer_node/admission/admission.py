"""Admits nodes to the run: certificates, names, and the hub's own credentials.

Guarantees:

- A certificate is sent only once its grant is on disk.
- Evictions that this hub has lost are restored from its peers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from p2pcast.artifact.run_key import RunKey
from p2pcast.files.atomic_files import atomic_write
from p2pcast.ground import limits
from p2pcast.ground.addresses import is_loopback
from p2pcast.ground.errors import LocalError, P2PCastError, RefusedError, RemoteError, RetryableError
from p2pcast.process.events import Events
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.transport.stripe import HANDSHAKE_S, Stripe
from p2pcast.trust import bearer_tokens
from p2pcast.trust.certificate_authority import Authority
from p2pcast.trust.certificates import held_key, key_print, load, new_key, requested_key, shown_time, valid_at
from p2pcast.trust.clock_watch import Jump
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.dial_permissions import Certified
from p2pcast.trust.join_token import JoinToken
from p2pcast.trust.tls_contexts import Tls
from p2pcast.wire import messages
from p2pcast.wire.connection import Event, Identity, Message
from trainer_node.admission.own_token import OwnToken
from trainer_node.admission.trust_commands import TrustCommands
from trainer_node.admission.trust_files import secret_of
from trainer_node.admission.trust_state import LEDGER, InThread, TrustState
from trainer_node.hub_config import HubConfig
from trainer_node.membership.peer_session import PeerSession

logger = logging.getLogger("p2pcast.hub")

SEEN_S = 3600.0
"""Interval in seconds at which the connected peers are recorded on disk. A restarted hub knows to this precision how
long a node has been away.
"""
RETRY_S = 60.0
"""How long to wait before a file that could not be written is retried, in seconds."""


class Background(Protocol):
    """Starts a background task. ``vital``: whether its failure concerns the hub, and not just one connection."""

    def __call__(self, work: Coroutine[Any, Any, None], name: str, *, vital: bool = True) -> None: ...


class Admission:
    """``identity``: for the hub's listener. ``tls``: None for plain text. ``bearer``: the HTTP API's bearer token."""

    def __init__(
        self,
        config: HubConfig,
        key: RunKey,
        node: bytes,
        events: Events,
        *,
        is_joined: Callable[[str], bool],
        later: Background,
        in_thread: InThread,
    ) -> None:
        """``key``: the run's key. ``is_joined``: whether a node, in hex, has a session. ``in_thread`` runs a blocking
        call. Raises LocalError.
        """
        folder, plaintext = config.state, config.plaintext
        self._node = node
        self._lifetime_s = config.certificate_s
        self._events = events
        self._is_joined = is_joined
        self._later = later
        self._entering: dict[Link, None] = {}
        self._saving = False
        self.trust = TrustState(folder, key, in_thread)
        self.trust.jumped.add(self._note_jump)
        self._seen_at = self._maintain_at = now = self.trust.now()
        self.tls: Tls | None = None
        fingerprint = None
        if not plaintext:
            self._authority = Authority.load_or_create(folder / "authority.pem", self.trust.run, now)
            fingerprint = self._authority.fingerprint
            self._credentials = self._own_credentials(now)
            self.tls = Tls(self._credentials, strangers=True)
        self.own_token = OwnToken(self.trust, config, fingerprint, in_thread, now)
        self.commands = TrustCommands(self.trust, self.own_token, events, node, fingerprint)
        secret = self.own_token.token.secret
        self.bearer = bearer_tokens.of_run(secret) if plaintext else bearer_tokens.text(secret_of(folder / "http.key"))
        atomic_write(folder / bearer_tokens.FILE, f"{self.bearer}\n".encode(), 0o600)
        self.identity = Identity(
            node, "hub", JoinToken(self.trust.run, secret), self.trust.evicted, None if plaintext else self
        )

    @property
    def token(self) -> JoinToken:
        """The hub's own join token."""
        return self.own_token.token

    @property
    def evicted(self) -> set[bytes]:
        return self.trust.evicted

    # -- Gate

    @property
    def leaf(self) -> bytes:
        return self._credentials.certificate

    @property
    def authority(self) -> bytes:
        return self._authority.certificate

    def certificate_until(self, ident: str) -> float | None:
        """When a node's newest certificate expires, in Unix seconds; None over plain text, or if it has none."""
        holder = self.trust.ledger.holders.get(ident)
        return None if self.tls is None or holder is None else holder.until

    def secret(self, ident: bytes) -> bytes:
        return self.trust.ledger.secret(ident)

    # -- certificates

    def accept(self, link: Link, hello: messages.Hello) -> None:
        """Take over the first connection of a node that has proved to have a token."""
        if len(self._entering) >= limits.MAX_HANDSHAKES:
            next(iter(self._entering)).abort(RetryableError("too many nodes join at once"))
        self._entering[link] = None
        link.owner = EnrolmentLink(self, hello)
        asyncio.get_running_loop().call_later(HANDSHAKE_S, link.close)

    def on_entering_closed(self, link: Link) -> None:
        self._entering.pop(link, None)

    def enrol_later(self, link: Link, hello: messages.Hello, request: bytes) -> None:
        self._later(self.enrol(link, hello, request), f"enrol {link.name}", vital=False)

    async def enrol(self, link: Link, hello: messages.Hello, request: bytes) -> None:
        """Issue a certificate to a node that joined with a token."""
        local = is_loopback(link.remote_host)

        def grant(key: str, now: float, until: float) -> None:
            self.trust.ledger.admit(hello.token, link.remote, hello.role, key, hello.name, now, until, local=local)

        if await self._issue(link, hello.role, request, grant):
            logger.info("issued a certificate to %s %s at %s", hello.role, hello.name, link.remote_host)

    def renew_later(self, session: PeerSession, request: bytes) -> None:
        async def renewed() -> None:
            try:
                await self.renew(session.link, request)
            finally:
                session.renewed()

        self._later(renewed(), f"renew {session.link.name}", vital=False)

    async def renew(self, link: Link, request: bytes) -> None:
        """Issue the next certificate to a joined peer."""
        if self.tls is None:
            link.close(RemoteError("links are not encrypted here: there are no certificates"))
            return

        def grant(key: str, now: float, until: float) -> None:
            self.trust.ledger.renew(link.remote, "peer", key, now, until)

        await self._issue(link, "peer", request, grant)

    async def _issue(self, link: Link, role: str, request: bytes, grant: Callable[[str, float, float], None]) -> bool:
        try:
            key = requested_key(request)
            if link.remote == self._node:
                raise RefusedError("that is the hub's own name")
            async with self.trust.changing:
                now = self.trust.now()
                grant(key_print(key), now, now + self._lifetime_s)
                await self.trust.save()
            issued = self._authority.issue(key, Certified(self.trust.run, link.remote, role), now, self._lifetime_s)
            link.send(messages.Issued(issued))
        except P2PCastError as error:
            link.close(error)
            if isinstance(error, LocalError):
                logger.warning("no certificate for %s: %s", link.name, error)
            return False
        except Exception:
            link.close(LocalError("the hub failed to issue a certificate; see its log"))
            raise
        return True

    def _own_credentials(self, now: float) -> Credentials:
        """Make the hub's credentials. They are new in each process, because no other process needs them."""
        key, holder = new_key(), Certified(self.trust.run, self._node, "hub")
        issued = self._authority.issue(key.public_key(), holder, now, self._lifetime_s)
        return Credentials(key, issued, self._authority.certificate, now)

    # -- connected peers

    def admit(self, session: PeerSession, name: str) -> str:
        """Return the name under which a peer that asks for ``name`` is known. Raises RefusedError."""
        link, ledger, now = session.link, self.trust.ledger, self.trust.now()
        if self.tls is None:
            news = ledger.adopt(link.remote, "", name, now, now)
        elif (certificate := link.certificate) is None:
            raise RefusedError("this connection shows no certificate")
        else:
            key, until = key_print(held_key(certificate)), load(certificate).not_valid_after_utc.timestamp()
            news = ledger.adopt(link.remote, key, name, now, until)
            if news:
                logger.info(
                    "%s has a certificate of this run that was missing from %s, and is now recorded there", name, LEDGER
                )
            news |= ledger.came_with(link.remote, session.token)
        before = ledger.holders[link.remote.hex()].called
        called = ledger.call(link.remote, name, now, self._is_joined)
        if called != name:
            logger.warning(
                "another node has the name %s: this peer is called %s. If the other node is gone for good,"
                " `p2pcast evict %s` frees the name",
                name, called, ledger.find(name)[0],
            )  # fmt: skip
        if news or called != before:
            self._save_later()
        return called

    def bearer_of(self, node: bytes) -> str:
        """The bearer token of a peer's HTTP API."""
        return bearer_tokens.of_node(self.bearer, node)

    def evictions(self) -> list[messages.Evicted]:
        """The EVICTED messages to send to a peer that has joined."""
        nodes, signed = sorted(self.evicted), self.trust.evictions.packed()
        parts = [signed[at : at + limits.MAX_STATEMENTS] for at in range(0, len(signed), limits.MAX_STATEMENTS)] or [[]]
        return [messages.Evicted(nodes, part) for part in parts]

    def learn_evictions(self, signed: Sequence[bytes]) -> None:
        """Accept evictions that a peer knows and this hub has lost. Raises IntegrityError for a forged statement."""
        news = self.trust.accept(signed)
        if not news:
            return
        for statement in news:
            node = statement.node.hex()
            known = self.trust.ledger.holders.get(node)
            logger.warning(
                "this hub had lost a statement, which a peer has brought back: node %s is %s",
                node,
                "evicted" if statement.evicted else "not evicted",
            )
            name = node if known is None else known.called or known.name
            self._events.emit("evicted", peer=name, node=node, undone=not statement.evicted)
        self.trust.enforce([statement.packed for statement in news])
        self._save_later()
        self._maintain_at = 0.0

    def healthy(self) -> tuple[bool, str]:
        """Whether nodes can connect, and if not, why: the hub's certificate may not be valid by its clock."""
        if self.tls is None or (self._credentials.in_force(now := self.trust.now()) and valid_at(self.authority, now)):
            return True, ""
        return (
            False,
            "by this machine's clock the hub's certificate or the run's authority is not in force: set the clock",
        )

    def clock_trouble(self) -> str | None:
        """Why no record is forgotten by age at present, or None."""
        if self.trust.clock.settled:
            return None
        return (
            f"this machine's clock has jumped, and now says {shown_time(self.trust.now())}: set it (NTP) if that is"
            " wrong; no admission is forgotten by age until it has run for a day"
        )

    # -- periodic work

    def _note_jump(self, jump: Jump) -> None:
        logger.warning(
            "this machine's clock has jumped from %s to %s: set it (NTP) if that is wrong",
            shown_time(jump.expected), shown_time(jump.shown),
        )  # fmt: skip
        self._events.emit("clock_jumped", expected=round(jump.expected, 3), shown=round(jump.shown, 3))

    def beat(self) -> None:
        """Called every second: renew the hub's own certificate and token, and record the connected peers."""
        now = self.trust.now()
        if self.tls is not None and self._credentials.due(now):
            self._credentials = self._own_credentials(now)
            self.tls.use(self._credentials)
        due = self.own_token.stale or self.own_token.is_due(now)
        if now >= self._maintain_at and (due or self.trust.evictions.pending):
            self._maintain_at = now + RETRY_S
            self._later(self._maintain(), "token")
        if now >= self._seen_at + SEEN_S:
            self._seen_at = now
            for node in self.trust.ledger.holders:
                if self._is_joined(node):
                    self.trust.ledger.saw(node, now)
            self._save_later()

    async def _maintain(self) -> None:
        """Make the hub's next token if it is due, and retry writes that failed."""
        async with self.trust.changing:
            now = self.trust.now()
            try:
                if self.own_token.is_due(now):
                    await self.own_token.replace(now)
                await self.trust.save()
                if self.own_token.stale:
                    await self.own_token.write()
                    logger.info("a fresh token is in the token file")
            except LocalError as error:
                logger.warning("tokens and evictions could not be written to disk: %s", error)

    def _save_later(self) -> None:
        """Schedule a write that includes all changes made before it starts."""
        if not self._saving:
            self._saving = True
            self._later(self._save(), "trust")

    async def _save(self) -> None:
        async with self.trust.changing:
            self._saving = False
            try:
                await self.trust.save()
            except LocalError as error:
                logger.warning("names and evictions could not be written to disk: %s", error)

    def close(self) -> None:
        self.trust.close()


class EnrolmentLink(QuietOwner):
    """Owns a first connection, which may request one certificate."""

    def __init__(self, admission: Admission, hello: messages.Hello) -> None:
        self._admission = admission
        self._hello = hello
        self._requested = False

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None:
        if not isinstance(event, Message) or not isinstance(event.body, messages.Enrol):
            return
        if self._requested:
            link.close(RemoteError("one connection, one certificate"))
            return
        self._requested = True
        self._admission.enrol_later(link, self._hello, event.body.request)

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        self._admission.on_entering_closed(link)

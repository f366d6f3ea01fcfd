"""Whom the hub admits: join tokens, certificates, evictions; the hub's own papers.

Promises: what a token has bought is on disk before a certificate leaves; whoever is evicted is cut off before the call returns, here and in what peers are told, and stays out across restarts;
secrets lie in files of mode 0600 and leave only in the answer to whoever makes a token on this machine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

from p2pcast import limits
from p2pcast.addresses import is_loopback
from p2pcast.errors import LocalError, P2PCastError, RefusedError, RemoteError, RetryableError, UsageError
from p2pcast.store.files import atomic_write, explained
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.transport.stripe import HANDSHAKE_S, Stripe
from p2pcast.trust import bearer
from p2pcast.trust.authority import Authority
from p2pcast.trust.certificates import key_print, new_key, requested_key
from p2pcast.trust.contexts import Tls
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.files import check_private
from p2pcast.trust.ledger import Ledger
from p2pcast.trust.roles import Certified
from p2pcast.wire.connection import Event, Identity, Message
from p2pcast.wire.messages import Body, Type
from p2pcast.wire.token import SECRET_BYTES, Token

logger = logging.getLogger("p2pcast.hub")

Document = dict[str, Any]
DAY_S = 86400.0
LIFETIME_S = 14 * DAY_S
"""Of a certificate. Renewed after a third, so a hub may be away for nine days before anybody has to join anew."""
DEFAULT_TTL_S = DAY_S
"""Of a token that somebody makes for others."""


class AdmissionOwner(Protocol):
    async def blocking(self, work: Callable[..., Any], *args: Any) -> Any:
        """Off the loop."""

    def later(self, work: Coroutine[Any, Any, None], name: str, *, vital: bool = True) -> None: ...
    def named(self, peer: str) -> tuple[str, str] | None:
        """Node (hexadecimal) and name of a connected peer, by either. Raises RefusedError when several go by the name."""

    def cut(self, nodes: frozenset[bytes]) -> None:
        """Close what connects to these nodes, and tell all peers who is evicted."""

    def token_changed(self) -> None: ...
    def told(self, kind: str, **facts: Any) -> None:
        """An event."""


class Admission:
    """``identity``: for the hub's listener; ``tls`` None: plain text; ``token``: the hub's own."""

    def __init__(
        self, owner: AdmissionOwner, state: Path, run: bytes, node: bytes, *, plaintext: bool, lifetime_s: float
    ) -> None:
        """Raises LocalError."""
        self._owner = owner
        self._state = state
        self._run = run
        self._node = node
        self._lifetime_s = lifetime_s
        self._changing = asyncio.Lock()
        self._entering: dict[Link, None] = {}
        self.evicted: set[bytes] = set()
        self._ledger = self._read()
        self.evicted.update(bytes.fromhex(node) for node in self._ledger.evicted)
        secret = self._secret(state / "token.key")
        self.tls: Tls | None = None
        if plaintext:
            self.token = Token(run, secret)
            self.bearer = bearer.of_run(secret)
        else:
            now = time.time()
            self._authority = Authority.load_or_create(state / "authority.pem", run, now)
            self._papers = self._own_papers(now)
            self.tls = Tls(self._papers, strangers=True)
            self.token = self._own_token(secret, now)
            self.bearer = bearer.text(self._secret(state / "http.key"))
        atomic_write(state / bearer.FILE, f"{self.bearer}\n".encode(), 0o600)
        self.identity = Identity(node, "hub", Token(run, self.token.secret), self.evicted, None if plaintext else self)

    # -- Gate

    @property
    def leaf(self) -> bytes:
        return self._papers.certificate

    @property
    def authority(self) -> bytes:
        return self._authority.certificate

    def secret(self, ident: bytes) -> bytes:
        return self._ledger.secret(ident, time.time())

    # -- certificates

    def accept(self, link: Link, hello: Body) -> None:
        """A first connection, which has proved a token."""
        if len(self._entering) >= limits.MAX_HANDSHAKES:
            next(iter(self._entering)).abort(RetryableError("too many nodes join at once"))
        self._entering[link] = None
        link.owner = _Entering(self, hello)
        asyncio.get_running_loop().call_later(HANDSHAKE_S, link.close)

    def left(self, link: Link) -> None:
        self._entering.pop(link, None)

    async def enrol(self, link: Link, hello: Body, request: bytes) -> None:
        """The certificate that a token buys."""
        local = is_loopback(link.remote_host)

        def admit(key: str, now: float, until: float) -> None:
            self._ledger.admit(hello["token"], link.remote, hello["role"], key, hello["name"], now, until, local=local)

        await self._issue(link, hello["role"], request, admit)
        logger.info("issued a certificate to %s %s at %s", hello["role"], hello["name"], link.remote_host)

    async def renew(self, link: Link, request: bytes) -> None:
        """The next certificate of a peer that has joined with its last."""
        if self.tls is None:
            link.close(RemoteError("links are not encrypted here: there are no certificates"))
            return

        def admit(key: str, now: float, until: float) -> None:
            self._ledger.renew(link.remote, "peer", key, now, until)

        await self._issue(link, "peer", request, admit)

    async def _issue(self, link: Link, role: str, request: bytes, admit: Callable[[str, float, float], None]) -> None:
        try:
            key = requested_key(request)
            if link.remote == self._node:
                raise RefusedError("that is the hub's own name")
            async with self._changing:
                now = time.time()
                admit(key_print(key), now, now + self._lifetime_s)
                await self._save()
            issued = self._authority.issue(key, Certified(self._run, link.remote, role), now, self._lifetime_s)
            link.send(Type.ISSUED, {"certificate": issued})
        except P2PCastError as error:
            link.close(error)
            if isinstance(error, LocalError):
                logger.warning("no certificate for %s: %s", link.name, error)
        except Exception:
            link.close(LocalError("the hub failed to issue a certificate; see its log"))
            raise

    def later(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._owner.later(work, name, vital=False)

    def beat(self) -> None:
        """Every second: the hub's own papers."""
        now = time.time()
        if self.tls is not None and self._papers.due(now):
            self._papers = self._own_papers(now)
            self.tls.use(self._papers)

    def bearer_of(self, node: bytes) -> str:
        return bearer.of_node(self.bearer, node)

    def _own_papers(self, now: float) -> Credentials:
        """Made anew by each process: nobody else needs to know them."""
        key, who = new_key(), Certified(self._run, self._node, "hub")
        return Credentials(
            key, self._authority.issue(key.public_key(), who, now, self._lifetime_s), self._authority.certificate, now
        )

    # -- commands

    @property
    def commands(self) -> dict[str, Callable[[Document], Coroutine[Any, Any, Document]]]:
        return {
            "evict": self._evict,
            "token/create": self._create,
            "token/list": self._list,
            "token/revoke": self._revoke,
        }

    async def _evict(self, body: Document) -> Document:
        """``{"peer": node or name, "undo": bool, "keep_token": bool}``."""
        peer = body.get("peer")
        if not isinstance(peer, str) or not peer:
            raise UsageError('say whom: {"peer": a node\'s id or name}')
        async with self._changing:
            if body.get("undo") is True:
                node = self._ledger.readmit(peer)
                await self._save()
                self._spread()
                self._owner.told("evicted", peer=peer, node=node, undone=True)
                return {"peer": peer, "node": node, "evicted": False}
            node, name = self._owner.named(peer) or (found := self._ledger.find(peer), self._ledger.holders[found].name)
            bought = self._ledger.evict(node, name)
            self._spread()
            token = None
            if bought is not None and bought in self._ledger.grants and body.get("keep_token") is not True:
                token = self._ledger.revoke(bought)
                self._replace_own_token()
            await self._save()
        self._owner.told("evicted", peer=name, node=node, undone=False)
        logger.warning("evicted %s (%s)%s", name, node, f", revoked token {token}" if token else "")
        note = None
        if self.tls is None:
            note = "links are plain text: whoever has the token can come back under another id. Start a new run to keep it out"
        return {"peer": name, "node": node, "evicted": True, "revoked_token": token, "note": note}

    async def _create(self, body: Document) -> Document:
        """``{"role": "peer" | "trainer", "ttl_s": seconds or null, "uses": count or null}``."""
        self._require_tls()
        ttl_s, uses = body.get("ttl_s", DEFAULT_TTL_S), body.get("uses")
        if ttl_s is not None and (isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 < ttl_s <= 3650 * DAY_S):
            raise UsageError("ttl_s: a number of seconds, ten years at most, or null")
        if uses is not None and (type(uses) is not int or not 1 <= uses <= limits.MAX_HOLDERS):
            raise UsageError(f"uses: a count from 1 to {limits.MAX_HOLDERS}, or null")
        secret = secrets.token_bytes(SECRET_BYTES)
        async with self._changing:
            ident = self._ledger.grant(secret, str(body.get("role", "peer")), time.time(), ttl_s=ttl_s, uses=uses)
            await self._save()
        return {"id": ident, "token": str(Token(self._run, secret, self._authority.fingerprint))}

    async def _list(self, body: Document) -> Document:
        self._require_tls()
        return {"tokens": self._ledger.rows(time.time())}

    async def _revoke(self, body: Document) -> Document:
        """``{"id": its beginning will do}``. What it has bought stays in force."""
        self._require_tls()
        async with self._changing:
            ident = self._ledger.revoke(str(body.get("id", "")))
            self._replace_own_token()
            await self._save()
        return {"id": ident, "revoked": True}

    def _require_tls(self) -> None:
        if self.tls is None:
            raise UsageError("with --plaintext there is one token, which is everybody's: start the hub without it")

    def _spread(self) -> None:
        self.evicted.clear()
        self.evicted.update(bytes.fromhex(node) for node in self._ledger.evicted)
        self._owner.cut(frozenset(self.evicted))

    # -- on disk

    def _read(self) -> Ledger:
        path = self._state / "trust.json"
        if not path.exists():
            return Ledger()
        check_private(path)
        try:
            with explained("read", path):
                return Ledger.of(json.loads(path.read_text()))
        except (ValueError, TypeError, LocalError) as error:
            raise LocalError(
                f"{path} is damaged: restore it from a copy, or remove it (evictions and tokens are lost then)"
            ) from error

    async def _save(self) -> None:
        text = json.dumps(self._ledger.document, sort_keys=True).encode()
        await self._owner.blocking(atomic_write, self._state / "trust.json", text, 0o600)

    def _own_token(self, secret: bytes, now: float) -> Token:
        """The one of ``token.key``; another where that was revoked."""
        ident = Token(self._run, secret).ident.hex()
        known = self._ledger.grants.get(ident)
        if known is not None and known.revoked:
            secret = self._new_secret()
            known = None
        if known is None:
            self._ledger.grant(secret, "peer", now, own=True)
            atomic_write(self._state / "trust.json", json.dumps(self._ledger.document).encode(), 0o600)
        return Token(self._run, secret, self._authority.fingerprint)

    def _replace_own_token(self) -> None:
        """Where it was revoked."""
        if self._ledger.own() is None:
            secret = self._new_secret()
            self._ledger.grant(secret, "peer", time.time(), own=True)
            self.token = Token(self._run, secret, self._authority.fingerprint)
            self._owner.token_changed()

    def _new_secret(self) -> bytes:
        secret = secrets.token_bytes(SECRET_BYTES)
        atomic_write(self._state / "token.key", secret, 0o600)
        return secret

    @staticmethod
    def _secret(path: Path) -> bytes:
        """Of a file; made if there is none."""
        if not path.exists():
            secret = secrets.token_bytes(SECRET_BYTES)
            atomic_write(path, secret, 0o600)
            return secret
        check_private(path)
        with explained("read", path):
            secret = path.read_bytes()
        if len(secret) != SECRET_BYTES:
            raise LocalError(f"{path} is damaged: restore it from a copy, or remove it (then every peer needs the new token)")
        return secret


class _Entering(QuietOwner):
    """Owns a first connection: one request, one certificate."""

    def __init__(self, admission: Admission, hello: Body) -> None:
        self._admission = admission
        self._hello = hello
        self._asked = False

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None:
        if not isinstance(event, Message) or event.type is not Type.ENROL:
            return
        if self._asked:
            link.close(RemoteError("one connection, one certificate"))
            return
        self._asked = True
        self._admission.later(self._admission.enrol(link, self._hello, event.body["request"]), f"enrol {link.name}")

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        self._admission.left(link)

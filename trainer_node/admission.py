"""Which nodes the hub admits: join tokens, certificates, names, evictions; the hub's own papers.

Promises: what a token has bought is on disk before a certificate leaves; whoever is evicted is cut off before the call returns, here and in what peers are told, and stays out across restarts,
also when ``trust.json`` is lost or an older copy comes back: evictions are in a file that only grows, and peers bring back what this file lacks; a fresh token is in the token file long before the
last one ends; secrets lie in files of mode 0600 and leave only in the answer to whoever makes a token on this machine.
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
from p2pcast.artifact.records import run_id
from p2pcast.artifact.run_key import RunKey
from p2pcast.errors import LocalError, P2PCastError, RefusedError, RemoteError, RetryableError, UsageError
from p2pcast.store.files import atomic_write, explained
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.transport.stripe import HANDSHAKE_S, Stripe
from p2pcast.trust import bearer
from p2pcast.trust.authority import Authority
from p2pcast.trust.certificates import held_key, key_print, load, new_key, requested_key
from p2pcast.trust.contexts import Tls
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.eviction_log import EvictionLog
from p2pcast.trust.evictions import NO_TOKEN
from p2pcast.trust.ledger import LEGACY_TTL_S, OWN_TTL_S
from p2pcast.trust.roles import Certified
from p2pcast.wire.connection import Event, Identity, Message
from p2pcast.wire.messages import Body, Type
from p2pcast.wire.token import SECRET_BYTES, Token
from trainer_node.trust_files import read_ledger, secret_of

logger = logging.getLogger("p2pcast.hub")

Document = dict[str, Any]
DAY_S = 86400.0
LIFETIME_S = 14 * DAY_S
"""Of a certificate. Renewed after a third, so a hub may be away for nine days before anybody has to join anew."""
DEFAULT_TTL_S = DAY_S
"""Of a token that somebody makes for others."""
LEDGER, SECRET = "trust.json", "token.key"
FRESH = 1 / 2
"""Share of the life of the hub's own token: when less is left, the hub makes the next one. A copy of the token file is good for this long at least."""
SEEN_S = 3600.0
"""Between two notes of the connected peers on disk: the precision with which a restarted hub knows how long a node has been away."""
OTHERS_SHOWN = 8
"""Nodes that an answer names."""
RETRY_S = 60.0
"""Until a file that could not be written is tried again."""


class AdmissionOwner(Protocol):
    async def blocking(self, work: Callable[..., Any], *args: Any) -> Any:
        """Off the loop."""

    def later(self, work: Coroutine[Any, Any, None], name: str, *, vital: bool = True) -> None: ...
    def present(self, node: str) -> bool:
        """Whether a peer is connected."""
        ...

    def cut(self, nodes: frozenset[bytes], signed: list[bytes]) -> None:
        """Close what connects to these nodes, and tell all peers of the evictions. ``signed``: new statements."""

    def token_changed(self) -> Path | None:
        """Write the token file; which one. Blocks. Raises LocalError."""

    def told(self, kind: str, **facts: Any) -> None:
        """An event."""


class Admission:
    """``identity``: for the hub's listener; ``tls`` None: plain text; ``token``: the hub's own."""

    def __init__(
        self,
        owner: AdmissionOwner,
        state: Path,
        key: RunKey,
        node: bytes,
        *,
        plaintext: bool,
        lifetime_s: float,
        token_ttl_s: float = OWN_TTL_S,
    ) -> None:
        """``key``: the run's; it signs evictions. Raises LocalError."""
        self._owner = owner
        self._state = state
        self._key = key
        self._run = run = run_id(key.public)
        self._node = node
        self._lifetime_s = lifetime_s
        self._token_ttl_s = token_ttl_s
        self._changing = asyncio.Lock()
        self._entering: dict[Link, None] = {}
        self._saving = False
        now = time.time()
        self._seen_at = self._tend_at = now
        self._stale = False
        """The token file has another token than this."""
        self._log = EvictionLog(state)
        self._evictions = self._log.evictions
        self.evicted = self._evictions.nodes
        """The same set for as long as this lives."""
        self._ledger = read_ledger(state / LEDGER, self.evicted)
        self._reconcile(now)
        self.tls: Tls | None = None
        if plaintext:
            secret = secret_of(state / SECRET)
            self.token = Token(run, secret)
            self.bearer = bearer.of_run(secret)
        else:
            self._authority = Authority.load_or_create(state / "authority.pem", run, now)
            self._papers = self._own_papers(now)
            self.tls = Tls(self._papers, strangers=True)
            self.token = self._own_token(now)
            self.bearer = bearer.text(secret_of(state / "http.key"))
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
        return self._ledger.secret(ident)

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

        if await self._issue(link, hello["role"], request, admit):
            logger.info("issued a certificate to %s %s at %s", hello["role"], hello["name"], link.remote_host)

    async def renew(self, link: Link, request: bytes) -> None:
        """The next certificate of a peer that has joined with its last."""
        if self.tls is None:
            link.close(RemoteError("links are not encrypted here: there are no certificates"))
            return

        def admit(key: str, now: float, until: float) -> None:
            self._ledger.renew(link.remote, "peer", key, now, until)

        await self._issue(link, "peer", request, admit)

    async def _issue(self, link: Link, role: str, request: bytes, admit: Callable[[str, float, float], None]) -> bool:
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
            return False
        except Exception:
            link.close(LocalError("the hub failed to issue a certificate; see its log"))
            raise
        return True

    def later(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._owner.later(work, name, vital=False)

    def beat(self) -> None:
        """Every second: renew the hub's own papers and token, and note the connected peers."""
        now = time.time()
        if self.tls is not None and self._papers.due(now):
            self._papers = self._own_papers(now)
            self.tls.use(self._papers)
        due = self.tls is not None and (self._stale or self._token_is_due(now))
        if now >= self._tend_at and (due or self._evictions.pending):
            self._tend_at = now + RETRY_S
            self._owner.later(self._tend(), "token")
        if now >= self._seen_at + SEEN_S:
            self._seen_at = now
            for node in self._ledger.holders:
                if self._owner.present(node):
                    self._ledger.saw(node, now)
            self._remember()

    # -- peers that are connected

    def joined(self, link: Link, name: str, token: bytes) -> str:
        """What a peer that joins goes by. ``token``: ident of the one that it was started with. Raises RefusedError."""
        now = time.time()
        if self.tls is None:
            news = self._ledger.adopt(link.remote, "", name, now, now)
        elif (certificate := link.certificate) is None:
            raise RefusedError("this connection shows no certificate")
        else:
            key, until = key_print(held_key(certificate)), load(certificate).not_valid_after_utc.timestamp()
            news = self._ledger.adopt(link.remote, key, name, now, until)
            if news:
                logger.info("%s has a certificate of this run that was missing from %s, and is now recorded there", name, LEDGER)
            news |= self._ledger.came_with(link.remote, token)
        before = self._ledger.holders[link.remote.hex()].called
        called = self._ledger.call(link.remote, name, now, self._owner.present)
        if called != name:
            logger.warning(
                "another node has the name %s: this peer is called %s. If the other node is gone for good, `p2pcast evict %s` frees the name",
                name, called, self._ledger.find(name)[0],
            )  # fmt: skip
        if news or called != before:
            self._remember()
        return called

    def evictions(self) -> list[Body]:
        """What a peer is told when it has joined: EVICTED, in parts."""
        nodes, signed = sorted(self.evicted), self._evictions.packed()
        parts = [signed[at : at + limits.MAX_STATEMENTS] for at in range(0, len(signed), limits.MAX_STATEMENTS)] or [[]]
        return [{"nodes": nodes, "signed": part} for part in parts]

    def learn_evictions(self, signed: list[bytes]) -> None:
        """A peer knows of evictions that this hub has not spoken of. Raises IntegrityError when one was never signed here."""
        news = self._evictions.accept(signed, self._key.public)
        if not news:
            return
        self._ledger.strike(self._evictions.tokens)
        for statement in news:
            node = statement.node.hex()
            known = self._ledger.holders.get(node)
            logger.warning(
                "this hub had lost a statement, which a peer has brought back: node %s is %s",
                node,
                "evicted" if statement.evicted else "not evicted",
            )
            self._owner.told(
                "evicted", peer=node if known is None else known.called or known.name, node=node, undone=not statement.evicted
            )
        self._owner.cut(frozenset(self.evicted), [s.packed for s in news])
        self._remember()
        self._tend_at = 0.0

    def close(self) -> None:
        self._log.close()

    def _remember(self) -> None:
        """What was learnt, to disk, soon and at once for all that comes meanwhile."""
        if not self._saving:
            self._saving = True
            self._owner.later(self._save_soon(), "trust")

    async def _save_soon(self) -> None:
        async with self._changing:
            self._saving = False
            try:
                await self._save()
            except LocalError as error:
                logger.warning("names and evictions could not be written to disk: %s", error)

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
                found, name = self._evictions.find(peer)
                self._decide(found, NO_TOKEN, evicted=False, name=name)
                await self._save()
                self._owner.told("evicted", peer=name, node=found.hex(), undone=True)
                return {"peer": name, "node": found.hex(), "evicted": False}
            node, name = self._ledger.find(peer)
            if node == self._node.hex():
                raise RefusedError("that is the hub itself")
            now = time.time()
            others = self._ledger.others(node, name)
            revoked = [] if body.get("keep_token") is True else self._ledger.had(node, now)
            # With the statement goes the token that it could use: the hub's own, if it had one.
            first = min(revoked, key=lambda i: not self._ledger.grants[i].own, default="")
            self._decide(bytes.fromhex(node), bytes.fromhex(first) or NO_TOKEN, evicted=True, name=name)
            fresh = await self._revoke_all(revoked, now)
            await self._save()
            file = await self._write_token_file() if fresh else None
        self._owner.told("evicted", peer=name, node=node, undone=False)
        logger.warning("evicted %s (%s)%s", name, node, f", revoked token {', '.join(revoked)}" if revoked else "")
        note = None
        if self.tls is None:
            note = "links are plain text: whoever has the token can come back under another id. Start a new run to keep it out"
        return {
            "peer": name, "node": node, "evicted": True, "revoked_token": first or None, "revoked_tokens": revoked,
            "token_file": None if file is None else str(file), "others": others[:OTHERS_SHOWN], "note": note,
        }  # fmt: skip

    def _decide(self, node: bytes, token: bytes, *, evicted: bool, name: str) -> None:
        """In force at once, here and at every peer that listens; on disk with the next ``_save``. Raises RefusedError."""
        made = self._evictions.decide(node, token, evicted=evicted, name=name, now=time.time(), sign=self._key.sign)
        self._owner.cut(frozenset(self.evicted), [made.packed])

    async def _create(self, body: Document) -> Document:
        """``{"role": "peer" | "trainer", "ttl_s": seconds or null, "uses": count or null}``."""
        self._require_tls()
        ttl_s, uses = body.get("ttl_s", DEFAULT_TTL_S), body.get("uses")
        if ttl_s is not None and (isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 < ttl_s <= 3650 * DAY_S):
            raise UsageError("ttl_s: a number of seconds, ten years at most, or null")
        if uses is not None and (type(uses) is not int or not 1 <= uses <= limits.MAX_HOLDERS):
            raise UsageError(f"uses: a count from 1 to {limits.MAX_HOLDERS}, or null")
        if ttl_s is None and uses is None:
            raise UsageError(
                "a token that never expires needs a limit on its uses (--ttl never --uses N): somebody may find it years from now"
            )
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
            fresh = await self._revoke_all([ident], time.time())
            await self._save()
            file = await self._write_token_file() if fresh else None
        return {"id": ident, "revoked": True, "token_file": None if file is None else str(file)}

    async def _revoke_all(self, idents: list[str], now: float) -> bool:
        """Whether the hub has a new token of its own for them."""
        for ident in idents:
            self._evictions.revoke(ident)
        self._ledger.strike(idents)
        if self.tls is None or self.token.ident.hex() not in idents:
            return False
        await self._replace_token(now)
        return True

    async def _replace_token(self, now: float) -> None:
        secret = await self._owner.blocking(self._new_secret)
        self.token, self._stale = self._granted(secret, now), True

    async def _write_token_file(self) -> Path | None:
        file: Path | None = await self._owner.blocking(self._owner.token_changed)
        self._stale = False
        return file

    def _require_tls(self) -> None:
        if self.tls is None:
            raise UsageError("with --plaintext there is one token, which is everybody's: start the hub without it")

    # -- on disk

    def _reconcile(self, now: float) -> None:
        """Puts together what the files say, of which each may be an older copy."""
        for node, name in self._ledger.legacy.items():
            if not self._evictions.knows(bytes.fromhex(node)):
                # Whether its token was to be revoked, that release has decided.
                self._evictions.decide(bytes.fromhex(node), NO_TOKEN, evicted=True, name=name, now=now, sign=self._key.sign)
        self._log.save()
        self._ledger.strike(self._evictions.tokens)

    async def _save(self) -> None:
        # Evictions first: what only grows may be newer than the rest, never older.
        await self._owner.blocking(self._log.save)
        await self._owner.blocking(_write_document, self._state / LEDGER, self._ledger.document)

    def _own_token(self, now: float) -> Token:
        """The one of ``token.key``, while it has a good while to go; else another, and the old one stays in force to its end."""
        path = self._state / SECRET
        if path.exists():
            token = Token(self._run, secret_of(path), self._authority.fingerprint)
            ident = token.ident.hex()
            if self._ledger.bound_own(now):
                logger.warning(
                    "the hub's token never expired; it now expires in %.0f days, and the token file has a new one: see `token create --ttl never`",
                    LEGACY_TTL_S / DAY_S,
                )
            elif ident not in self._ledger.grants and ident not in self._evictions.tokens:
                # The ledger is lost, or older than the token. How old that is, its file says.
                with explained("read", path):
                    left = path.stat().st_mtime + self._token_ttl_s - now
                if 0 < left <= self._token_ttl_s:
                    self._ledger.grant(token.secret, "peer", now, ttl_s=left, own=True)
            self.token = token
            if not self._token_is_due(now):
                self._write_ledger()
                return token
        made = self._granted(self._new_secret(), now)
        self._write_ledger()
        return made

    def _token_is_due(self, now: float) -> bool:
        """Whether it is time for another own token."""
        found = self._ledger.grants.get(self.token.ident.hex())
        if found is None or found.expires is None or found.fault(now) is not None:
            return True
        # An earlier start may have been asked for longer ones.
        return found.expires - now < FRESH * self._token_ttl_s or found.expires - now > self._token_ttl_s

    async def _tend(self) -> None:
        """The next own token, where it is time; the one before it stays in force to its end. And what could not be written before."""
        async with self._changing:
            now = time.time()
            try:
                if self.tls is not None and self._token_is_due(now):
                    await self._replace_token(now)
                await self._save()
                if self._stale:
                    await self._write_token_file()
                    logger.info("a fresh token is in the token file")
            except LocalError as error:
                logger.warning("tokens and evictions could not be written to disk: %s", error)

    def _new_secret(self) -> bytes:
        """Of the hub's next own token, on disk when it returns. Blocks. Raises LocalError."""
        secret = secrets.token_bytes(SECRET_BYTES)
        atomic_write(self._state / SECRET, secret, 0o600)
        return secret

    def _granted(self, secret: bytes, now: float) -> Token:
        """The hub's own token from now on."""
        self._ledger.grant(secret, "peer", now, ttl_s=self._token_ttl_s, own=True)
        return Token(self._run, secret, self._authority.fingerprint)

    def _write_ledger(self) -> None:
        _write_document(self._state / LEDGER, self._ledger.document)


def _write_document(path: Path, document: Document) -> None:
    """Row by row: one call of the encoder for tens of thousands would hold up the loop from any thread."""
    holders = ", ".join(f"{json.dumps(node)}: {json.dumps(row)}" for node, row in document["holders"].items())
    rest = json.dumps({name: part for name, part in document.items() if name != "holders"})
    atomic_write(path, f'{rest[:-1]}, "holders": {{{holders}}}}}'.encode(), 0o600)


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

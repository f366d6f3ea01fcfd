"""The hub's HTTP commands about trust: evict a node; create, list and revoke join tokens.

Guarantee: a token's secret is sent only in the response to ``token/create``, which is accepted only from this machine.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from p2pcast.daemon.command_body import check_keys, flag
from p2pcast.ground import limits
from p2pcast.ground.errors import RefusedError, UsageError
from p2pcast.process.events import Events
from p2pcast.trust.evictions import NO_TOKEN
from p2pcast.trust.join_token import SECRET_BYTES, JoinToken
from trainer_node.admission.own_token import OwnToken
from trainer_node.admission.trust_state import TrustState

logger = logging.getLogger("p2pcast.hub")

Document = dict[str, Any]
DAY_S = 86400.0
DEFAULT_TTL_S = DAY_S
"""Default lifetime of a created token, in seconds."""
MAX_TTL_S = 3650 * DAY_S
OTHERS_SHOWN = 8
"""Most nodes that a response lists."""


class TrustCommands:
    """``node``: the hub's node id. ``fingerprint``: the run authority's fingerprint, or None without TLS."""

    def __init__(
        self, trust: TrustState, own_token: OwnToken, events: Events, node: bytes, fingerprint: bytes | None
    ) -> None:
        self._trust = trust
        self._own_token = own_token
        self._events = events
        self._node = node
        self._fingerprint = fingerprint

    @property
    def routes(self) -> dict[str, Callable[[Document], Coroutine[Any, Any, Document]]]:
        return {
            "evict": self.evict,
            "token/create": self.create,
            "token/list": self.list,
            "token/revoke": self.revoke,
        }

    async def evict(self, body: Document) -> Document:
        """Evict a node, or undo that: ``{"peer": node or name, "undo": bool, "keep_token": bool}``."""
        check_keys(body, "peer", "undo", "keep_token")
        peer, undo, keeps = body.get("peer"), flag(body, "undo"), flag(body, "keep_token")
        if not isinstance(peer, str) or not peer:
            raise UsageError('name the peer: {"peer": a node\'s id or name}')
        if undo:
            return await self._undo(peer)
        trust, ledger = self._trust, self._trust.ledger
        async with trust.changing:
            node, name = ledger.find(peer)
            if node == self._node.hex():
                raise RefusedError("that is the hub itself")
            now = trust.now()
            others = ledger.others(node, name)
            revoked = [] if keeps else ledger.tokens_to_revoke(node, now)
            # The statement revokes one token at every peer: the hub's own, if the node could use it.
            first = min(revoked, key=lambda ident: not ledger.tokens[ident].own, default="")
            trust.decide(bytes.fromhex(node), bytes.fromhex(first) or NO_TOKEN, evicted=True, name=name)
            fresh = await self._revoke_all(revoked, now)
            await trust.save()
            file = await self._own_token.write() if fresh else None
        self._events.emit("evicted", peer=name, node=node, undone=False)
        logger.warning("evicted %s (%s)%s", name, node, f", revoked token {', '.join(revoked)}" if revoked else "")
        note = None
        if self._fingerprint is None:
            note = (
                "links are plain text: a node that has the token can come back under another id."
                " Start a new run to keep it out"
            )
        return {
            "peer": name, "node": node, "evicted": True, "revoked_token": first or None, "revoked_tokens": revoked,
            "token_file": None if file is None else str(file), "others": others[:OTHERS_SHOWN], "note": note,
        }  # fmt: skip

    async def _undo(self, peer: str) -> Document:
        async with self._trust.changing:
            found, name = self._trust.evictions.find(peer)
            self._trust.decide(found, NO_TOKEN, evicted=False, name=name)
            await self._trust.save()
        self._events.emit("evicted", peer=name, node=found.hex(), undone=True)
        return {"peer": name, "node": found.hex(), "evicted": False}

    async def create(self, body: Document) -> Document:
        """Create a token: ``{"role": one of BOUGHT, "ttl_s": seconds or null, "uses": count or null}``."""
        check_keys(body, "role", "ttl_s", "uses")
        fingerprint = self._require_tls()
        ttl_s, uses = body.get("ttl_s", DEFAULT_TTL_S), body.get("uses")
        if ttl_s is not None and (
            isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 < ttl_s <= MAX_TTL_S
        ):
            raise UsageError("ttl_s: a number of seconds, ten years at most, or null")
        if uses is not None and (type(uses) is not int or not 1 <= uses <= limits.MAX_HOLDERS):
            raise UsageError(f"uses: a count from 1 to {limits.MAX_HOLDERS}, or null")
        if ttl_s is None and uses is None:
            raise UsageError(
                "a token that never expires needs a limit on its uses (--ttl never --uses N):"
                " a lost token would stay valid for years"
            )
        secret = secrets.token_bytes(SECRET_BYTES)
        async with self._trust.changing:
            role = str(body.get("role", "peer"))
            ident = self._trust.ledger.grant(secret, role, self._trust.now(), ttl_s=ttl_s, uses=uses)
            await self._trust.save()
        return {"id": ident, "token": str(JoinToken(self._trust.run, secret, fingerprint))}

    async def list(self, body: Document) -> Document:
        check_keys(body)
        self._require_tls()
        return {"tokens": self._trust.ledger.rows(self._trust.now())}

    async def revoke(self, body: Document) -> Document:
        """Revoke a token: ``{"id": its id, or a prefix}``. Certificates issued for the token stay valid."""
        check_keys(body, "id")
        self._require_tls()
        async with self._trust.changing:
            ident = self._trust.ledger.revoke(str(body.get("id", "")))
            fresh = await self._revoke_all([ident], self._trust.now())
            await self._trust.save()
            file = await self._own_token.write() if fresh else None
        return {"id": ident, "revoked": True, "token_file": None if file is None else str(file)}

    async def _revoke_all(self, idents: Sequence[str], now: float) -> bool:
        """Revoke tokens. Returns whether the hub's own token was among them; it is then replaced."""
        for ident in idents:
            self._trust.evictions.revoke(ident)
        self._trust.ledger.strike(idents)
        if self._fingerprint is None or self._own_token.token.ident.hex() not in idents:
            return False
        await self._own_token.replace(now)
        return True

    def _require_tls(self) -> bytes:
        """Return the fingerprint of the run's authority. Raises UsageError without TLS."""
        if self._fingerprint is None:
            raise UsageError("with --plaintext all nodes share one token: start the hub without --plaintext")
        return self._fingerprint

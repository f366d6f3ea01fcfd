"""A worker's or ledger's certificate. The hub issues it in exchange for the join token. It is kept in the state folder,
and renewed by enrolling again with the same key.

Guarantees: while the certificate is valid, a restart needs neither token nor hub. Node id and key are on disk before
the hub sees them, so they survive a crash or a lost answer. If the hub is away or refuses to renew, a node that had a
valid certificate retries. Credentials for a different node, role, run or authority in the file are not used. A node
keeps its key when the run's authority is replaced, because the hub knows the node by that key.

    node.json   {"node": "…"}: the node's id
    node.key    its private key
    node.pem    key, certificate, and the authority's certificate
    join.token  the token of the last enrolment; the hub knows the node by its key even when the token has expired

``KeptCertificate`` reads such a file and presents the certificate in TLS; peers use it too.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from pathlib import Path

from p2pcast.files.atomic_files import atomic_write, explained
from p2pcast.ground.addresses import Address
from p2pcast.ground.backoff import Backoff, Uniform
from p2pcast.ground.errors import P2PCastError, RetryableError, UsageError
from p2pcast.ground.plain_text import written_text
from p2pcast.ground.private_random import uniform
from p2pcast.process.daemon_process import StateFile, node_id
from p2pcast.transport.enrolment import enrol, patience_s
from p2pcast.trust.certificates import Key, fingerprint
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.dial_permissions import Certified, Role
from p2pcast.trust.join_token import JoinToken
from p2pcast.trust.key_files import check_private, kept_key
from p2pcast.trust.server_role import client_context
from p2pcast.trust.tls_contexts import Tls

logger = logging.getLogger("p2pcast.certificate")

IDENTITY, KEY, FILE, TOKEN = "node.json", "node.key", "node.pem", "join.token"
RETRY_S, RETRY_MOST_S = 1.0, 300.0
"""First and longest delay in seconds after a failed enrolment; at most a tenth of the certificate's lifetime."""
CHECK_S = 60.0
"""Longest sleep in seconds before the clock is read again, because it may jump."""


class KeptCertificate:
    """A certificate and its file. ``tls`` allows no connection before there are credentials, and stays the same object.
    ``authority``: the fingerprint of the run's authority.
    """

    def __init__(self, path: Path, who: Certified, authority: bytes) -> None:
        self.path = path
        self.who = who
        self.tls = Tls()
        self.held: Credentials | None = None
        self.key: Key | None = None
        """The node's key, even if its certificate in the file was issued by an earlier authority of the run."""
        self.was_in_force = False
        """Whether a certificate has been valid while this process was running."""
        self._authority = authority

    @property
    def until(self) -> float | None:
        """When the certificate expires, in Unix seconds."""
        return None if self.held is None else self.held.until

    def read(self) -> Credentials | None:
        """Return the credentials in the file if they are this node's and this run's. Blocks. Raises LocalError."""
        if not self.path.exists():
            return None
        found = Credentials.load(self.path)
        if found.who == self.who:
            self.key = found.key
        return found if found.who == self.who and fingerprint(found.authority) == self._authority else None

    def use(self, credentials: Credentials) -> None:
        """Present these credentials from the next connection on."""
        self.tls.use(credentials)
        self.held, self.key = credentials, credentials.key
        self.was_in_force |= credentials.in_force(time.time())


class NodeCertificate:
    """``tls`` allows no connection before ``ready`` has returned, and stays the same object. ``tls.server`` requires a
    certificate from every client.
    """

    def __init__(
        self,
        state: Path,
        role: Role,
        name: str,
        hub: Address,
        token: JoinToken | None,
        uniform: Uniform = uniform,
    ) -> None:
        """``state``: an existing folder that this process has locked. ``token``: None for the token of the last
        enrolment. Blocks. Raises LocalError and UsageError.
        """
        self._state = state
        self._hub = hub
        self._name = name
        self._uniform = uniform
        self._token = token or _kept_token(state / TOKEN, role)
        if not self._token.authority:
            raise UsageError("this token's hub was started with --plaintext, and issues no certificates")
        node = node_id(StateFile(state / IDENTITY, {"node": ""}))
        self._kept = KeptCertificate(state / FILE, Certified(self._token.run, node, role), self._token.authority)
        self._contexts: dict[Role, ssl.SSLContext] = {}
        self._unanswered = 0
        """Number of requests in a row that the hub has not answered."""
        self._warned: set[tuple[type[P2PCastError], bool]] = set()
        found = self._kept.read()
        self._key = kept_key(state / KEY) if found is None else found.key
        if found is not None:
            self._kept.use(found)

    @property
    def tls(self) -> Tls:
        return self._kept.tls

    @property
    def who(self) -> Certified:
        return self._kept.who

    @property
    def until(self) -> float | None:
        """When the certificate expires, in Unix seconds."""
        return self._kept.until

    def client(self, server: Role) -> ssl.SSLContext:
        """Return the context for connections to servers in one role; call this after ``ready``. It is a new object
        after each renewal, so that a pool, which keeps connections by context, reuses no earlier ones.
        """
        if server not in self._contexts:
            assert self._kept.held is not None, "ready has returned"
            self._contexts[server] = client_context(self._kept.held, server)
        return self._contexts[server]

    async def ready(self) -> None:
        """Wait until there is a valid certificate, if need be for the hub. Raises RefusedError and LocalError."""
        delays = Backoff(RETRY_S, RETRY_MOST_S, self._uniform)
        while (held := self._kept.held) is None or not held.in_force(time.time()):
            try:
                await self._enrol()
            except RetryableError as error:
                level = logging.DEBUG if delays.attempts else logging.WARNING
                logger.log(level, "no certificate yet: %s; the request is repeated", error)
                await asyncio.sleep(delays.next_s())

    async def renew_when_due(self) -> None:
        """Renew the certificate after a third of its lifetime. Call this after ``ready``; runs until cancelled."""
        delays = Backoff(RETRY_S, RETRY_MOST_S, self._uniform)
        while True:
            held = self._kept.held
            assert held is not None
            if (early_s := held.due_at - time.time()) > 0:
                await asyncio.sleep(min(early_s, CHECK_S))
                continue
            try:
                await self._enrol()
            except P2PCastError as error:
                self._warn(error, held)
                await asyncio.sleep(delays.next_s((held.until - held.begun) / 10))
            else:
                delays.reset()
                # A hub whose clock is behind may issue a certificate that is due at once.
                await asyncio.sleep(RETRY_S)

    async def _enrol(self) -> None:
        """Enrol once. Raises RetryableError, RefusedError and LocalError."""
        who = self._kept.who
        self._unanswered += 1
        issued = await enrol(
            *self._hub, self._token, who.node, self._name, who.role, self._key, timeout_s=patience_s(self._unanswered)
        )
        self._unanswered = 0
        await asyncio.to_thread(self._save, issued)
        self._kept.use(issued)
        self._contexts.clear()
        self._warned.clear()
        logger.info("this %s has a certificate for %.1f days", who.role, (issued.until - time.time()) / 86400)

    def _save(self, issued: Credentials) -> None:
        """Blocks. Raises LocalError."""
        atomic_write(self._state / TOKEN, f"{self._token}\n".encode(), 0o600)
        issued.save(self._kept.path)

    def _warn(self, error: P2PCastError, held: Credentials) -> None:
        """Log a warning, once per kind of error until an enrolment succeeds."""
        over = time.time() >= held.until
        kind = (type(error), over)
        level = logging.DEBUG if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        state = "has expired" if over else f"is valid until {time.ctime(held.until)}"
        logger.log(level, "no new certificate: %s; the present one %s", error, state)


def _kept_token(path: Path, role: Role) -> JoinToken:
    """Return the token of the last enrolment. Raises LocalError and UsageError."""
    if not path.exists():
        raise UsageError(
            f"no join token: give --token-file FILE, made by `p2pcast token create --role {role}` on the hub's machine"
        )
    check_private(path)
    with explained("read", path):
        contents = path.read_bytes()
    try:
        return JoinToken.parse(written_text(contents))
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a token file: its contents are not UTF-8") from None

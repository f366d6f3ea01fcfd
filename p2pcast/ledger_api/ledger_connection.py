"""Sends requests to the ledger as a trainer, with a bearer token or a certificate that the hub issues.

Guarantee: every request is repeated until the ledger answers or ``give_up_s`` has passed.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

from p2pcast.ground import limits
from p2pcast.ground.addresses import http_url
from p2pcast.ground.backoff import Backoff
from p2pcast.ground.errors import LocalError, P2PCastError, RefusedError, RetryableError, UsageError
from p2pcast.ground.plain_text import written_text
from p2pcast.ground.private_random import uniform
from p2pcast.ledger_api.api_route import ApiRecord, ApiRoute
from p2pcast.ledger_api.trainer_certificate import TrainerCertificate, hub_address, join_token
from p2pcast.trust.node_names import default_name

ANSWER_S: Final = 60.0
"""Time limit for each part of a response, in seconds."""
MAX_ANSWER_BYTES: Final = 8 * limits.GIB
RETRY_S, RETRY_MOST_S = 0.2, 10.0

Q = TypeVar("Q", bound=ApiRecord)
A = TypeVar("A", bound=ApiRecord)


class LedgerConnection:
    """``url``: the ledger's. ``bearer_file``: http.token in the ledger's state folder, for a ledger on this machine.
    ``hub``: HOST:PORT, for a ledger over https. The trainer's join token is read from ``token_file``, or else from
    ``$P2PCAST_TOKEN``. ``name``: the certificate holder's. If ``give_up_s`` is None, requests are repeated forever.

    Raises UsageError, LocalError.
    """

    def __init__(
        self,
        url: str,
        *,
        bearer_file: str | os.PathLike[str] | None = None,
        hub: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        name: str | None = None,
        give_up_s: float | None = None,
    ) -> None:
        parts = urlsplit(http_url(url, "the ledger's URL"))
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname or "", parts.port
        if self._secure != (hub is not None):
            raise UsageError("https and hub belong together: the hub issues the certificate that the ledger asks for")
        self._give_up_s = give_up_s
        self._context: Callable[[], ssl.SSLContext] | None = None
        if hub is not None:
            self._context = _certified(hub, token_file, name or default_name(socket.gethostname()))
        self._headers = {}
        if bearer_file is not None:
            try:
                bearer = written_text(Path(bearer_file).read_bytes()).strip()
                self._headers["Authorization"] = f"Bearer {bearer}"
            except (OSError, UnicodeDecodeError) as error:
                raise LocalError(f"cannot read {bearer_file}: {getattr(error, 'strerror', None) or error}") from None

    def ask(self, route: ApiRoute[Q, A], asked: Q) -> A:
        """Send a request and return the response. Raises RefusedError, RemoteError or RetryableError."""
        delays = Backoff(RETRY_S, RETRY_MOST_S, uniform)
        until_s = None if self._give_up_s is None else time.monotonic() + self._give_up_s
        while True:
            try:
                status, content = self._answer(route, asked)
                return route.read_answer(content, status)
            except RetryableError:
                if until_s is not None and time.monotonic() > until_s:
                    raise
            time.sleep(delays.next_s())

    def _answer(self, route: ApiRoute[Q, A], asked: Q) -> tuple[int, bytes]:
        """Send a request once and return the response's status and body. Raises RetryableError or RefusedError."""
        try:
            connection = self._connection()
            try:
                body = None if route.method == "GET" else route.request(asked)
                headers = self._headers | {"Content-Type": route.request_type}
                connection.request(route.method, route.path, body, headers)
                answer = connection.getresponse()
                return answer.status, answer.read(MAX_ANSWER_BYTES)
            finally:
                connection.close()
        except P2PCastError:
            raise
        except ssl.SSLCertVerificationError as error:
            raise RefusedError(f"the ledger's certificate is not valid: {error.verify_message}") from None
        except (OSError, http.client.HTTPException) as error:
            raise RetryableError(
                f"the ledger at {self._host}:{self._port} does not answer ({type(error).__name__})"
            ) from None

    def _connection(self) -> http.client.HTTPConnection:
        """Open a connection. Raises RetryableError or RefusedError."""
        if self._context is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=ANSWER_S, context=self._context())
        return http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_S)


def _certified(hub: str, token_file: str | os.PathLike[str] | None, name: str) -> Callable[[], ssl.SSLContext]:
    """Return a function that makes the next connection's TLS context. Raises UsageError."""
    address, certificate = hub_address(hub), TrainerCertificate(join_token(token_file))
    thread = ThreadPoolExecutor(1, "p2pcast-certificate")

    def context() -> ssl.SSLContext:
        # The caller's thread may have its own event loop.
        return thread.submit(lambda: asyncio.run(certificate.client(address, name, "ledger"))).result()

    return context

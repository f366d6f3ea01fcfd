"""A worker's requests over https: servers that are no ledger, before and after the first answer."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import aiohttp
import pytest

from p2pcast.ground.errors import RetryableError, UntrustedError
from p2pcast.ledger_api.worker_api import Registration
from p2pcast.trust.certificate_authority import Authority
from p2pcast.trust.certificates import new_key
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.dial_permissions import Certified, Role
from p2pcast.trust.server_role import client_context
from p2pcast.trust.tls_contexts import Tls
from rollout_node.worker.ledger_client import LedgerClient
from tests.support.memory_ledger import MemoryLedger

RUN = b"r" * 16
ABOUT = Registration("w", 1, "sums", bytes(32))
AUTHORITY = Authority.create(RUN, time.time())


def credentials(node: bytes, role: Role, authority: Authority = AUTHORITY) -> Credentials:
    key, now = new_key(), time.time()
    issued = authority.issue(key.public_key(), Certified(RUN, node * 16, role), now, 900.0)
    return Credentials(key, issued, authority.certificate, now)


class Worker:
    """A client of whatever answers at the ledger's address, with the certificate ``mine``."""

    def __init__(self, http: aiohttp.ClientSession, ledger: MemoryLedger) -> None:
        self.mine = credentials(b"w", "worker")
        self.client = LedgerClient(http, ledger.url, tls=lambda: client_context(self.mine, "ledger"))


@pytest.fixture
async def server() -> Tls:
    return Tls(credentials(b"l", "ledger"))


@pytest.fixture
async def ledger(server: Tls) -> AsyncIterator[MemoryLedger]:
    found = MemoryLedger()
    found.run = RUN
    await found.start(server.server)
    yield found
    await found.stop()


@pytest.fixture
async def worker(ledger: MemoryLedger) -> AsyncIterator[Worker]:
    async with aiohttp.ClientSession() as http:
        yield Worker(http, ledger)


IMPOSTORS: list[tuple[Role, str]] = [
    ("worker", "is not a server's"),
    ("peer", "a peer answers at this address, not a ledger of this run"),
]


@pytest.mark.parametrize(("impostor", "line"), IMPOSTORS)
async def test_an_impostor_at_the_first_contact_ends_the_worker(
    server: Tls, ledger: MemoryLedger, worker: Worker, impostor: Role, line: str
) -> None:
    server.use(credentials(b"o", impostor))
    with pytest.raises(UntrustedError, match=line) as found:
        await worker.client.register(ABOUT)
    assert ledger.url in str(found.value)
    assert ledger.callers == []


@pytest.mark.parametrize(("impostor", "line"), IMPOSTORS)
async def test_a_later_impostor_ends_no_worker(
    server: Tls, ledger: MemoryLedger, worker: Worker, impostor: Role, line: str
) -> None:
    session = await worker.client.register(ABOUT)
    server.use(credentials(b"o", impostor))
    with pytest.raises(RetryableError, match=line):
        await worker.client.heartbeat(session.session, {})
    assert len(ledger.callers) == 1


async def test_a_ledger_without_tls_is_named() -> None:
    plain = MemoryLedger()
    await plain.start()
    plain.url = plain.url.replace("http://", "https://")
    async with aiohttp.ClientSession() as http:
        with pytest.raises(RetryableError, match="does not speak TLS: compare the port"):
            await Worker(http, plain).client.heartbeat(bytes(16), {})
    await plain.stop()


async def test_a_worker_that_the_ledger_does_not_accept_repeats_its_request(
    ledger: MemoryLedger, worker: Worker
) -> None:
    """As after the end of its certificate, until the hub has renewed the certificate."""
    session = await worker.client.register(ABOUT)
    good, now = worker.mine, time.time() - 3600
    issued = AUTHORITY.issue(good.key.public_key(), good.who, now, 60.0)
    worker.mine = Credentials(good.key, issued, AUTHORITY.certificate, now)
    with pytest.raises(RetryableError, match="does not answer"):
        await worker.client.heartbeat(session.session, {})
    worker.mine = good
    assert await worker.client.heartbeat(session.session, {}) == {}

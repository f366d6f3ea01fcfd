"""OpenSSL's TLS reads the self-made records as what they are."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time

import pytest

from p2pcast.trust.certificate_authority import Authority
from p2pcast.trust.certificates import new_key
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.dial_permissions import Certified
from p2pcast.trust.tls_contexts import Tls, first_contact
from tests.chaos.siege.tls_records import ALERT, DATA, MOST_BYTES, WARNING, client_hello, handshake

RUN = bytes(16)


@pytest.fixture(scope="module")
def papers():
    now, authority = time.time(), Authority.create(RUN, time.time())

    def tls(role: str) -> Tls:
        key = new_key()
        leaf = authority.issue(key.public_key(), Certified(RUN, bytes(16), role), now, 3600)
        return Tls(Credentials(key, leaf, authority.certificate, now), strangers=True)

    return tls


class Hearing:
    """A TLS server that records the received bytes and the reason for the connection's end."""

    def __init__(self) -> None:
        self.ends: list[tuple[bytes, str]] = []
        self.bell = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found, why = b"", ""
        try:
            while some := await reader.read(1 << 16):
                found += some
        except ssl.SSLError as error:
            why = error.reason or ""
        except ConnectionResetError:
            why = "reset"
        self.ends.append((found, why))
        self.bell.set()
        writer.transport.abort()


@pytest.fixture
async def hearing(papers):
    here = Hearing()
    server = await asyncio.start_server(here, "127.0.0.1", 0, ssl=papers("hub").server)

    async def said(talk, context: ssl.SSLContext):
        here.ends.clear()
        here.bell.clear()
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        async with asyncio.timeout(600):
            sealer = await handshake(reader, writer, context)
            writer.write(talk(sealer))
            with contextlib.suppress(OSError):
                writer.write_eof()
            await here.bell.wait()
        writer.transport.abort()
        return here.ends[0]

    yield said
    server.close()
    await asyncio.sleep(0)


LONG = bytes(range(256)) * 200


@pytest.mark.parametrize(
    "talk",
    [
        lambda s: s.data(LONG),
        lambda s: s.data(LONG[:9]) + b"".join(s.key_update(asking=n % 2 == 0) for n in range(50)) + s.data(LONG[9:]),
        lambda s: s.record(ALERT, WARNING) + s.record(DATA, b"") + s.data(LONG),
    ],
    ids=["data", "key updates", "an alert and nothing"],
)
async def test_sealed_records_are_understood(hearing, papers, talk):
    for context in (first_contact(), papers("peer").client):
        context.check_hostname = False
        found, _ = await hearing(talk, context)
        assert found == LONG


@pytest.mark.parametrize(
    "talk",
    [
        lambda s: s.record(DATA, bytes(MOST_BYTES + 300)),
        lambda s: s.data(b"x")[:-1] + b"??????",
        lambda s: s.record(99, b"x"),
    ],
)
async def test_invalid_record_ends_the_connection(hearing, talk):
    found, why = await hearing(talk, first_contact())
    assert found == b""
    assert why


def test_a_client_hello_is_one_whole_record():
    said = client_hello(first_contact())
    assert said[:2] == b"\x16\x03"
    assert int.from_bytes(said[3:5]) == len(said) - 5

"""Forged TLS 1.3 records after an honest handshake (RFC 8446, sections 4.6.3, 5 and 7).

The keys come from OpenSSL's key log. After the handshake the attacker writes every byte: endless key updates, alerts,
empty records, records that do not decrypt. Nothing is read.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import struct
from typing import Final

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

CHANGE_CIPHER_SPEC, ALERT, HANDSHAKE, DATA = 20, 21, 22, 23
"""Record types."""
MOST_BYTES = 1 << 14
"""Largest content of one record."""
KEY_UPDATE: Final = b"\x18\x00\x00\x01"
"""A handshake message; one byte follows, 1 to request a key update in return."""
WARNING: Final = b"\x01\x5a"
"""An alert: user_canceled, which does not end a connection."""

_CIPHERS: dict[str, tuple[type[AESGCM] | type[ChaCha20Poly1305], int, hashes.HashAlgorithm]] = {
    "TLS_AES_256_GCM_SHA384": (AESGCM, 32, hashes.SHA384()),
    "TLS_AES_128_GCM_SHA256": (AESGCM, 16, hashes.SHA256()),
    "TLS_CHACHA20_POLY1305_SHA256": (ChaCha20Poly1305, 32, hashes.SHA256()),
}


class Sealer:
    """Encrypts one direction of a connection into records. ``secret``: the initial traffic secret."""

    def __init__(self, cipher: str, secret: bytes) -> None:
        self._kind, self._key_bytes, self._hash = _CIPHERS[cipher]
        self._use(secret)

    def _use(self, secret: bytes) -> None:
        self._secret = secret
        self._aead = self._kind(self._expand("key", self._key_bytes))
        self._iv = int.from_bytes(self._expand("iv", 12))
        self._count = 0

    def _expand(self, label: str, size: int) -> bytes:
        full = b"tls13 " + label.encode()
        return HKDFExpand(self._hash, size, struct.pack(">HB", size, len(full)) + full + b"\0").derive(self._secret)

    def record(self, kind: int, content: bytes) -> bytes:
        """One record; ``content`` may be empty, or longer than the protocol allows."""
        inner = content + bytes([kind])
        header = struct.pack(">BHH", DATA, 0x0303, len(inner) + 16)
        nonce = (self._iv ^ self._count).to_bytes(12)
        self._count += 1
        return header + self._aead.encrypt(nonce, inner, header)

    def data(self, content: bytes) -> bytes:
        return b"".join(self.record(DATA, content[at : at + MOST_BYTES]) for at in range(0, len(content), MOST_BYTES))

    def key_update(self, *, asking: bool) -> bytes:
        """The records after this one use the next key."""
        said = self.record(HANDSHAKE, KEY_UPDATE + bytes([asking]))
        self._use(self._expand("traffic upd", self._hash.digest_size))
        return said


async def handshake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext) -> Sealer:
    """Perform the TLS handshake as a client on a new connection. ``context`` must not serve any other connection.
    Raises OSError (ssl.SSLError among them), EOFError.
    """
    log = os.memfd_create("keys", os.MFD_CLOEXEC)
    try:
        context.keylog_filename = f"/proc/self/fd/{log}"
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_hostname=None)
        while True:
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                if not (found := await reader.read(1 << 16)):
                    raise EOFError from None
                incoming.write(found)
                continue
            writer.write(outgoing.read())
            cipher = tls.cipher()
            assert cipher is not None
            return Sealer(cipher[0], _secret(os.pread(log, 1 << 16, 0)))
    finally:
        os.close(log)


def client_hello(context: ssl.SSLContext) -> bytes:
    """A whole ClientHello, as a record."""
    outgoing = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), outgoing)
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outgoing.read()


def _secret(log: bytes) -> bytes:
    for line in log.splitlines():
        name, _, rest = line.partition(b" ")
        if name == b"CLIENT_TRAFFIC_SECRET_0":
            return bytes.fromhex(rest.split()[-1].decode())
    raise OSError("OpenSSL logged no keys")

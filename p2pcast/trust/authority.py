"""A run's own certificate authority, at the hub.

Promises: one key and one certificate a state folder, made together on the first start, in one file that only its owner can read; what it issues names exactly one
node and role, is no authority itself, and a trainer's certificate does not pass for a server's.
"""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from p2pcast.trust.certificates import Key, PublicKey, fingerprint, new_key, uri
from p2pcast.trust.files import read_pem, write_pem
from p2pcast.trust.roles import Certified

AUTHORITY_DAYS = 3650
"""A run ends before its authority does."""
BACKDATED = datetime.timedelta(days=1)
"""For clocks that are behind: a certificate is in force already when it is made."""


class Authority:
    """``certificate``: its own, DER."""

    def __init__(self, key: Key, certificate: bytes) -> None:
        self._key = key
        self._own = x509.load_der_x509_certificate(certificate)
        self.certificate = certificate
        self.fingerprint = fingerprint(certificate)

    def __repr__(self) -> str:
        return f"Authority({self.fingerprint.hex()[:12]})"

    @classmethod
    def create(cls, run: bytes, now: float) -> Authority:
        """``now`` in Unix seconds."""
        key = new_key()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"p2pcast run {run.hex()}")])
        builder = _builder(name, name, key.public_key(), now, datetime.timedelta(days=AUTHORITY_DAYS))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(crl_sign=True, key_cert_sign=True), critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        return cls(key, _der(builder.sign(key, hashes.SHA256())))

    @classmethod
    def load_or_create(cls, path: Path, run: bytes, now: float) -> Authority:
        """From its file (mode 0600), made if there is none. Raises LocalError."""
        if not path.exists():
            made = cls.create(run, now)
            write_pem(path, made._key, [made.certificate])
        key, (certificate,) = read_pem(path, 1)
        return cls(key, certificate)

    def issue(self, key: PublicKey, who: Certified, now: float, lifetime_s: float) -> bytes:
        """A certificate (DER), from now on for ``lifetime_s``."""
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{who.role} {who.node.hex()}")])
        builder = _builder(subject, self._own.subject, key, now, datetime.timedelta(seconds=lifetime_s))
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(digital_signature=True), critical=True)
        servers = [] if who.role == "trainer" else [ExtendedKeyUsageOID.SERVER_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, *servers]), critical=True)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri(who))]), critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(issuer, critical=False)
        return _der(builder.sign(self._key, hashes.SHA256()))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: PublicKey, now: float, lifetime: datetime.timedelta
) -> x509.CertificateBuilder:
    at = datetime.datetime.fromtimestamp(now, datetime.UTC)
    return x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), at - BACKDATED, at + lifetime)


def _usage(**bits: bool) -> x509.KeyUsage:
    names = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{name: bits.get(name, False) for name in names})


def _der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)

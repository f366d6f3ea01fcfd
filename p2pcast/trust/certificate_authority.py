"""A run's own certificate authority, at the hub.

Guarantees: a state folder has one key and one authority certificate, made on the first start, in one file that only its
owner can read. An issued certificate names exactly one node and role, and is no authority itself. A certificate
of a trainer or worker is not valid for a server.
"""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from p2pcast.trust.certificates import Key, PublicKey, fingerprint, new_key, uri
from p2pcast.trust.dial_permissions import SERVERS, Certified
from p2pcast.trust.key_files import read_pem, write_pem

AUTHORITY_DAYS = 3650
"""Lifetime of the authority's certificate in days: longer than any run."""
BACKDATED = datetime.timedelta(days=7)
"""Validity begins this long before issue, for nodes whose clocks are behind."""
AUTHORITY_BACKDATED = datetime.timedelta(days=AUTHORITY_DAYS)
"""The same of the authority, whose first clock may have been far ahead."""


class Authority:
    """A run's certificate authority. ``certificate``: its own certificate, DER."""

    def __init__(self, key: Key, certificate: bytes) -> None:
        self._key = key
        self._own = x509.load_der_x509_certificate(certificate)
        self.certificate = certificate
        self.fingerprint = fingerprint(certificate)

    def __repr__(self) -> str:
        return f"Authority({self.fingerprint.hex()[:12]})"

    @classmethod
    def create(cls, run: bytes, now: float) -> Authority:
        """A new authority for a run. ``now`` in Unix seconds."""
        key = new_key()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"p2pcast run {run.hex()}")])
        life = datetime.timedelta(days=AUTHORITY_DAYS)
        builder = _builder(name, name, key.public_key(), now, life, AUTHORITY_BACKDATED)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(crl_sign=True, key_cert_sign=True), critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        return cls(key, _der(builder.sign(key, hashes.SHA256())))

    @classmethod
    def load_or_create(cls, path: Path, run: bytes, now: float) -> Authority:
        """Load the authority from a file (mode 0600), creating it if it is missing. Raises LocalError."""
        if not path.exists():
            made = cls.create(run, now)
            write_pem(path, made._key, [made.certificate])
        key, (certificate,) = read_pem(path, 1)
        return cls(key, certificate)

    def issue(self, key: PublicKey, who: Certified, now: float, lifetime_s: float) -> bytes:
        """Issue a certificate (DER) for a node's key, valid for ``lifetime_s`` seconds from ``now``."""
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{who.role} {who.node.hex()}")])
        builder = _builder(subject, self._own.subject, key, now, datetime.timedelta(seconds=lifetime_s))
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(digital_signature=True), critical=True)
        servers = [ExtendedKeyUsageOID.SERVER_AUTH] if who.role in SERVERS else []
        builder = builder.add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, *servers]), critical=True
        )
        builder = builder.add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri(who))]), critical=False
        )
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(issuer, critical=False)
        return _der(builder.sign(self._key, hashes.SHA256()))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: PublicKey,
    now: float,
    lifetime: datetime.timedelta,
    backdated: datetime.timedelta = BACKDATED,
) -> x509.CertificateBuilder:
    at = datetime.datetime.fromtimestamp(now, datetime.UTC)
    return x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), at - backdated, at + lifetime)


def _usage(**bits: bool) -> x509.KeyUsage:
    names = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{name: bits.get(name, False) for name in names})


def _der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)

"""Certificates and requests for them: what is in one, and how it is read back (docs/wire-protocol.md, section 2).

A certificate names its holder in one URI, ``p2pcast://RUN/ROLE/NODE`` (hexadecimal), for a P-256 key. Promise of ``certified``: exactly one such name, well formed,
or RefusedError; whether the run's authority signed it is TLS's to find out (or ``check_issued``). Pure: time is passed in.
"""

from __future__ import annotations

import datetime
import hashlib
import re

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from p2pcast.errors import RefusedError
from p2pcast.trust.roles import Certified

_NAME = re.compile(r"p2pcast://([0-9a-f]{32})/(hub|peer|trainer)/([0-9a-f]{32})", re.ASCII)

Key = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey


def uri(who: Certified) -> str:
    return f"p2pcast://{who.run.hex()}/{who.role}/{who.node.hex()}"


def fingerprint(certificate: bytes) -> bytes:
    """SHA-256 of a certificate, which a join token pins."""
    return hashlib.sha256(certificate).digest()


def key_print(key: PublicKey) -> str:
    """Names a public key."""
    plain = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(plain).hexdigest()


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP256R1())


def request(key: Key) -> bytes:
    """A PKCS#10 request, DER: it proves that the key is ours; names are for the authority to give."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def requested_key(csr: bytes) -> PublicKey:
    """The key of a request, whose sender has proved to hold it. Raises RefusedError."""
    try:
        found = x509.load_der_x509_csr(csr)
        key = found.public_key()
        proved = found.is_signature_valid
    except (ValueError, UnsupportedAlgorithm, InvalidSignature):
        raise RefusedError("that is not a certificate request") from None
    if not proved:
        raise RefusedError("the certificate request is not signed by its own key")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise RefusedError("the certificate request is not for a P-256 key")
    return key


def load(certificate: bytes) -> x509.Certificate:
    """From DER. Raises RefusedError."""
    try:
        return x509.load_der_x509_certificate(certificate)
    except ValueError:
        raise RefusedError("the other side's certificate cannot be read") from None


def held_key(certificate: bytes) -> PublicKey:
    """The key that a certificate is for. Raises RefusedError."""
    key = load(certificate).public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise RefusedError("the other side's certificate is not for a P-256 key")
    return key


def certified(certificate: bytes) -> Certified:
    """Whom a certificate (DER) names. Raises RefusedError."""
    try:
        names = load(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found = [_NAME.fullmatch(name) for name in names.get_values_for_type(x509.UniformResourceIdentifier)]
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        found = []
    if len(found) != 1 or found[0] is None:
        raise RefusedError("the other side's certificate does not name a node of a p2pcast run")
    run, role, node = found[0].groups()
    return Certified(bytes.fromhex(run), bytes.fromhex(node), role)


def valid_at(certificate: bytes, now: float) -> bool:
    """``now`` in Unix seconds."""
    found, at = load(certificate), datetime.datetime.fromtimestamp(now, datetime.UTC)
    return found.not_valid_before_utc <= at <= found.not_valid_after_utc


def check_issued(certificate: bytes, authority: bytes, now: float) -> Certified:
    """Whom ``certificate`` names, once it is shown to be the authority's own work and in force. Raises RefusedError."""
    try:
        load(certificate).verify_directly_issued_by(load(authority))
    except (ValueError, TypeError, InvalidSignature):
        raise RefusedError("the certificate was not issued by this run's authority") from None
    if not valid_at(certificate, now):
        raise RefusedError("the certificate is not in force: one of the two clocks is wrong, or it has expired")
    return certified(certificate)

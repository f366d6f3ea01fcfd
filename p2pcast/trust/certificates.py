"""Contents of certificates and certificate requests (docs/formats/wire-protocol.md, section 2). Pure: time is passed
in.

A certificate names its holder in one URI, ``p2pcast://RUN/ROLE/NODE`` (hexadecimal), for a P-256 key. ``certified``
returns the one well-formed name or raises RefusedError. It verifies no signature; TLS does that, or ``check_issued``.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from typing import get_args

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from p2pcast.ground.errors import RefusedError, RetryableError
from p2pcast.trust.dial_permissions import Certified, Role

_NAME = re.compile(rf"p2pcast://([0-9a-f]{{32}})/({'|'.join(get_args(Role))})/([0-9a-f]{{32}})", re.ASCII)

Key = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey


def uri(who: Certified) -> str:
    return f"p2pcast://{who.run.hex()}/{who.role}/{who.node.hex()}"


def fingerprint(certificate: bytes) -> bytes:
    """Return the SHA-256 of a certificate (DER). A join token pins the authority's."""
    return hashlib.sha256(certificate).digest()


def key_print(key: PublicKey) -> str:
    """SHA-256 of a public key, in hexadecimal."""
    plain = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(plain).hexdigest()


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP256R1())


def request(key: Key) -> bytes:
    """A PKCS#10 request (DER) without a name. Its signature proves possession of the key; the authority sets the
    name.
    """
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def requested_key(csr: bytes) -> PublicKey:
    """Return a request's public key, after verifying that its sender has the private key. Raises RefusedError."""
    try:
        found = x509.load_der_x509_csr(csr)
        key = found.public_key()
        proved = found.is_signature_valid
    except (ValueError, UnsupportedAlgorithm, InvalidSignature):
        raise RefusedError("the request for a certificate is not valid PKCS#10") from None
    if not proved:
        raise RefusedError("the certificate request is not signed by its own key")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise RefusedError("the certificate request is not for a P-256 key")
    return key


def load(certificate: bytes) -> x509.Certificate:
    """Parse a certificate in DER. Raises RefusedError."""
    try:
        return x509.load_der_x509_certificate(certificate)
    except ValueError:
        raise RefusedError("the other side's certificate cannot be read") from None


def held_key(certificate: bytes) -> PublicKey:
    """The public key in a certificate. Raises RefusedError."""
    key = load(certificate).public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise RefusedError("the other side's certificate is not for a P-256 key")
    return key


def certified(certificate: bytes) -> Certified:
    """The holder named in a certificate (DER). Raises RefusedError."""
    try:
        names = load(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found = [_NAME.fullmatch(name) for name in names.get_values_for_type(x509.UniformResourceIdentifier)]
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        found = []
    if len(found) != 1 or found[0] is None:
        raise RefusedError("the other side's certificate does not name a node of a p2pcast run")
    run, role, node = found[0].groups()
    return Certified(bytes.fromhex(run), bytes.fromhex(node), role)


_TIME = "%Y-%m-%d %H:%M UTC"


def shown_time(unix_s: float) -> str:
    return f"{datetime.datetime.fromtimestamp(unix_s, datetime.UTC):{_TIME}}"


def valid_at(certificate: bytes, now: float) -> bool:
    """Whether a certificate (DER) is within its validity period. ``now`` in Unix seconds."""
    found, at = load(certificate), datetime.datetime.fromtimestamp(now, datetime.UTC)
    return found.not_valid_before_utc <= at <= found.not_valid_after_utc


def check_issued(certificate: bytes, authority: bytes, now: float) -> Certified:
    """Return the holder of ``certificate``, if ``authority`` issued it and it is valid now. Raises RefusedError, and
    RetryableError if a clock may be wrong.
    """
    try:
        load(certificate).verify_directly_issued_by(load(authority))
    except (ValueError, TypeError, InvalidSignature):
        raise RefusedError("the certificate was not issued by this run's authority") from None
    for name, one in (("certificate", certificate), ("run's authority", authority)):
        if not valid_at(one, now):
            found = load(one)
            raise RetryableError(
                f"the {name} is valid from {found.not_valid_before_utc:{_TIME}} to {found.not_valid_after_utc:{_TIME}},"
                f" and this machine's clock says {shown_time(now)}: set the clocks of both machines (NTP)"
            )
    return certified(certificate)

"""Certificates of the authority, credentials made of them, and refused certificates."""

from __future__ import annotations

import datetime
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID

from p2pcast.ground.errors import LocalError, RefusedError, RetryableError
from p2pcast.trust.certificate_authority import Authority
from p2pcast.trust.certificates import (
    certified,
    check_issued,
    key_print,
    new_key,
    request,
    requested_key,
    uri,
    valid_at,
)
from p2pcast.trust.credentials import Credentials, pinned, received
from p2pcast.trust.dial_permissions import Certified

NOW = 1_800_000_000.0
DAY_S = 86400.0
RUN = b"r" * 16
PEER = Certified(RUN, b"p" * 16, "peer")
HUB = Certified(RUN, b"h" * 16, "hub")


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create(RUN, NOW)


def credentials(authority: Authority, who: Certified = PEER, lifetime_s: float = 900.0) -> Credentials:
    key = new_key()
    issued = authority.issue(requested_key(request(key)), who, NOW, lifetime_s)
    return received(key, issued, authority.certificate, who, NOW)


def test_a_certificate_names_its_holder_only(authority):
    mine = credentials(authority)
    found = x509.load_der_x509_certificate(mine.certificate)
    assert mine.who == certified(mine.certificate) == PEER
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert found.not_valid_after_utc.timestamp() == NOW + 900 == mine.until


def test_trainers_and_workers_may_not_be_servers(authority):
    for role, server in (("hub", True), ("peer", True), ("trainer", False), ("worker", False), ("ledger", True)):
        mine = credentials(authority, Certified(RUN, b"n" * 16, role))
        usage = (
            x509.load_der_x509_certificate(mine.certificate)
            .extensions.get_extension_for_class(x509.ExtendedKeyUsage)
            .value
        )
        assert (ExtendedKeyUsageOID.SERVER_AUTH in usage) == server
        assert ExtendedKeyUsageOID.CLIENT_AUTH in usage


def test_renewal_is_due_long_before_a_certificate_ends(authority):
    mine = credentials(authority, lifetime_s=900)
    assert [mine.due(NOW + s) for s in (0, 299, 300, 899)] == [False, False, True, True]
    assert [mine.in_force(NOW + s) for s in (0, 899, 901)] == [True, True, False]


def test_a_certificate_is_valid_for_slow_clocks(authority):
    mine = credentials(authority)
    assert [valid_at(mine.certificate, NOW + s) for s in (-8 * DAY_S, -6 * DAY_S, 0, 899, 901)] == [
        False,
        True,
        True,
        True,
        False,
    ]


def test_another_authoritys_certificate_is_refused(authority):
    other = Authority.create(RUN, NOW)
    forged = credentials(other)
    with pytest.raises(RefusedError, match="not issued by this run's authority"):
        check_issued(forged.certificate, authority.certificate, NOW)
    with pytest.raises(RefusedError):
        received(forged.key, forged.certificate, authority.certificate, PEER, NOW)


@pytest.mark.parametrize("wrong_s", [901.0, 400 * DAY_S, -8 * DAY_S])
def test_disagreement_of_clocks_is_retried_and_names_both(authority, wrong_s):
    mine, clock = credentials(authority), datetime.datetime.fromtimestamp(NOW + wrong_s, datetime.UTC)
    said = f"is valid from .* to .*, and this machine's clock says {clock:%Y-%m-%d %H:%M} UTC: set the clocks"
    with pytest.raises(RetryableError, match=said):
        check_issued(mine.certificate, authority.certificate, NOW + wrong_s)
    assert mine.due(NOW + wrong_s)


def test_an_authority_of_a_clock_far_ahead_is_in_force_once_the_clock_is_right():
    ahead = Authority.create(RUN, NOW + 400 * DAY_S)
    key = new_key()
    issued = ahead.issue(key.public_key(), PEER, NOW, 900.0)
    assert received(key, issued, ahead.certificate, PEER, NOW - 2 * DAY_S).who == PEER


def test_a_certificate_for_another_node_is_refused(authority):
    key = new_key()
    for who, used in ((HUB, key), (Certified(RUN, b"q" * 16, "peer"), key), (PEER, new_key())):
        issued = authority.issue(used.public_key(), who, NOW, 60)
        with pytest.raises(RefusedError, match="another node, role or key"):
            received(key, issued, authority.certificate, PEER, NOW)


def test_a_peer_can_not_issue(authority):
    """A peer's certificate is no authority's, so certificates signed with its key have no valid chain."""
    mine = credentials(authority)
    name = x509.load_der_x509_certificate(mine.certificate).subject
    day = datetime.timedelta(days=1)
    at = datetime.datetime.fromtimestamp(NOW, datetime.UTC)
    forged = x509.CertificateBuilder(name, name, new_key().public_key(), 7, at - day, at + day)
    forged = forged.add_extension(
        x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri(HUB))]), critical=False
    )
    der = forged.sign(mine.key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)
    with pytest.raises(RefusedError):
        check_issued(der, authority.certificate, NOW)


def test_a_first_connection_knows_its_hub_by_the_pin(authority):
    hub, peer = credentials(authority, HUB), credentials(authority)
    pin = authority.fingerprint
    assert pinned(hub.certificate, authority.certificate, pin, RUN, NOW) == HUB
    other = Authority.create(RUN, NOW)
    theirs = credentials(other, HUB)
    for leaf, shown, text in (
        (theirs.certificate, other.certificate, "another run's hub"),
        (theirs.certificate, authority.certificate, "not issued"),
        (hub.certificate, other.certificate, "another run's hub"),
        (peer.certificate, authority.certificate, "not the hub"),
        (hub.certificate, b"junk", "another run's hub"),
        (b"junk", authority.certificate, "cannot be read"),
    ):
        with pytest.raises(RefusedError, match=text):
            pinned(leaf, shown, pin, RUN, NOW)
    with pytest.raises(RefusedError):
        pinned(hub.certificate, authority.certificate, pin, b"R" * 16, NOW)


def _request(key, **options) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, options.get("hash", hashes.SHA256())).public_bytes(serialization.Encoding.DER)


def test_requests_that_prove_nothing_are_refused():
    good = _request(new_key())
    for csr, text in (
        (b"", "not valid PKCS#10"),
        (good[:-1], "not valid PKCS#10"),
        (good[:-1] + bytes([good[-1] ^ 1]), "not signed by its own key"),
        (_request(ec.generate_private_key(ec.SECP384R1())), "not for a P-256 key"),
        (_request(ed25519.Ed25519PrivateKey.generate(), hash=None), "not for a P-256 key"),
    ):
        with pytest.raises(RefusedError, match=text):
            requested_key(csr)
    assert key_print(requested_key(good))


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["https://example.org"],
        [uri(PEER), uri(HUB)],
        [uri(PEER) + "0"],
        [uri(PEER).replace("/peer/", "/root/")],
        [uri(PEER).replace("p2pcast", "p2pcasT")],
    ],
)
def test_certificates_with_other_names_are_refused(authority, names):
    key, at = new_key(), datetime.datetime.fromtimestamp(NOW, datetime.UTC)
    builder = x509.CertificateBuilder(
        x509.Name([]), x509.Name([]), key.public_key(), 7, at, at + datetime.timedelta(days=1)
    )
    if names:
        found = [x509.UniformResourceIdentifier(n) for n in names]
        builder = builder.add_extension(x509.SubjectAlternativeName(found), critical=False)
    with pytest.raises(RefusedError, match="does not name a node"):
        certified(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER))


def test_key_files_are_private(tmp_path: Path, authority):
    made = Authority.load_or_create(tmp_path / "authority.pem", RUN, NOW)
    again = Authority.load_or_create(tmp_path / "authority.pem", RUN, NOW + 5)
    assert again.fingerprint == made.fingerprint
    mine = credentials(authority)
    mine.save(tmp_path / "link.pem")
    found = Credentials.load(tmp_path / "link.pem")
    assert (found.who, found.certificate, found.authority) == (mine.who, mine.certificate, mine.authority)
    for name in ("authority.pem", "link.pem"):
        path = tmp_path / name
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o640)
        with pytest.raises(LocalError, match="chmod 600"):
            Credentials.load(path)
        path.chmod(0o600)


@pytest.mark.parametrize("contents", [b"", b"-----BEGIN PRIVATE KEY-----\n", None])
def test_a_damaged_file_is_named(tmp_path: Path, authority, contents):
    path = tmp_path / "link.pem"
    mine = credentials(authority)
    mine.save(path)
    if contents is None:
        other = credentials(authority)
        contents = other.pem().split(b"-----BEGIN CERT")[0] + mine.pem()[mine.pem().index(b"-----BEGIN CERT") :]
    path.write_bytes(contents)
    with pytest.raises(LocalError, match=r"link\.pem is damaged"):
        Credentials.load(path)


def test_reprs_hold_no_key(authority):
    mine = credentials(authority)
    number = mine.key.private_numbers().private_value
    for shown in (repr(mine), repr(authority)):
        assert str(number) not in shown
        assert f"{number:x}" not in shown

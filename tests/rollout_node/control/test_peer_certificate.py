from __future__ import annotations

import time

import pytest
from recorder import blocking

from p2pcast.ground.errors import RefusedError, RetryableError, UntrustedError
from p2pcast.trust.certificate_authority import Authority
from p2pcast.trust.certificates import fingerprint, key_print, new_key
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.dial_permissions import Certified
from p2pcast.trust.join_token import JoinToken
from rollout_node.control import peer_certificate as module
from rollout_node.control.peer_certificate import FILE, PeerCertificate

RUN, NODE, LIFE_S = bytes(16), b"n" * 16, 900.0
WHO = Certified(RUN, NODE, "peer")


class Hub:
    """Issues certificates to those that enrol, or answers with an error."""

    def __init__(self, monkeypatch) -> None:
        self.authority = Authority.create(RUN, time.time())
        self.error: Exception | None = None
        self.keys, self.timeouts_s = [], []
        monkeypatch.setattr(module, "enrol", self._enrol)

    def issue(self, key, at=None, life_s=LIFE_S):
        return self.authority.issue(key.public_key(), WHO, time.time() if at is None else at, life_s)

    def credentials(self, age_s=0.0, life_s=LIFE_S) -> Credentials:
        key, begun = new_key(), time.time() - age_s
        return Credentials(key, self.issue(key, begun, life_s), self.authority.certificate, begun)

    async def _enrol(self, host, port, token, node, name, role, key, *, timeout_s):
        self.keys.append(key)
        self.timeouts_s.append(timeout_s)
        if self.error is not None:
            raise self.error
        return Credentials(key, self.issue(key), self.authority.certificate, time.time())


@pytest.fixture
def hub(monkeypatch) -> Hub:
    return Hub(monkeypatch)


def peer(hub, folder, *, address=("hub", 1), node=NODE) -> PeerCertificate:
    token = JoinToken(RUN, bytes(20), fingerprint(hub.authority.certificate))
    return PeerCertificate(folder, address, token, node, "a", blocking)


async def holding(hub, folder, credentials) -> PeerCertificate:
    credentials.save(folder / FILE)
    made = peer(hub, folder)
    made._use(credentials)
    return made


async def test_a_newcomer_enrols_and_keeps_its_certificate(hub, tmp_path):
    made = peer(hub, tmp_path)
    await made.load()
    assert made.until is None
    assert made.request() is None
    await made.ready()
    assert made.until > time.time()
    again = peer(hub, tmp_path)
    await again.load()
    await again.ready()
    assert again.until == made.until
    assert len(hub.keys) == 1


async def test_unanswered_requests_have_one_key_and_more_and_more_time(hub, tmp_path):
    """Also when the peer starts again in between."""
    hub.error = RetryableError("no certificate within 5 s")
    for _ in range(2):
        made = peer(hub, tmp_path)
        await made.load()
        for _ in range(8):
            with pytest.raises(RetryableError):
                await made.ready()
    assert len({key_print(key.public_key()) for key in hub.keys}) == 1
    assert hub.timeouts_s[:8] == [5.0, 10.0, 20.0, 40.0, 80.0, 80.0, 80.0, 80.0]


async def test_a_certificate_of_another_node_is_not_used(hub, tmp_path):
    hub.credentials().save(tmp_path / FILE)
    made = peer(hub, tmp_path, node=b"m" * 16)
    await made.load()
    assert made.until is None


async def test_a_peer_without_a_hub_asks_for_no_certificate(hub, tmp_path):
    made = peer(hub, tmp_path, address=None)
    await made.ready()
    assert hub.keys == []


async def test_an_expired_certificate_is_requested_anew_with_the_same_key(hub, tmp_path):
    old = hub.credentials(age_s=LIFE_S + 60)
    made = await holding(hub, tmp_path, old)
    await made.ready()
    assert [key.private_numbers() for key in hub.keys] == [old.key.private_numbers()]
    assert made.until > time.time()


async def test_the_next_certificate_is_requested_after_a_third_of_its_life(hub, tmp_path):
    assert (await holding(hub, tmp_path, hub.credentials(age_s=LIFE_S / 4))).request() is None
    due = await holding(hub, tmp_path, hub.credentials(age_s=LIFE_S / 2))
    assert due.request() is not None
    assert due.request() is None  # the answer is waited for


async def test_the_hubs_answer_replaces_the_certificate(hub, tmp_path):
    made = await holding(hub, tmp_path, hub.credentials(age_s=LIFE_S / 2))
    before, key = made.until, made._kept.held.key
    made.request()
    await made.take(hub.issue(key))
    assert made.until > before
    assert not made.renewal_refused()
    again = peer(hub, tmp_path)
    await again.load()
    assert again.until == made.until


async def test_an_answer_for_another_key_is_refused(hub, tmp_path):
    made = await holding(hub, tmp_path, hub.credentials())
    with pytest.raises(RefusedError):
        await made.take(hub.issue(new_key()))


async def test_an_answer_without_a_certificate_before_is_ignored(hub, tmp_path):
    await peer(hub, tmp_path).take(b"")


async def test_a_refusal_counts_for_the_renewal_only_while_one_is_requested(hub, tmp_path):
    made = await holding(hub, tmp_path, hub.credentials(age_s=LIFE_S / 2))
    assert not made.renewal_refused()
    made.request()
    assert made.renewal_refused()
    assert not made.renewal_refused()
    await made.ready()  # as a newcomer does
    assert len(hub.keys) == 1


async def test_a_newcomer_that_is_refused_ends(hub, tmp_path):
    hub.error = RefusedError("the token was used up")
    with pytest.raises(RefusedError):
        await peer(hub, tmp_path).ready()


async def test_a_peer_in_the_run_goes_on_with_its_certificate_after_a_refusal(hub, tmp_path, caplog):
    made = await holding(hub, tmp_path, hub.credentials(age_s=LIFE_S / 2))
    hub.error = RefusedError("the token was used up")
    for _ in range(2):
        made._asked_at = 0.0
        assert made.request() is not None
        assert made.renewal_refused()
        await made.ready()
        assert made.request() is None  # not at once again
    assert caplog.text.count("the token was used up") == 1


async def test_a_peer_in_the_run_retries_once_its_certificate_has_expired(hub, tmp_path):
    made = await holding(hub, tmp_path, hub.credentials(age_s=LIFE_S / 2))
    hub.error = RefusedError("no")
    made._use(hub.credentials(age_s=LIFE_S + 60))
    with pytest.raises(RetryableError, match="no certificate: no"):
        await made.ready()


async def test_an_untrusted_hub_is_never_asked_again_in_silence(hub, tmp_path):
    made = await holding(hub, tmp_path, hub.credentials(age_s=LIFE_S / 2))
    made.request()
    made.renewal_refused()
    hub.error = UntrustedError("another authority")
    with pytest.raises(UntrustedError):
        await made.ready()

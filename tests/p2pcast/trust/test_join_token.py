"""Tokens: text and back, and nothing of the secret in an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.errors import UsageError
from p2pcast.trust.join_token import JoinToken


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=20, max_size=20))
def test_round_trip(run, secret):
    token = JoinToken(run, secret)
    text = str(token)
    assert text == text.lower()
    assert "=" not in text
    assert JoinToken.parse(text) == token
    assert JoinToken.parse(f"  {text}\n") == token
    assert JoinToken.parse(f"\ufeff{text}\r\n") == token, "as editors of Windows write it"
    assert len(token.ident) == 8


def test_format():
    assert str(JoinToken(bytes(16), bytes(20))) == "p2pc1-" + "a" * 26 + "-" + "a" * 32


GOOD = str(JoinToken(bytes(range(16)), bytes(range(20))))
PINNING = str(JoinToken(bytes(range(16)), bytes(range(20)), bytes(range(32))))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "p2pc1-x",
        "p2pc1--",
        GOOD[:-1],
        GOOD[:-8],
        GOOD + "aa",
        GOOD.replace("p2pc1", "p2pc2"),
        GOOD + "-a",
        GOOD.replace("b", "1"),
        "ü" + GOOD,
        GOOD[:-3] + "é!?",
    ],
)
def test_an_invalid_token_is_not_repeated_in_its_error(text):
    with pytest.raises(UsageError) as wrong:
        JoinToken.parse(text)
    said = str(wrong.value)
    assert "token" in said
    assert len(text) < 8 or text not in said
    assert GOOD.split("-")[2][:8] not in said
    assert wrong.value.__suppress_context__ or wrong.value.__context__ is None


@given(st.text(max_size=80))
def test_any_text(text):
    try:
        JoinToken.parse(text)
    except UsageError:
        pass


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=20, max_size=20), st.binary(min_size=32, max_size=32))
def test_a_token_that_pins_an_authority_survives_a_round_trip(run, secret, authority):
    token = JoinToken(run, secret, authority)
    assert JoinToken.parse(str(token)) == token
    assert str(token).startswith(str(JoinToken(run, secret)) + "-")
    assert token.ident == JoinToken(run, secret).ident
    with pytest.raises(UsageError, match="cut short"):
        JoinToken.parse(str(token)[:-8])


@pytest.mark.parametrize("good", [GOOD, PINNING])
def test_a_token_has_one_text(good):
    """Base32 ignores up to four bits of the last letter of a part."""
    token = JoinToken.parse(good)
    for place, known in enumerate(good):
        for letter in "abcdefghijklmnopqrstuvwxyz234567".replace(known, ""):
            try:
                found = JoinToken.parse(good[:place] + letter + good[place + 1 :])
            except UsageError:
                continue
            assert found != token
    assert JoinToken.parse(good.upper()) == token


def test_plain_text_and_tls_are_not_mixed_up():
    plain, pinning = JoinToken(bytes(16), bytes(20)), JoinToken(bytes(16), bytes(20), bytes(32))
    plain.check_links(plaintext=True)
    pinning.check_links(plaintext=False)
    with pytest.raises(UsageError, match="leave --plaintext out"):
        pinning.check_links(plaintext=True)
    with pytest.raises(UsageError, match="was started with --plaintext"):
        plain.check_links(plaintext=False)

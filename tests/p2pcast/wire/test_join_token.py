"""Tokens: text and back, and nothing of the secret in an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.errors import UsageError
from p2pcast.wire.join_token import JoinToken


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


OLD = "p2pc1-" + "a" * 26 + "-" + "a" * 32
"""A token as p2pcast 0.1 wrote it, without a check sum."""


def test_format():
    assert str(JoinToken(bytes(16), bytes(20))) == OLD + "-huutqbde"
    assert JoinToken.parse(OLD) == JoinToken(bytes(16), bytes(20))


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
    assert str(token).startswith(str(JoinToken(run, secret))[:-9] + "-")
    assert token.ident == JoinToken(run, secret).ident
    with pytest.raises(UsageError, match="cut short"):
        JoinToken.parse(str(token)[:-17])


@given(st.integers(0, len(GOOD) - 1), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567-"))
@pytest.mark.parametrize("good", [GOOD, PINNING])
def test_each_typing_error_is_refused(good, place, letter):
    """The last letter of each part too, of which base32 ignores up to four bits."""
    typed = good[:place] + letter + good[place + 1 :]
    if typed != good:
        with pytest.raises(UsageError):
            JoinToken.parse(typed)
    if place + 1 < len(good) and good[place] != good[place + 1]:
        with pytest.raises(UsageError):
            JoinToken.parse(good[:place] + good[place + 1] + good[place] + good[place + 2 :])


def test_a_token_of_0_1_has_one_text():
    run, secret = OLD.split("-")[1:]
    with pytest.raises(UsageError, match="a letter of the join token is wrong"):
        JoinToken.parse(f"p2pc1-{run[:-1]}b-{secret}")


def test_plain_text_and_tls_are_not_mixed_up():
    plain, pinning = JoinToken(bytes(16), bytes(20)), JoinToken(bytes(16), bytes(20), bytes(32))
    plain.check_links(plaintext=True)
    pinning.check_links(plaintext=False)
    with pytest.raises(UsageError, match="leave --plaintext out"):
        pinning.check_links(plaintext=True)
    with pytest.raises(UsageError, match="was started with --plaintext"):
        plain.check_links(plaintext=False)

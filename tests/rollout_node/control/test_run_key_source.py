from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from p2pcast.ground.errors import RefusedError, RetryableError, UntrustedError
from rollout_node.control import run_key_source as run_key
from rollout_node.control.run_key_source import KnownRunKey, RunKeySource

KEY, OTHER = bytes(range(32)), bytes(32)


class Saved:
    def __init__(self, key=None) -> None:
        self.key = key
        self.kept = []

    async def keep_key(self, key) -> None:
        self.kept.append(key)


class Welcome:
    def __init__(self) -> None:
        self.expected = None

    def expect(self):
        self.expected = asyncio.get_running_loop().create_future()
        return self.expected

    def stop_expecting(self) -> None:
        self.expected = None

    def check_key(self, key) -> None:
        if key == OTHER:
            raise RefusedError("the token pins another")


class Hub:
    """Answers each attempt to join as a script says: a key, an error, or nothing at all (None)."""

    def __init__(self, welcome, *script) -> None:
        self.welcome, self.script, self.hung_up = welcome, list(script), 0

    async def connect(self) -> None:
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            self.welcome.expected.set_result(SimpleNamespace(key=answer))

    def hang_up(self) -> None:
        self.hung_up += 1


def source(*script, kept=None, mirror=None, timeout_s=600.0, has_hub=True):
    welcome, saved = Welcome(), Saved(kept)
    hub = Hub(welcome, *script)

    async def read_mirror():
        if isinstance(mirror, Exception):
            raise mirror
        return mirror

    made = RunKeySource(saved, hub if has_hub else None, welcome, None if mirror is None else read_mirror, timeout_s)
    return made, saved, hub


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(run_key, "REDIAL_MIN_S", 0.001)
    monkeypatch.setattr(run_key, "REDIAL_MAX_S", 0.002)


AWAY = RetryableError("the hub is out of reach")


async def test_the_hubs_key_is_saved_before_use():
    made, saved, _ = source(KEY)
    assert await made.obtain() == KnownRunKey(KEY)
    assert saved.kept == [KEY]


async def test_a_key_that_the_token_does_not_pin_is_refused():
    made, saved, _ = source(OTHER)
    with pytest.raises(RefusedError):
        await made.obtain()
    assert saved.kept == []


async def test_a_first_join_retries_and_says_so_once(caplog):
    made, _, hub = source(AWAY, AWAY, AWAY, KEY)
    assert await made.obtain() == KnownRunKey(KEY)
    assert hub.script == []
    assert caplog.text.count("trying for 600 s") == 1


async def test_a_first_join_without_a_limit_says_so(caplog):
    made, _, _ = source(AWAY, KEY, timeout_s=0.0)
    await made.obtain()
    assert "trying until it answers" in caplog.text


async def test_a_first_join_gives_up_after_its_time():
    made, _, _ = source(*[AWAY] * 1000, timeout_s=0.01)
    with pytest.raises(RetryableError, match="out of reach"):
        await made.obtain()


async def test_a_hub_that_does_not_answer_is_left(monkeypatch):
    monkeypatch.setattr(run_key, "WELCOME_S", 0.01)
    made, _, hub = source(None, KEY)
    assert await made.obtain() == KnownRunKey(KEY)
    assert hub.hung_up == 1


async def test_a_peer_that_knows_the_key_starts_without_the_hub():
    made, saved, hub = source(AWAY, KEY, kept=KEY)
    assert await made.obtain() == KnownRunKey(KEY, resumed=True)
    assert hub.script == [KEY]
    assert saved.kept == [KEY]


async def test_a_peer_that_knows_the_key_turns_to_its_mirror_at_once():
    made, _, _ = source(AWAY, kept=KEY, mirror=KEY)
    assert await made.obtain() == KnownRunKey(KEY, resumed=True, mirror_now=True)


async def test_an_untrusted_hub_stops_a_first_join_alone():
    made, _, _ = source(UntrustedError("not the hub"))
    with pytest.raises(UntrustedError):
        await made.obtain()
    made, _, _ = source(UntrustedError("not the hub"), kept=KEY)
    assert (await made.obtain()).resumed


async def test_a_first_join_without_a_hub_goes_on_with_the_mirror(caplog):
    made, _, _ = source(AWAY, mirror=KEY)
    assert await made.obtain() == KnownRunKey(KEY, mirror_now=True)
    assert "going on with the mirror" in caplog.text


async def test_a_run_without_a_hub_reads_the_mirror():
    made, _, _ = source(mirror=KEY, has_hub=False)
    assert await made.obtain() == KnownRunKey(KEY, mirror_now=True)


async def test_a_run_without_a_hub_and_with_its_mirror_away_needs_a_saved_key():
    made, _, _ = source(mirror=AWAY, has_hub=False)
    with pytest.raises(RetryableError):
        await made.obtain()
    made, _, _ = source(mirror=AWAY, has_hub=False, kept=KEY)
    assert await made.obtain() == KnownRunKey(KEY, resumed=True, mirror_now=True)

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_holding import FakeHolding, FakeNode

from p2pcast.ground.errors import RetryableError
from p2pcast.ground.version import Version
from rollout_node.shadow.shadow_state import HeldShadow, ShadowState

V = [Version(0, n) for n in range(10)]


class Shadow:
    def __init__(self, *patches) -> None:
        self.path, self.patches = Path("shadow"), [V[p] for p in patches]
        self.layout, self.digests = SimpleNamespace(document=b"layout"), "digests"
        self.closed = False

    def patch_path(self, version) -> Path:
        return Path(f"patch-{version}")

    def close(self) -> None:
        self.closed = True


def state(staged=3, shadow=None) -> ShadowState:
    made = ShadowState()
    made.shadow, made.staged = shadow or Shadow(), V[staged]
    return made


async def test_without_a_version_readers_hold_nothing():
    async with ShadowState().held_still() as held:
        assert held is None
    made = state()
    made.staged = None  # the shadow is not verified yet
    async with made.held_still() as held:
        assert held is None


async def test_the_shadow_moves_only_without_a_reader():
    made, order = state(), []

    async def move() -> None:
        async with made.moving(lambda version: True):
            order.append("moved")

    async with made.held_still() as held:
        assert held == (V[3], Path("shadow"))
        task = asyncio.create_task(move())
        for _ in range(5):
            await asyncio.sleep(0)
        order.append("read")
    await task
    assert order == ["read", "moved"]


async def test_the_shadow_stays_until_released():
    made, allowed = state(), False

    async def move() -> None:
        async with made.moving(lambda version: allowed and version == V[3]):
            pass

    task = asyncio.create_task(move())
    await made.recheck()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    allowed = True
    await made.recheck()
    await task


async def test_waiting_ends_with_a_reader_or_with_the_time():
    made = state()
    await made.wait(0.0)
    waiting = asyncio.create_task(made.wait(600.0))
    await asyncio.sleep(0)
    async with made.held_still():
        pass
    await waiting


def test_closing_closes_the_shadow():
    shadow = Shadow()
    state(shadow=shadow).close()
    ShadowState().close()
    assert shadow.closed


def reader(shadow, staged, *holdings) -> HeldShadow:
    return HeldShadow(state(staged, shadow), FakeNode(*holdings))


CHAIN = [FakeHolding(n, n + 1, complete=True) for n in range(5)]


def test_patches_lead_from_one_version_to_the_next():
    made = reader(Shadow(1, 2, 3), 3, *CHAIN)
    assert made.patches(V[1], V[3]) == [Path("patch-0.2"), Path("patch-0.3")]
    assert not made.is_dense(V[1], V[3])
    assert made.patches(V[3], V[3]) == []


@pytest.mark.parametrize(
    ("base", "patches", "holdings"),
    [
        (None, (1, 2, 3), CHAIN),  # an engine without a version
        (0, (2, 3), CHAIN),  # the patch to 0.1 is gone
        (1, (1, 2, 3), [CHAIN[2]]),  # the delta to 0.2 is gone
        (1, (1, 2, 3), [CHAIN[2], FakeHolding(None, 2)]),  # 0.2 came as a whole state
    ],
)
def test_where_no_patches_lead_the_whole_shadow_is_given(base, patches, holdings):
    made = reader(Shadow(*patches), 3, *holdings)
    assert made.patches(None if base is None else V[base], V[3]) == Path("shadow")
    assert made.is_dense(None if base is None else V[base], V[3])


def test_only_the_staged_version_is_given():
    with pytest.raises(RetryableError, match=r"0\.2 is not staged"):
        reader(Shadow(1, 2, 3), 3, *CHAIN).patches(V[1], V[2])


def test_layout_and_digests_match_the_shadow():
    made = reader(Shadow(), 3)
    assert made.layout_document() == b"layout"
    assert made.digests().cells == "digests"
    assert made.staged == V[3]
    empty = HeldShadow(ShadowState(), FakeNode())
    for ask in (empty.layout_document, empty.digests):
        with pytest.raises(RetryableError, match="no version yet"):
            ask()

"""A version is announced as sealed only once the store has it; a failing store ends the hub."""

from __future__ import annotations

import asyncio

import pytest
from parts import Background, Encoder, emitted

from p2pcast.ground.errors import LocalError, RemoteError, RetryableError
from p2pcast.ground.version import Version
from trainer_node.commit.barrier import Opened, Sealed, VersionAborted

V = Version


async def test_observers_and_peers_hear_of_each_step_of_a_version(encoder: Encoder, background: Background) -> None:
    seen = []
    encoder.sealer.observers.append(seen.append)
    await encoder.publish(0)
    await encoder.publish(1)
    await background.settle()
    assert seen == [Opened(V(0, 1)), Sealed(V(0, 1))], "a whole state is reported by the lifecycle"
    assert encoder.announcer.announced == [(V(0, 1), False), (V(0, 1), True)]
    assert [e["version"] for e in emitted(encoder.events, "sealed")] == ["0.1"]


async def test_a_version_that_cannot_be_stored_ends_the_hub_and_its_publisher(encoder: Encoder, monkeypatch) -> None:
    await encoder.publish(0)

    def full(*_: object) -> None:
        raise LocalError("no space is left")

    monkeypatch.setattr(encoder.store, "seal", full)
    with pytest.raises(LocalError, match="no space is left"):
        await encoder.publish(1)
    assert encoder.sealer.failed
    assert emitted(encoder.events, "sealed") == []
    encoder.sealer.fail(LocalError("a later error does not count"))
    assert "no space" in str(encoder.node.error.exception())


async def test_a_bug_in_sealing_reaches_the_publisher_too(encoder: Encoder, background, monkeypatch) -> None:
    await encoder.publish(0)

    def broken(*_: object) -> None:
        raise KeyError("by a test")

    monkeypatch.setattr(encoder.store, "seal", broken)
    with pytest.raises(LocalError, match="could not be sealed: KeyError"):
        await encoder.publish(1)
    with pytest.raises(KeyError):
        await background.settle()
    assert not encoder.sealer.failed


async def test_an_aborted_version_is_withdrawn_and_its_log_removed(encoder: Encoder, background: Background) -> None:
    class Aborting:
        async def encode(self, shadow, builder, choice):
            await asyncio.sleep(0)
            raise RetryableError("given up")

    await encoder.publish(0)
    seen = []
    encoder.sealer.observers.append(seen.append)
    with pytest.raises(RetryableError):
        await encoder.pipeline.publish(V(0, 1), encoder.shadow.shadow.layout, Aborting())
    await background.settle()
    assert seen == [Opened(V(0, 1)), VersionAborted(V(0, 1))]
    assert emitted(encoder.events, "aborted") == [{"version": "0.1"}]
    assert list((encoder.folder / "store" / "partial").iterdir()) == []


async def test_a_hub_takes_no_artifacts_from_others(encoder: Encoder) -> None:
    with pytest.raises(RemoteError):
        encoder.sealer.make_log(None, None, excerpt=False)

"""A publisher's answers to a hub that aborts, disconnects, falls silent, does not read, or is missing. The test plays
the hub, over real sockets.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from p2pcast.codec.layout import Layout
from p2pcast.ground.errors import RefusedError, RetryableError, UsageError
from p2pcast.ground.version import Version
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire import messages
from p2pcast.wire.connection import Message
from p2pcast.wire.messages import Type
from tests.support.until import wait_until
from trainer_node import Publisher
from trainer_node.sdk import hub_connection, publisher
from trainer_node.sdk.hub_connection import Received


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def made(played, thread):
    """A publisher of one rank at the played hub."""
    making: Future[Publisher] = thread.submit(Publisher, played.address, token_file=played.token)
    played.ranked()
    with making.result() as one:
        yield one


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"a": torch.full((300,), value), "b": torch.full((5, 7), value + 1)}


def begun(played, serial: int, version: tuple[int, int], base: tuple[int, int] | None = None) -> None:
    played.received_of(Type.BEGIN, serial)
    played.say(messages.Begun(serial=serial, version=Version(*version), base=base and Version(*base)))


def durable(played, serial: int, version: tuple[int, int]) -> None:
    played.received_of(Type.DONE, serial)
    played.say(messages.Durable(serial=serial, version=Version(*version), bytes=1, changed=2, params=3))


def test_a_version_sends_its_messages_in_order(played, made):
    handle = made.publish(4, tensors())
    begun(played, 0, (0, 4))
    durable(played, 0, (0, 4))
    assert handle.wait_durable(600) == Version(0, 4)
    assert (handle.durable.bytes, handle.durable.changed, handle.durable.params) == (1, 2, 3)
    kinds = [kind for _, kind, _ in played.said]
    assert kinds == [Type.RANK, Type.LAYOUT, Type.BEGIN, Type.CELL, Type.CELL, Type.DONE]
    said = {kind: body for _, kind, body in played.said}
    layout = Layout.from_document(said[Type.LAYOUT].document, said[Type.LAYOUT].layout)
    assert [(t.name, t.dtype) for t in layout.tensors] == [("a", "BF16"), ("b", "BF16")]
    assert said[Type.BEGIN] == messages.Begin(0, 4, layout.layout_id, resume=False)
    assert said[Type.DONE] == messages.Done(0, 2)
    # Against what was stored, a change is coded; the layout is known, and what did not change is not sent.
    changed = tensors()
    changed["b"][2, 2] += 1
    handle = made.resume(4, changed)
    begun(played, 1, (1, 4), (0, 4))
    *whole, cell = played.received(Type.CELL, count=3)
    assert (cell.cell, cell.start, cell.words, cell.changed) == (1, 0, 35, 1)
    assert cell.before == whole[1].after != cell.after
    durable(played, 1, (1, 4))
    assert handle.wait_durable(600) == Version(1, 4)
    assert played.received(Type.BEGIN, count=2)[1].resume is True
    # Marks of unchanged tensors are still known.
    changed["a"][0] += 1
    made.publish(5, changed)
    begun(played, 2, (1, 5), (1, 4))
    assert played.received(Type.CELL, count=4)[3].before == whole[0].after
    durable(played, 2, (1, 5))
    assert len(played.received(Type.LAYOUT)) == 1


def test_another_base_is_answered_with_whole_words(played, made):
    made.publish(1, tensors())
    begun(played, 0, (0, 1))
    durable(played, 0, (0, 1))
    made.publish(2, tensors())
    begun(played, 1, (0, 3), (0, 2))
    assert [cell.before for cell in played.received(Type.CELL, count=4)] == [None] * 4
    durable(played, 1, (0, 3))


def test_an_aborted_version_raises_and_changes_nothing(played, made):
    made.publish(1, tensors())
    begun(played, 0, (0, 1))
    durable(played, 0, (0, 1))
    handle = made.publish(2, tensors(5.0))
    begun(played, 1, (0, 2), (0, 1))
    played.say(messages.Aborted(1, "rank 2 of 4 is gone"))
    handle.wait_snapshot()
    with pytest.raises(RetryableError, match="step 2 was not published: rank 2 of 4 is gone"):
        handle.wait_durable(600)
    with pytest.raises(RetryableError, match="rank 2 of 4"):
        handle.wait_live(timeout_s=600)
    handle = made.publish(3, tensors())
    begun(played, 2, (0, 3), (0, 1))
    durable(played, 2, (0, 3))
    handle.wait_durable(600)
    # The same as version 0.1: nothing to send.
    assert 2 not in {cell.serial for cell in played.received(Type.CELL)}


def test_aborts_are_kept_for_later_ranks():
    """Another rank gives up the next version before this one's thread has looked at the end of the last."""
    received = Received()
    for serial in range(3):
        received.take(Message(Type.ABORTED, messages.Aborted(serial, f"why {serial}")))
    assert received.aborted == {0: "why 0", 1: "why 1", 2: "why 2"}
    received.take(Message(Type.BEGUN, messages.Begun(2, Version(0, 1), base=None)))
    assert received.aborted == {2: "why 2"}


def test_the_codec_that_a_hub_says_or_does_not():
    received = Received()
    for serial, said in enumerate(({}, {"codec": "context"})):
        received.take(Message(Type.BEGUN, messages.Begun(serial, Version(0, 1), base=None, **said)))
        assert received.begun[serial].codec == said.get("codec", "auto")


def test_an_abort_before_anything_began(played, made):
    handle = made.publish(1, tensors())
    played.received(Type.BEGIN)
    played.say(messages.Aborted(0, ""))
    for wait in (handle.wait_begun, handle.wait_durable):
        with pytest.raises(RetryableError, match="not published"):
            wait(600)


def test_the_name_of_a_version_is_waited_for(played, made):
    handle = made.publish(1, tensors())
    handle.wait_snapshot()
    with pytest.raises(RetryableError, match=r"step 1 was not begun by the hub within 0\.01 s"):
        handle.wait_begun(0.01)
    begun(played, 0, (3, 1))
    assert handle.wait_begun(600) == Version(3, 1)
    played.say(messages.Aborted(0, "rank 2 of 4 is gone"))
    with pytest.raises(RetryableError, match="rank 2 of 4"):
        handle.wait_durable(600)
    assert handle.wait_begun() == Version(3, 1)


def test_tensors_that_do_not_fit_free_the_other_ranks(played, made):
    with pytest.raises(UsageError, match="takes names and tensors"):
        made.publish(1, {"a": 3})
    assert played.received(Type.ABORTED)[0].serial == 0
    handle = made.publish(1, tensors())
    begun(played, 1, (0, 1))
    durable(played, 1, (0, 1))
    assert handle.wait_durable(600) == Version(0, 1)


def test_a_failed_snapshot_raises_at_its_wait(played, made, monkeypatch):
    def fails(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr("trainer_node.sdk.snapshot.Rooms.finish", fails)
    handle = made.publish(1, tensors())
    for wait in (handle.wait_snapshot, handle.wait_durable):
        with pytest.raises(RuntimeError, match="no memory"):
            wait()
    assert played.received(Type.ABORTED)[0] == messages.Aborted(0, "RuntimeError: no memory")


def test_the_optimiser_goes_on_though_the_hub_is_gone(played, made, thread):
    played.hang_up()
    # A version that begins before the publisher notices the loss belongs to the old connection, and ends with it.
    wait_until(lambda: made._uplink.over, "the publisher has seen it")
    live = tensors()
    handle = made.publish(1, live)
    handle.wait_snapshot()
    live["a"].zero_()
    # The connection was made anew, with a group of its own.
    groups = [body.group for body in played.received(Type.RANK, count=2)]
    assert groups[0] != groups[1]
    played.ranked(groups=2)
    played.received_of(Type.BEGIN, 0)
    played.hang_up(RetryableError("rank 1 of 2 is gone"))
    with pytest.raises(RetryableError, match="rank 1 of 2 is gone"):
        handle.wait_durable(600)


def test_a_publish_waits_for_the_previous_publish(played, made, thread):
    first = made.publish(1, tensors())
    second = thread.submit(made.publish, 2, tensors())
    begun(played, 0, (0, 1))
    played.received(Type.DONE)
    assert not second.done()
    assert len(played.received(Type.BEGIN)) == 1
    durable(played, 0, (0, 1))
    first.wait_durable(600)
    begun(played, 1, (0, 2), (0, 1))
    second.result()
    durable(played, 1, (0, 2))


def test_a_hub_that_does_not_read_holds_back_and_can_abort(played, made, monkeypatch):
    monkeypatch.setattr(hub_connection, "QUEUE_BYTES", 1 << 20)
    big = {f"w{k}": torch.randn(1 << 18) for k in range(64)}
    handle = made.publish(1, big)
    played.received(Type.BEGIN)
    played.deaf()
    played.say(messages.Begun(serial=0, version=Version(0, 1), base=None))
    link = handle.uplink
    wait_until(lambda: link._queued_bytes > (1 << 20) - (1 << 19), "what cannot be sent fills the queue")
    assert link._queued_bytes <= 1 << 20
    with pytest.raises(RetryableError, match=r"within 0\.1 s"):
        handle.wait_durable(0.1)
    played.say(messages.Aborted(0, "the hub's disk is full"))
    with pytest.raises(RetryableError, match="disk is full"):
        handle.wait_durable(600)
    played.deaf(False)


def test_live_is_a_share_of_the_engines(played, made):
    handle = made.publish(1, tensors())
    begun(played, 0, (0, 1))
    durable(played, 0, (0, 1))
    with pytest.raises(RetryableError, match="the hub knows of no engine"):
        handle.wait_live(timeout_s=0.05)
    rows = [(f"p{k}/e", Version(0, 1) if k < 8 else None, True) for k in range(10)]
    played.say(messages.Live(rows, Version(0, 1)))
    assert handle.wait_live(0.8, 600) == {f"p{k}/e": Version(0, 1) for k in range(8)}
    with pytest.raises(RetryableError, match=r"0\.1 is not live within 0\.05 s: p8/e at nothing, p9/e at nothing"):
        handle.wait_live(timeout_s=0.05)
    rows[8] = ("p8/e", Version(0, 7), True)
    played.say(messages.Live(rows, Version(0, 7)))
    assert handle.wait_live(timeout_s=600)["p8/e"] == Version(0, 7)
    for fraction in (0, 1.1):
        with pytest.raises(UsageError, match="fraction"):
            handle.wait_live(fraction)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(hub_connection, "BEAT_S", 0.05)


def test_a_silent_hub_is_taken_for_dead(played, impatient, made, monkeypatch):
    handle = made.publish(1, tensors())
    played.received(Type.BEGIN)
    played.deaf()
    monkeypatch.setattr(hub_connection, "SILENCE_S", 0.3)
    with pytest.raises(RetryableError, match="silent"):
        handle.wait_durable(600)


def test_closing_in_the_middle_aborts(played, made):
    handle = made.publish(1, tensors())
    begun(played, 0, (0, 1))
    with pytest.raises(ZeroDivisionError), made:
        raise ZeroDivisionError
    with pytest.raises(RetryableError, match="closed"):
        handle.wait_durable(600)
    with pytest.raises(UsageError, match="closed"):
        made.publish(2, tensors())


def test_closing_in_peace_waits_for_the_last_version(played, made, thread):
    handle = made.publish(1, tensors())
    closing = thread.submit(made.close)
    begun(played, 0, (0, 1))
    played.received(Type.DONE)
    assert not closing.done()
    durable(played, 0, (0, 1))
    closing.result()
    assert handle.wait_durable() == Version(0, 1)
    made.close()


def test_steps_are_numbers_in_range(played, made):
    for serial, step in enumerate((-1, 1 << 63)):
        with pytest.raises(UsageError, match="out of range"):
            made.publish(step, tensors())
        assert "out of range" in played.received_of(Type.ABORTED, serial).reason


def test_a_tensor_that_is_forgotten_later(played, made):
    made.publish(1, tensors())
    begun(played, 0, (0, 1))
    durable(played, 0, (0, 1))
    with pytest.raises(UsageError, match=r"(?s)not those of version 0\.1:.*missing: b"):
        made.publish(2, {"a": tensors()["a"]})


def test_not_all_ranks_come(played, monkeypatch):
    monkeypatch.setattr(publisher, "GATHER_S", 0.2)
    with pytest.raises(RetryableError, match="not all 1 ranks"):
        Publisher(played.address, token_file=played.token)


def test_an_unreachable_hub_is_a_retryable_error(played, unused_tcp_port, monkeypatch):
    monkeypatch.setattr(publisher, "GATHER_S", 0.2)
    with pytest.raises(RetryableError, match="cannot reach"):
        Publisher(f"127.0.0.1:{unused_tcp_port}", token_file=played.token)


def test_a_hub_that_is_being_restarted_is_waited_for(played, thread, caplog):
    played.away()
    making = thread.submit(Publisher, played.address, token_file=played.token)
    wait_until(lambda: "cannot reach" in caplog.text, "it says that it keeps trying")
    played.back()
    played.ranked()
    with making.result():
        assert caplog.text.count("cannot reach") == 1


def test_a_token_of_another_run(played, tmp_path, monkeypatch):
    other = str(JoinToken(bytes(16), bytes(20)))
    monkeypatch.setenv("P2PCAST_TOKEN", other)
    with pytest.raises(RefusedError, match="run"):
        Publisher(played.address)
    right = JoinToken.parse(played.token.read_text())
    monkeypatch.setenv("P2PCAST_TOKEN", str(JoinToken(right.run, bytes(20))))
    with pytest.raises(RefusedError, match="token"):
        Publisher(played.address)


def test_invalid_arguments_are_refused(played, tmp_path, monkeypatch):
    monkeypatch.delenv("P2PCAST_TOKEN", raising=False)
    with pytest.raises(UsageError, match="P2PCAST_TOKEN"):
        Publisher(played.address)
    with pytest.raises(UsageError, match="cannot read the token file"):
        Publisher(played.address, token_file=tmp_path / "none")
    with pytest.raises(UsageError, match="plaintext=True"):
        Publisher("192.0.2.1:7077", token_file=played.token)
    with pytest.raises(UsageError, match="brackets"):
        Publisher("a:b:c", token_file=played.token)
    with pytest.raises(UsageError, match="previous"):
        Publisher(played.address, token_file=played.token, previous="disk")
    with pytest.raises(UsageError, match="floating"):
        Publisher(played.address, token_file=played.token, dtype=torch.int8)
    with pytest.raises(UsageError, match="not initialised"):
        Publisher(played.address, token_file=played.token, group=object())


class Bug(Exception):
    """An exception of no expected kind."""


def broken(*_: object) -> None:
    raise Bug("by a test")


def test_a_callback_that_fails_on_the_publishers_loop_ends_the_wait_and_the_connection(played, made, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(hub_connection.HubConnection, "_pump", broken)
        handle = made.publish(4, tensors())
        with pytest.raises(RetryableError, match=r"failed with an internal error \(Bug: by a test\)"):
            handle.wait_durable()
    assert made._uplink.over


def test_a_publishers_thread_that_dies_ends_the_wait(played, thread, monkeypatch):
    """The thread dies during a version, so no thread is left to read the hub's messages."""
    monkeypatch.setattr(hub_connection, "BEAT_S", 0.01)
    making: Future[Publisher] = thread.submit(Publisher, played.address, token_file=played.token)
    played.ranked()
    made = making.result()
    handle = made.publish(4, tensors())
    played.received_of(Type.BEGIN, 0)
    monkeypatch.setattr(hub_connection, "SILENCE_S", "no number")
    with pytest.raises(RetryableError, match="failed with an internal error \\(TypeError"):
        handle.wait_durable()
    made.close()
    # The loop is closed shortly before the thread ends: a caller in between finds the thread alive.
    assert made._uplink._loop.is_closed()
    made._uplink._call(lambda: None)


def test_a_publisher_whose_thread_fails_to_start_raises_an_error(played, monkeypatch):
    monkeypatch.setattr(hub_connection.HubConnection, "_main", broken)
    with pytest.raises(RetryableError, match="Bug: by a test"):
        Publisher(played.address, token_file=played.token)


def test_a_handle_is_finished_even_where_giving_up_fails(played, made, monkeypatch):
    monkeypatch.setattr(hub_connection.HubConnection, "abandon", broken)
    monkeypatch.setattr(publisher, "send_parts", broken)
    handle = made.publish(4, tensors())
    begun(played, 0, (0, 4))
    with pytest.raises(Bug):
        handle.wait_durable()

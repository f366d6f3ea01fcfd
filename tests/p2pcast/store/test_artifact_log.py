"""Logs: bytes in files, open only while they are used."""

from __future__ import annotations

import random
import threading
from itertools import pairwise

import pytest
from artifacts_at_hand import LAYOUT, assembled, made, open_files, put
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.artifact.artifact_file import HEADER
from p2pcast.files.disk import CALL_BYTES, IOV_MAX
from p2pcast.ground.errors import IntegrityError, LocalError
from p2pcast.store.anchor_log import AnchorLog
from p2pcast.store.artifact_log import FileLog


def test_finished_logs_hold_no_descriptors(store):
    """A peer keeps a hundred versions and more."""
    kept = []
    for step in range(1, 4):
        *signed, log = made("delta", step)
        assembly = assembled(*signed)
        out = store.begin(assembly.open, LAYOUT)
        out.write(0, [log])
        assert len(open_files(store.root)) == 1, "written in one call"
        store.seal(out, assembly)
        assert out.read(0, len(log)) == log
        assert open_files(store.root) == []
        kept.append((out, log))
    stored, log = put(store, "anchor", 4)
    back = store.open_log(stored)
    assert back.read(0, len(log)) == log
    assert open_files(store.root) == []
    for out, log in kept:
        assert out.read(3, 5) == log[3:8]
        out.close()
        with pytest.raises(LocalError, match="closed"):
            out.read(0, 1)


@given(st.lists(st.integers(0, 400), unique=True, max_size=8).map(sorted), st.randoms())
def test_anchor_log_is_one_sequence_of_bytes(tmp_path_factory, cuts, draw):
    """Written in parts of any size and order, across the border between weights and files; read in any range."""
    *_, log = made("anchor", 1)
    edges = sorted({0, *(len(log) * c // 400 for c in cuts), len(log)})
    parts = list(pairwise(edges))
    draw.shuffle(parts)
    out = AnchorLog(tmp_path_factory.mktemp("anchor") / "a", LAYOUT, create=True)
    try:
        for a, b in parts:
            middle = draw.randint(a, b)
            out.write(a, [log[a:middle], memoryview(log)[middle:b]])
        for _ in range(5):
            a = draw.randint(0, len(log))
            b = draw.randint(a, len(log))
            assert out.read(a, b - a) == log[a:b]
        assert out.read(len(log) - 5, 100, short=True) == log[-5:]
        with pytest.raises(IntegrityError, match="are missing"):
            out.read(len(log) - 5, 100)
    finally:
        out.close()


def test_read_past_the_end_of_an_anchor_is_an_error(store):
    stored, log = put(store, "anchor", 1)
    back = store.open_log(stored)
    assert back.read(len(log) - 5, 100, short=True) == log[-5:]
    with pytest.raises(IntegrityError, match="are missing"):
        back.read(len(log) - 5, 6)
    back.close()


def test_file_log_writes_and_reads(tmp_path):
    log = FileLog(tmp_path / "x", len(HEADER), head=HEADER)
    # More and larger parts than one system call takes.
    parts = [bytes([n % 251]) * (n % 7) for n in range(3 * IOV_MAX)]
    parts += [random.Random(n).randbytes(n) for n in (CALL_BYTES - 1, 0, 2 * CALL_BYTES + 3, 5)]
    log.write(10, parts)
    whole = b"".join(parts)
    assert log.read(10, len(whole)) == whole
    assert log.read(10 + len(whole) - 3, 9, short=True) == whole[-3:]
    with pytest.raises(IntegrityError, match="cut short"):
        log.read(10 + len(whole) - 3, 9)
    with pytest.raises(LocalError, match="exists already"):
        FileLog(tmp_path / "x", 0, head=b"").write(0, [b"y"])
    log.close()
    log.close()
    with pytest.raises(LocalError, match="was closed while it was in use"):
        log.read(0, 1)


def test_close_waits_for_running_calls(tmp_path):
    """A closed descriptor's number may be reused for another file: a late write must never land there."""
    log = FileLog(tmp_path / "x", 0, head=b"")
    inside, may_go, closed = threading.Event(), threading.Event(), threading.Event()
    numbers: list[int] = []

    def use() -> None:
        with log.descriptor() as fd:
            inside.set()
            may_go.wait(600)
            with (tmp_path / "other").open("wb") as other:
                numbers.extend([fd, other.fileno()])

    thread = threading.Thread(target=use)
    thread.start()
    assert inside.wait(600)
    log.close()
    closed.set()
    may_go.set()
    thread.join(600)
    assert numbers[0] != numbers[1], "the descriptor stays open during use"
    with pytest.raises(LocalError), log.descriptor():
        pass

"""Version numbers against a model: no number is given out twice, at any order of deaths."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.files import disk
from p2pcast.ground.errors import LocalError
from p2pcast.ground.version import Version
from trainer_node.publish.version_numbers import MOST_RECORDS, RESERVED_STEPS, VersionNumbers

V = Version


def test_steps_go_up_in_their_branch_and_back_in_the_next(tmp_path: Path) -> None:
    numbers = VersionNumbers(tmp_path / "versions.log", "boot")
    assert numbers.next(None, 7) == V(0, 7)
    assert numbers.next(V(0, 7), 8) == V(0, 8)
    assert numbers.next(V(0, 7), 7) == V(1, 7)
    assert numbers.next(V(2, 7), 9, resume=True) == V(3, 9)


def test_a_number_that_was_noted_is_not_given_out_again_by_any_process(tmp_path: Path) -> None:
    numbers = VersionNumbers(tmp_path / "versions.log", "boot")
    numbers.note(V(0, 5))
    assert numbers.next(V(0, 4), 5) == V(1, 5), "what came to nothing is used all the same"
    again = VersionNumbers(tmp_path / "versions.log", "boot")
    assert again.next(V(0, 4), 5) == V(1, 5)
    assert again.next(V(0, 4), 6) == V(0, 6)


def test_after_another_boot_reserved_numbers_count_as_used(tmp_path: Path) -> None:
    numbers = VersionNumbers(tmp_path / "versions.log", "boot")
    numbers.note(V(0, 5))
    numbers.reserve(V(0, 5))
    same, other = (VersionNumbers(tmp_path / "versions.log", boot) for boot in ("boot", "another"))
    assert same.next(V(0, 5), 6) == V(0, 6)
    assert other.next(V(0, 5), 6) == V(1, 6)
    assert other.next(V(0, 5), 5 + RESERVED_STEPS + 1) == V(0, 5 + RESERVED_STEPS + 1)
    unknown = VersionNumbers(tmp_path / "versions.log", "")
    assert unknown.next(V(0, 5), 6) == V(1, 6), (
        "a machine that cannot tell its boots apart gets no benefit of the doubt"
    )


def test_an_orderly_end_frees_reserved_numbers(tmp_path: Path) -> None:
    numbers = VersionNumbers(tmp_path / "versions.log", "boot")
    numbers.note(V(0, 5))
    numbers.reserve(V(0, 5))
    numbers.close()
    assert VersionNumbers(tmp_path / "versions.log", "another").next(V(0, 5), 6) == V(0, 6)


def test_notes_within_a_reservation_cost_no_sync_and_others_do(tmp_path: Path, monkeypatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("p2pcast.files.disk.sync", lambda fd, path: synced.append(path))
    numbers = VersionNumbers(tmp_path / "versions.log", "boot")
    numbers.note(V(0, 1))
    assert len(synced) == 1
    numbers.reserve(V(0, 1))
    synced.clear()
    for step in range(2, 100):
        numbers.note(V(0, step))
    assert synced == []
    numbers.note(V(1, 3))
    assert len(synced) == 1


def test_numbers_that_were_released_count_as_used_where_a_note_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "versions.log"
    numbers = VersionNumbers(path, "boot")
    numbers.note(V(0, 5))
    numbers.reserve(V(0, 5))
    numbers.note(V(0, 6))
    numbers.close()
    lines = path.read_bytes().splitlines(keepends=True)
    assert VersionNumbers(path, "another").next(V(0, 5), 7) == V(0, 7)
    path.write_bytes(b"".join([*lines[:-2], bytes(len(lines[-2]) - 1) + b"\n", lines[-1]]))
    assert VersionNumbers(path, "another").next(V(0, 5), 6) == V(1, 6)


def test_a_branch_that_cannot_be_noted_is_not_opened_by_this_process_again(tmp_path: Path) -> None:
    class Full:
        def step(self, step, do):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(step.path))

    path = tmp_path / "versions.log"
    numbers = VersionNumbers(path, "boot")
    with disk.watched(Full()), pytest.raises(LocalError, match="no space is left"):
        numbers.above(0)
    assert numbers.next(V(0, 5), 6) == V(1, 6)
    numbers.above(0)
    assert VersionNumbers(path, "boot").next(V(0, 5), 6) == V(1, 6), "it is noted as soon as it can be"


def test_a_damaged_line_costs_a_branch_and_no_number(tmp_path: Path) -> None:
    path = tmp_path / "versions.log"
    numbers = VersionNumbers(path, "boot")
    numbers.note(V(0, 1))
    numbers.reserve(V(0, 1))
    for step in (2, 3, 4):
        numbers.note(V(0, step))
    data = bytearray(path.read_bytes())
    data[data.rindex(b"[0, 4]") + 4] ^= 1
    numbers.note(V(0, 5))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(bytes(data) + lines[-1])
    assert VersionNumbers(path, "boot").next(V(0, 5), 6) == V(1, 6)


def test_the_file_stays_small(tmp_path: Path) -> None:
    numbers = VersionNumbers(tmp_path / "versions.log", "boot")
    most = 0
    for step in range(3 * MOST_RECORDS):
        numbers.note(V(0, step))
        numbers.reserve(V(0, step))
        most = max(most, (tmp_path / "versions.log").stat().st_size)
    assert most < 2 * MOST_RECORDS * 60
    assert VersionNumbers(tmp_path / "versions.log", "boot").used == V(0, 3 * MOST_RECORDS - 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_history_gives_a_number_out_twice(tmp_path_factory, data) -> None:
    path = tmp_path_factory.mktemp("numbers") / "versions.log"
    numbers, head, given_out, boots = VersionNumbers(path, "0"), None, set(), 0
    for _ in range(data.draw(st.integers(1, 30))):
        what = data.draw(st.sampled_from(["seal", "abort", "kill", "reboot", "end", "shown"]))
        if what in ("seal", "abort"):
            step = data.draw(st.integers(0, 6))
            version = numbers.next(head, step, resume=data.draw(st.booleans()))
            assert version not in given_out
            assert head is None or version > head
            given_out.add(version)
            numbers.note(version)
            if what == "seal":
                head = version
                numbers.reserve(head)
        elif what == "shown":
            version = V(data.draw(st.integers(0, 3)), data.draw(st.integers(0, 6)))
            given_out.add(version)
            numbers.seen(version)
            numbers.above(version.branch)
        else:
            boots += what == "reboot"
            if what == "end":
                numbers.close()
            numbers = VersionNumbers(path, str(boots))

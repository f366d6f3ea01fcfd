"""The model of a disk, and real processes killed at steps of their disks."""

from __future__ import annotations

import os

import pytest
from disk_image import Image, Left, RecordedStep
from step_recorder import Recorder

from p2pcast.files import disk
from p2pcast.files.atomic_files import atomic_folder, atomic_write
from p2pcast.process import event_loop
from tests.chaos.kills import _kind, kill_loops


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def image_of(steps):
    image = Image()
    for step in steps:
        image.apply(step)
    return image


def test_replayed_steps_match_the_disk(tmp_path):
    """Replaying the recorded steps gives the same files as the system."""
    real, again = tmp_path / "real", tmp_path / "again"
    real.mkdir()
    recorder = Recorder(real)
    with disk.watched(recorder):
        disk.make_folder(real / "a" / "b")
        atomic_write(real / "a" / "one", b"1" * 1000)
        atomic_write(real / "a" / "one", b"2" * 500)
        with atomic_folder(real / "a" / "b" / "made") as part:
            atomic_write(part / "x", b"x")
        disk.symlink("one", real / "a" / "link")
        fd = disk.create(real / "sparse", os.O_RDWR)
        disk.resize(fd, real / "sparse", 100)
        disk.write_at(fd, real / "sparse", [b"abc", b"def"], 40)
        disk.allocate(fd, real / "sparse", 90, 30)
        os.close(fd)
        assert disk.exchange(real / "sparse", real / "a" / "one")
        disk.remove_tree(real / "a" / "b")
    image_of(recorder.done).materialise(again)
    assert tree(again) == tree(real)
    assert os.readlink(again / "a" / "link") == "one"


@pytest.mark.parametrize(
    ("left", "expected"),
    [(Left.NOTHING, {}), (Left.NAMES, {"f": b""}), (Left.HALVES, {"f": b"ab\0\0"}), (Left.CONTENTS, {})],
)
def test_machine_failure_leaves_the_chosen_part(tmp_path, left, expected):
    image = image_of([RecordedStep("create", "f", file=1), RecordedStep("write", "f", file=1, data=b"abcd")])
    image.materialise(tmp_path / "left", left)
    assert tree(tmp_path / "left") == expected


def test_synced_data_survives(tmp_path):
    steps = [
        RecordedStep("create", "f", file=1),
        RecordedStep("write", "f", file=1, data=b"abcd"),
        RecordedStep("sync", "f", file=1),
        RecordedStep("sync folder", ""),
        RecordedStep("write", "f", file=1, data=b"xx"),
        RecordedStep("rename", "f", "g"),
    ]
    for left in Left:
        image_of(steps).materialise(tmp_path / left.name, left)
    found = {left: tree(tmp_path / left.name) for left in Left}
    assert found[Left.NOTHING] == {"f": b"abcd"}
    assert found[Left.NAMES] == {"g": b"abcd"}
    assert found[Left.CONTENTS] == {"f": b"xxcd"}
    assert found[Left.HALVES] == {"g": b"xbcd"}


def test_torn_step_is_half_applied(tmp_path):
    image = image_of([RecordedStep("create", "f", file=1), RecordedStep("write", "f", file=1, data=b"abcd")])
    with image.torn(RecordedStep("write", "f", file=1, data=b"wxyz")) as half:
        assert half
        image.materialise(tmp_path / "half")
    image.materialise(tmp_path / "after")
    assert tree(tmp_path / "half") == {"f": b"wxcd"}
    assert tree(tmp_path / "after") == {"f": b"abcd"}


@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.prove)])
def test_processes_are_killed_at_steps_of_their_disks_and_come_back(tmp_path, rounds):
    tally = event_loop.run(kill_loops(tmp_path, 3 * rounds, seed=3, peers=1))
    assert tally.kills == {"hub": rounds, "p1": rounds, "far": rounds}
    assert sum(tally.steps.values()) == 3 * rounds
    assert tally.wrong == []


@pytest.mark.parametrize("folder", ["state", "shadows", "peers"])
def test_a_step_is_counted_by_process_and_folder(tmp_path, folder):
    assert _kind(f"{tmp_path}/{folder}/hub/deltas/{'0a' * 8}.p2pd", tmp_path) == "hub/deltas/#.p#pd"
    assert _kind(f"{tmp_path}/{folder}", tmp_path) == "."

"""The hub's memory of published steps: bytes written, forgotten steps, import from an earlier release."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.files import disk
from p2pcast.ground.errors import LocalError
from p2pcast.ground.version import Version
from p2pcast.process.daemon_process import StateFile
from trainer_node.publish import publish_history
from trainer_node.publish.publish_history import KnownStep, PublishHistory, settled

T = TypeVar("T")


class Counting:
    """A watcher of the disk that counts bytes, and makes nothing durable."""

    def __init__(self) -> None:
        self.bytes = 0

    def step(self, step: disk.DiskStep, do: Callable[[], T]) -> T:
        self.bytes += sum(len(part) for part in step.parts)
        return None if step.what.startswith("sync") else do()  # type: ignore[return-value]


def note(memory: PublishHistory, step: int) -> None:
    memory.note(step, folder=f"{step:032x}", mark=f"{step:064x} {step:016x}")


@pytest.mark.parametrize("kept", [0, 5])
def test_bytes_written_for_a_version_do_not_grow_with_their_number(tmp_path: Path, monkeypatch, kept: int) -> None:
    """``kept``: folders that the trainer leaves there."""
    monkeypatch.setattr(publish_history, "GROWTH", 100)
    monkeypatch.setattr(publish_history, "KEPT_GONE", 100)
    newest = 0
    memory = PublishHistory(tmp_path / "published.log", lambda: range(newest - kept + 1, newest + 1))
    counting, written = Counting(), []
    with disk.watched(counting):
        for _ in range(5):
            before = counting.bytes
            for _ in range(1000):
                newest += 1
                note(memory, newest)
            written.append(counting.bytes - before)
            assert len(memory) < 400
            assert (tmp_path / "published.log").stat().st_size < 600 * 200
    assert max(written) < 1.2 * min(written), written
    assert max(written) < 5 * 1000 * 200, "each is written a few times, not once a version"


def test_versions_from_ranks_are_forgotten_too(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(publish_history, "GROWTH", 10)
    monkeypatch.setattr(publish_history, "KEPT_GONE", 10)
    memory = PublishHistory(tmp_path / "published.log", set)
    with disk.watched(Counting()):
        for step in range(100):
            memory.note(step, mark="m")
    assert len(memory) <= 20
    assert memory[99].mark == "m"
    assert memory[0] == KnownStep()


def test_restarts_do_not_keep_the_file_from_being_written_anew(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(publish_history, "GROWTH", 50)
    monkeypatch.setattr(publish_history, "KEPT_GONE", 10)
    with disk.watched(Counting()):
        for step in range(0, 2000, 10):
            memory = PublishHistory(tmp_path / "published.log", set)
            for n in range(step, step + 10):
                note(memory, n)
            memory.close()
    assert len(memory) < 150


def test_existing_folders_are_never_forgotten(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(publish_history, "GROWTH", 10)
    monkeypatch.setattr(publish_history, "KEPT_GONE", 1)
    there = set(range(0, 300, 10))
    memory = PublishHistory(tmp_path / "published.log", lambda: there)
    with disk.watched(Counting()):
        for step in range(300):
            note(memory, step)
    memory = PublishHistory(tmp_path / "published.log", lambda: there)
    assert all(memory[step].folder == f"{step:032x}" for step in there)
    assert memory[1] == KnownStep()


def test_a_folder_that_is_away_for_a_moment_costs_nothing(tmp_path: Path, monkeypatch) -> None:
    """A network file system that is not mounted shows an empty folder, or none."""
    monkeypatch.setattr(publish_history, "GROWTH", 10)
    monkeypatch.setattr(publish_history, "KEPT_GONE", 1)
    looks = 0

    def there() -> set[int]:
        nonlocal looks
        looks += 1
        if looks % 3 == 0:
            raise LocalError("not mounted")
        return set() if looks % 3 == 1 else {0, 1, 2}

    memory = PublishHistory(tmp_path / "published.log", there)
    with disk.watched(Counting()):
        for step in range(400):
            note(memory, step)
    assert looks > 6
    assert [memory[step].folder for step in (0, 1, 2)] == [f"{step:032x}" for step in (0, 1, 2)]


KNOWN = st.builds(KnownStep, st.none() | st.just("f"), st.none() | st.just("m"), st.booleans())


@given(st.dictionaries(st.integers(0, 40), KNOWN), st.none() | st.sets(st.integers(0, 40)), st.integers(1, 10))
def test_only_old_steps_without_a_folder_are_forgotten(
    known: dict[int, KnownStep], there: set[int] | None, kept: int
) -> None:
    stays = settled(known, there, kept)
    assert list(stays) == [step for step in known if step in stays], "the order of noting stays"
    for step in list(known)[-kept:]:
        assert step in stays
    for step in known.keys() - stays.keys():
        assert known[step].folder is None or (known[step].gone and there is not None and step not in there)
    assert all((one.folder, one.mark) == (known[step].folder, known[step].mark) for step, one in stays.items())
    if there is not None:
        again = settled(stays, there, kept)
        assert all(step in there for step, one in list(again.items())[:-kept] if one.folder is not None)


def test_history_of_version_0_1_0_is_imported_once(tmp_path: Path) -> None:
    file = tmp_path / "hub.json"
    old = {
        "node": "00" * 16,
        "incarnation": 3,
        "target": [0, 2],
        "published": {"1": "a", "2": "b"},
        "marks": {"2": "m", "3": "n"},
    }
    file.write_text(json.dumps(old))
    for _ in range(2):
        memory = StateFile(file, {"node": "", "incarnation": 0, "target": None})
        before = PublishHistory(tmp_path / "published.log", set)
        before.move_from(memory)
        assert [before[step] for step in (1, 2, 3)] == [KnownStep("a"), KnownStep("b", mark="m"), KnownStep(mark="n")]
        assert json.loads(file.read_text()) == {"node": "00" * 16, "incarnation": 3, "target": [0, 2]}
        before.close()
    assert len((tmp_path / "published.log").read_text().splitlines()) == 3


@pytest.mark.parametrize("published", [["1"], {"one": "a"}, "text"])
def test_a_damaged_list_of_version_0_1_0_is_named(tmp_path: Path, published) -> None:
    file = tmp_path / "hub.json"
    file.write_text(json.dumps({"node": "", "published": published}))
    with pytest.raises(LocalError, match="published steps is damaged"):
        PublishHistory(tmp_path / "published.log", set).move_from(StateFile(file, {}))


def test_a_step_that_comes_back_is_known_by_its_newest_folder_and_weights(tmp_path: Path) -> None:
    memory = PublishHistory(tmp_path / "published.log", set)
    memory.note(1, folder="a", version=Version(0, 1), mark="m")
    memory.note(1, folder="b", version=Version(2, 1))
    memory.close()
    memory = PublishHistory(tmp_path / "published.log", set)
    assert memory[1] == KnownStep("b", Version(2, 1), "m")
    memory.note(1, mark="n")
    assert memory[1] == KnownStep("b", Version(2, 1), "n")


def test_a_damaged_version_is_named(tmp_path: Path) -> None:
    memory = PublishHistory(tmp_path / "published.log", set)
    memory.note(3, folder="a", version=Version(0, 3))
    memory._log.append({"step": 4, "version": "four"})
    memory.close()
    with pytest.raises(LocalError, match="the version of step 4 is damaged"):
        PublishHistory(tmp_path / "published.log", set)

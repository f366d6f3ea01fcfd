"""The format of a state folder: later formats are refused unchanged, earlier ones are upgraded after any crash, and one
process holds the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2pcast.files import disk
from p2pcast.ground.errors import LocalError
from p2pcast.ground.release import RELEASE
from p2pcast.store import state_format
from p2pcast.store.state_format import FORMAT, LOCK, NOTE, state_lock


class Died(Exception):
    pass


class Dying:
    """A watcher that ends the process before a step; ``count`` steps are performed."""

    def __init__(self, count: float) -> None:
        self.left = count
        self.did: list[str] = []

    def step(self, step: disk.DiskStep, do: Callable[[], Any]) -> Any:
        if self.left <= 0:
            raise Died(step.what)
        self.left -= 1
        self.did.append(step.what)
        return do()


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.relative_to(folder).parts[0] != LOCK
    }


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A state folder in the format of p2pcast 0.1."""
    state = tmp_path / "state"
    (state / "deltas").mkdir(parents=True)
    (state / "hub.json").write_text('{"node": "00"}')
    (state / LOCK).touch(0o600)
    return state


def is_first(state: Path) -> bool:
    """p2pcast 0.1's first action on a state folder."""
    try:
        os.close(os.open(state / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except IsADirectoryError:
        return False
    return True


def test_new_folder_has_this_format_and_excludes_the_first_release(tmp_path: Path) -> None:
    state = tmp_path / "new"
    with state_lock(state):
        assert json.loads((state / "format").read_text()) == {"format": FORMAT, "release": RELEASE}
    assert not is_first(state)
    assert "p2pcast 0.2" in (state / LOCK / NOTE).read_text()
    assert sorted(p.name for p in state.iterdir()) == ["format", LOCK]
    with state_lock(state):
        pass


@pytest.mark.parametrize("lock", [True, False], ids=["lock", "no lock"])
def test_folder_of_the_first_release_is_upgraded_in_place(first: Path, lock: bool) -> None:
    if not lock:
        (first / LOCK).unlink()
    before = contents(first)
    with state_lock(first):
        assert not is_first(first)
    assert contents(first) == before | {"format": (first / "format").read_bytes()}


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "no exchange"])
def test_crash_during_an_upgrade_loses_no_file(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(disk, "exchange", lambda path, to: False)
    before, count, done = contents(first), 0, False
    while not done:
        state = tmp_path / f"crash-{count}"
        shutil.copytree(first, state)
        try:
            with disk.watched(Dying(count)), state_lock(state):
                done = True
        except Died:
            pass
        now = contents(state)
        assert {k: v for k, v in now.items() if not k.startswith(f".{LOCK}") and not k.startswith(".format")} in (
            before,
            before | {"format": now.get("format", b"")},
        )
        # Once the folder states the new format, the first release refuses it.
        assert not ("format" in now and is_first(state))
        with state_lock(state):
            pass
        assert sorted(contents(state)) == sorted({*before, "format"})
        assert not is_first(state)
        count += 1
    assert count > 8


def test_upgrade_step_is_repeated_until_the_format_is_stated(first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def step(state: Path) -> None:
        tried.append(state)
        if len(tried) == 1:
            raise Died

    monkeypatch.setitem(state_format.STEPS, 1, step)
    with pytest.raises(Died), state_lock(first):
        pass
    assert state_format.read_format(first).format == 1
    for _ in range(2):
        with state_lock(first):
            pass
    assert tried == [first, first]


@pytest.mark.parametrize("upgrade", [True, False])
def test_folder_of_a_later_release_is_refused_unchanged(tmp_path: Path, upgrade: bool) -> None:
    state = tmp_path / "later"
    state.mkdir()
    (state / "format").write_text(json.dumps({"format": FORMAT + 1, "release": "0.9.1", "more": [1]}))
    refused = rf"has format {FORMAT + 1}, of p2pcast 0\.9\.1; .*use p2pcast 0\.9\.1 or later"
    with pytest.raises(LocalError, match=refused), state_lock(state, upgrade=upgrade):
        pytest.fail("the folder was opened")
    assert sorted(p.name for p in state.iterdir()) == ["format"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 0, "release": "x"}', '{"format": true, "release": "x"}', '{"format": 2}']
)
def test_damaged_format_file_is_named(first: Path, text: str) -> None:
    (first / "format").write_text(text)
    with pytest.raises(LocalError, match="format is damaged"), state_lock(first):
        pass
    assert is_first(first)


def test_one_process_of_any_release_holds_the_lock(first: Path) -> None:
    fd = os.open(first / LOCK, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    for upgrade in (True, False):
        with pytest.raises(LocalError, match="in use by another p2pcast daemon"), state_lock(first, upgrade=upgrade):
            pass
    os.close(fd)
    with state_lock(first):
        for upgrade in (True, False):
            with (
                pytest.raises(LocalError, match="in use by another p2pcast daemon"),
                state_lock(first, upgrade=upgrade),
            ):
                pass


def test_reading_does_not_upgrade(first: Path) -> None:
    before = contents(first)
    with state_lock(first, upgrade=False):
        assert is_first(first)
    assert contents(first) == before


def test_first_of_two_new_locks_is_the_lock(tmp_path: Path) -> None:
    """Two processes start on a new folder at once: one gets the lock, the other reports it."""
    state = tmp_path / "state"
    state.mkdir()

    class Racing:
        def step(self, step: disk.DiskStep, do: Callable[[], Any]) -> Any:
            if step.what == "rename" and step.to == state / LOCK and not (state / LOCK).exists():
                (state / LOCK).mkdir()
                (state / LOCK / "daemon").touch()
            return do()

    with disk.watched(Racing()), state_lock(state):
        assert sorted(p.name for p in (state / LOCK).iterdir()) == ["daemon"]
        assert not list(state.glob(".lock*"))


def test_lock_replaced_before_locking_is_not_used(first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking the first release's lock, another process upgrades the folder and holds its lock."""
    opened = state_format._opened
    with contextlib.ExitStack() as other:

        def slowly(path: Path) -> int:
            fd = opened(path)
            monkeypatch.setattr(state_format, "_opened", opened)
            other.enter_context(state_lock(first))
            return fd

        monkeypatch.setattr(state_format, "_opened", slowly)
        with pytest.raises(LocalError, match="in use by another p2pcast daemon"), state_lock(first):
            pytest.fail("two processes hold the lock")

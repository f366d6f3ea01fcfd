"""Backups of a hub's state: made while the hub publishes and removes artifacts, cut short at any step, and restored."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from click.testing import CliRunner

from p2pcast.cli.state_folder import check
from p2pcast.files import disk
from p2pcast.files.disk import DiskStep
from p2pcast.ground.errors import IntegrityError, LocalError, UsageError
from p2pcast.ground.version import Version
from p2pcast.store.artifact_store import ArtifactStore
from p2pcast.store.retention import RetentionCounts
from tests.trainer_node.backup.artifacts import HubState
from trainer_node.backup import run_backup
from trainer_node.backup.backup_folder import opened
from trainer_node.commands.backup_command import backup, restore
from trainer_node.publish.version_numbers import FILE, VersionNumbers, this_boot

T = TypeVar("T")


def copied(hub: HubState, to: Path) -> Path:
    run_backup.make(to, hub.root, None, None)
    return to


def restored(source: Path, to: Path, branch: int | None = None) -> int:
    found = run_backup.restored(source, to, branch, None, 0, None).branch
    assert found is not None
    return found


def test_backup_of_a_publishing_hub_holds_every_version_up_to_its_newest(tmp_path: Path) -> None:
    hub = HubState(tmp_path / "hub", RetentionCounts(4, 1))
    hub.anchor()
    ended = threading.Event()

    def publish() -> None:
        while not ended.is_set():
            for _ in range(5):
                hub.delta()
            hub.anchor()
            hub.store.retain()

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        for number in range(5):
            before = hub.store.newest()
            made = run_backup.make(tmp_path / f"backup-{number}", hub.root, None, None)
            assert made.hub is not None
            assert before is not None
            assert Version.parse(made.hub["version"]) >= before
    finally:
        ended.set()
        publisher.join()
    for number in range(5):
        state = tmp_path / f"restored-{number}"
        restored(tmp_path / f"backup-{number}", state)
        done = CliRunner().invoke(check, [str(state), "--shadow", str(tmp_path / "none")])
        assert done.exit_code == 0, done.output
        store = ArtifactStore(state, hub.key.public)
        assert store.damaged == []
        newest = store.newest()
        assert newest is not None
        at, bases = newest, {one.version: one.base for one in store.artifacts.values() if one.base is not None}
        anchors = {one.version for one in store.artifacts.values() if one.base is None}
        while at not in anchors:
            at = bases[at]
        numbers = VersionNumbers(state / FILE, this_boot())
        assert numbers.used is not None
        assert numbers.used >= newest, "every number of an artifact counts as used"


def test_restored_hub_names_no_version_that_was_used_after_the_backup(tmp_path: Path, hub: HubState) -> None:
    hub.anchor()
    hub.numbers.reserve(Version(0, 1))
    source = copied(hub, tmp_path / "backup")
    after = [hub.delta() for _ in range(3)]
    assert restored(source, tmp_path / "restored") == 1
    numbers = VersionNumbers(tmp_path / "restored" / FILE, "boot")  # the same boot of the machine
    head = ArtifactStore(tmp_path / "restored", hub.key.public).newest()
    assert head == Version(0, 1)
    assert numbers.next(head, 2) == Version(1, 2)
    assert numbers.next(head, 2) not in after


def test_restoring_again_opens_another_branch(tmp_path: Path, hub: HubState) -> None:
    hub.anchor()
    source = copied(hub, tmp_path / "backup")
    assert [restored(source, tmp_path / f"restored-{number}") for number in range(3)] == [1, 2, 3]
    assert restored(source, tmp_path / "higher", 9) == 9
    assert restored(source, tmp_path / "again") == 10
    with pytest.raises(UsageError, match="this run has had branch 10: name a higher one"):
        restored(source, tmp_path / "lower", 4)
    assert not (tmp_path / "lower").exists()


def test_backup_is_private_and_restored_folders_are(tmp_path: Path, hub: HubState) -> None:
    hub.anchor()
    (hub.root / "run.key").chmod(0o600)
    source = copied(hub, tmp_path / "backup")
    restored(source, tmp_path / "restored")
    for root in (source, tmp_path / "restored"):
        for path in (root, *root.rglob("*")):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


class Killed(BaseException):
    """The process dies here."""


class Ending:
    """Ends the process before step number ``at``, or fails that step and no other."""

    def __init__(self, at: int, error: OSError | None = None) -> None:
        self.steps, self._at, self._error = 0, at, error

    def step(self, step: DiskStep, do: Callable[[], T]) -> T:
        self.steps += 1
        if self._error is None and self.steps > self._at:
            raise Killed
        if self._error is not None and self.steps == self._at + 1 and step.what in ("write", "create", "sync"):
            raise self._error
        return do()


def steps_of(work: Callable[[], object]) -> int:
    counting = Ending(1 << 30)
    with disk.watched(counting):
        work()
    return counting.steps


def test_backup_that_dies_at_any_step_is_no_backup(tmp_path: Path, hub: HubState) -> None:
    hub.anchor()
    hub.delta()
    count = steps_of(lambda: copied(hub, tmp_path / "whole"))
    assert count > 30
    for at in range(0, count, 2):
        to = tmp_path / f"backup-{at}"
        with pytest.raises(Killed), disk.watched(Ending(at)):
            copied(hub, to)
        if to.exists():  # only the sync of its name was missing
            opened(to).check()
            continue
        for part in tmp_path.glob(f".{to.name}.part-*"):
            if not (part / "backup.json").exists():
                with pytest.raises(UsageError, match="no backup, or one that was not finished"):
                    opened(part)
        copied(hub, to)
        opened(to).check()


def test_restore_that_dies_at_any_step_leaves_no_state(tmp_path: Path, hub: HubState) -> None:
    hub.anchor()
    source = copied(hub, tmp_path / "backup")
    restored(source, tmp_path / "whole")  # the first one makes restored.log
    count = steps_of(lambda: restored(source, tmp_path / "again"))
    for at in range(0, count, 3):
        to = tmp_path / f"restored-{at}"
        with pytest.raises(Killed), disk.watched(Ending(at)):
            restored(source, to)
        if not to.exists():
            restored(source, to)
        assert VersionNumbers(to / FILE, "").floor >= 1


def test_full_disk_leaves_nothing_and_is_named(tmp_path: Path, hub: HubState) -> None:
    hub.anchor()
    count = steps_of(lambda: copied(hub, tmp_path / "whole"))
    failures = 0
    for at in range(0, count, 2):
        to = tmp_path / f"backup-{at}"
        said = ""
        try:
            with disk.watched(Ending(at, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))):
                copied(hub, to)
        except LocalError as error:
            said = str(error)
        if said:
            failures += 1
            assert "no space is left" in said
            assert not to.exists()
            assert list(tmp_path.glob(f".{to.name}*")) == []
    assert failures > 5


def test_damaged_backups_are_refused(tmp_path: Path, hub: HubState) -> None:
    hub.anchor()
    source = copied(hub, tmp_path / "backup")
    document = json.loads((source / "backup.json").read_text())
    for number, name in enumerate(document["files"]):
        path = source / name
        whole = path.read_bytes()
        for other in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
            path.write_bytes(other)
            with pytest.raises(IntegrityError, match="missing or changed since the backup"):
                restored(source, tmp_path / f"restored-{number}")
        path.unlink()
        with pytest.raises(IntegrityError, match="missing or changed since the backup"):
            restored(source, tmp_path / f"restored-{number}")
        path.write_bytes(whole)
        assert not (tmp_path / f"restored-{number}").exists()
    restored(source, tmp_path / "restored")


@pytest.mark.parametrize("name", ["../outside", "hub/../../outside", "/etc/outside", "other/file"])
def test_backup_that_names_files_elsewhere_is_refused(tmp_path: Path, hub: HubState, name: str) -> None:
    hub.anchor()
    source = copied(hub, tmp_path / "backup")
    document = json.loads((source / "backup.json").read_text())
    document["files"][name] = [1, "00"]
    (source / "backup.json").write_text(json.dumps(document))
    with pytest.raises(IntegrityError, match="it names the file"):
        restored(source, tmp_path / "restored")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "name the state to copy"),
        (["--hub", "{root}/none"], "is not the state folder of a hub"),
        (["--ledger", "{root}/none"], "is not the state folder of a ledger"),
        (["--hub", "{root}/hub", "--database", "postgresql://db/x"], "--database needs --ledger"),
    ],
)
def test_backup_says_which_folder_is_missing(tmp_path: Path, hub: HubState, words: list[str], reason: str) -> None:
    hub.anchor()
    done = CliRunner().invoke(backup, [str(tmp_path / "to"), *(word.format(root=tmp_path) for word in words)])
    assert reason in str(done.exception)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "name the folders to write"),
        (["--ledger", "{root}/ledger"], "how many steps has the learner's newest checkpoint"),
        (["--ledger", "{root}/ledger", "--step", "3"], "has no state of a ledger"),
        (["--hub", "{root}/hub"], "exists: name a new folder"),
        (["--hub", "{root}/x", "--step", "3"], "--ledger and --step belong together"),
    ],
)
def test_restore_says_which_folder_is_wrong(tmp_path: Path, hub: HubState, words: list[str], reason: str) -> None:
    hub.anchor()
    source = copied(hub, tmp_path / "backup")
    done = CliRunner().invoke(restore, [str(source), *(word.format(root=tmp_path) for word in words)])
    assert reason in str(done.exception)

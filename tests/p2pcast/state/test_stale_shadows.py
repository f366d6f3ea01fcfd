"""Shadows that no daemon will open again are removed; shadows that may be used again stay, even if their
process died.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from p2pcast.cli.state_folder import check
from p2pcast.cli.status import status
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import LocalError
from p2pcast.process.daemon_process import shadow_prefix
from p2pcast.state import stale_shadows as module
from p2pcast.state.clean_command import clean
from p2pcast.state.shadow import PATCHES_NAME, Shadow, locked
from p2pcast.state.stale_shadows import (
    OWNER_NAME,
    UNUSED_NAME,
    claim,
    find_all,
    find_stale,
    leave,
    remove,
    remove_unused,
    sweep,
)
from p2pcast.store import folder_locks
from p2pcast.store.state_format import state_lock

LAYOUT = Layout([Tensor("a", "BF16", (100,))])


@pytest.fixture
def tmpfs(tmp_path) -> Path:
    (tmp_path / "tmpfs").mkdir()
    return tmp_path / "tmpfs"


def shadow_of(state: Path, tmpfs: Path, name: str = "0") -> Path:
    """A killed peer's shadow, with an unfinished patch."""
    folder = tmpfs / f"{shadow_prefix()}{name}"
    with state_lock(state):
        claim(state, folder)
        Shadow.create(folder, LAYOUT).close()
        (folder / PATCHES_NAME / "0.3.p2pp.part").write_bytes(b"x" * 9000)
    return folder


def test_shadow_survives_its_process(tmp_path, tmpfs):
    folder = shadow_of(tmp_path / "a", tmpfs)
    before = json.loads((folder / OWNER_NAME).read_text())
    sweep(tmpfs)
    assert folder.exists()
    assert list(find_stale(tmpfs)) == []
    claim(tmp_path / "a", folder)  # the next start
    assert json.loads((folder / OWNER_NAME).read_text()) == before


def test_shadow_of_a_missing_state_folder_is_removed(tmp_path, tmpfs):
    folder, other = shadow_of(tmp_path / "a", tmpfs), shadow_of(tmp_path / "b", tmpfs, "1")
    shutil.rmtree(tmp_path / "a")
    [left] = find_stale(tmpfs)
    assert (left.folder, left.proved) == (folder, True)
    assert left.nbytes >= 9000
    sweep(tmpfs)
    assert list(tmpfs.iterdir()) == [other]


def test_shadow_replaced_by_another_is_removed(tmp_path, tmpfs):
    first = shadow_of(tmp_path / "a", tmpfs)
    second = shadow_of(tmp_path / "a", tmpfs, "1")
    sweep(tmpfs)
    assert (first.exists(), second.exists()) == (False, True)


def test_shadow_of_a_recreated_state_folder_is_removed(tmp_path, tmpfs):
    folder = shadow_of(tmp_path / "a", tmpfs)
    shutil.rmtree(tmp_path / "a")
    shadow_of(tmp_path / "a", tmpfs, "1")
    sweep(tmpfs)
    assert not folder.exists()


def test_locked_shadow_is_kept(tmp_path, tmpfs):
    folder = shadow_of(tmp_path / "a", tmpfs)
    shutil.rmtree(tmp_path / "a")
    [left] = find_stale(tmpfs)
    with Shadow.create(folder, LAYOUT):
        sweep(tmpfs)
        assert not remove(left)
    assert folder.exists()
    assert remove(left)


def test_shadow_claimed_after_the_search_is_kept(tmp_path, tmpfs):
    folder = shadow_of(tmp_path / "a", tmpfs)
    shutil.rmtree(tmp_path / "a")
    [left] = find_stale(tmpfs)
    shadow_of(tmp_path / "b", tmpfs)
    assert not remove(left)
    assert folder.exists()


@pytest.mark.parametrize("changed", [{"device": -1}, {"root": [-1, -1]}])
def test_shadow_of_an_unreachable_state_folder_is_kept(tmp_path, tmpfs, changed):
    """The state folder's file system is not mounted, or its path is in another container."""
    folder = shadow_of(tmp_path / "a", tmpfs)
    record = json.loads((folder / OWNER_NAME).read_text())
    (folder / OWNER_NAME).write_text(json.dumps(record | changed))
    shutil.rmtree(tmp_path / "a")
    sweep(tmpfs)
    assert folder.exists()
    assert list(find_stale(tmpfs)) == []


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"state": 1}'])
def test_folder_without_an_owner_is_listed_and_kept(tmp_path, tmpfs, text):
    folder = shadow_of(tmp_path / "a", tmpfs)
    shutil.rmtree(tmp_path / "a")
    (folder / OWNER_NAME).unlink()
    if text is not None:
        (folder / OWNER_NAME).write_text(text)
    sweep(tmpfs)
    [left] = find_stale(tmpfs)
    assert not left.proved
    assert not remove(left)
    assert folder.exists()


def test_links_are_kept_and_partial_folders_removed(tmp_path, tmpfs):
    target = tmp_path / "mine"
    target.mkdir()
    (target / "file").touch()
    (tmpfs / f"{shadow_prefix()}9").symlink_to(target)
    half = tmpfs / f".{shadow_prefix()}gone-00"
    half.mkdir()
    (half / "model.safetensors").touch()
    sweep(tmpfs)
    assert not half.exists()
    assert (target / "file").exists()


@pytest.mark.root
def test_another_users_folder_is_kept(tmp_path, tmpfs):
    folder = shadow_of(tmp_path / "a", tmpfs)
    shutil.rmtree(tmp_path / "a")
    os.chown(folder, 65534, 65534)
    sweep(tmpfs)
    assert folder.exists()


def test_shadow_in_use_is_not_claimed(tmp_path, tmpfs):
    folder = shadow_of(tmp_path / "a", tmpfs)
    before = (folder / OWNER_NAME).read_bytes()
    with (
        state_lock(tmp_path / "b"),
        Shadow.create(folder, LAYOUT),
        pytest.raises(LocalError, match="in use by another process"),
    ):
        claim(tmp_path / "b", folder)
    assert (folder / OWNER_NAME).read_bytes() == before


def test_folder_removed_during_locking_is_recreated(tmpfs, monkeypatch):
    folder = tmpfs / "x"
    real, calls = module.private_folders.own_folder, []

    def own_folder(path, marks, *, make=True):
        fd = real(path, marks, make=make)
        calls.append(path)
        if len(calls) == 1:
            path.rmdir()  # as ``remove`` does in another process
        return fd

    monkeypatch.setattr(module.private_folders, "own_folder", own_folder)
    fd = locked(folder, make=True)
    assert os.path.samestat(os.stat(folder), os.fstat(fd))
    os.close(fd)


def test_check_command_lists_and_removes_stale_shadows(tmp_path, tmpfs, monkeypatch):
    state = tmp_path / "b"
    kept = shadow_of(state, tmpfs, "1")
    for name in ("deltas", "anchors"):
        (state / name).mkdir()
    (state / "peer.json").write_text('{"node": "00", "run": "", "newest": null, "evicted": []}')
    gone = shadow_of(tmp_path / "a", tmpfs)
    shutil.rmtree(tmp_path / "a")
    monkeypatch.setattr(find_stale, "__defaults__", (tmpfs,))
    for options, removed in (((), False), (("--repair",), True)):
        done = CliRunner().invoke(
            check, [str(state), "--shadow", str(kept), "--json", *options], catch_exceptions=False
        )
        [item] = json.loads(done.stdout)["leftovers"]
        assert (item["path"], item["proved"], item["removed"]) == (str(gone), True, removed)
        assert gone.exists() != removed
    assert kept.exists()


DAYS = 86400.0


def left_behind(state: Path, tmpfs: Path, name: str = "0", days: float = 0.0) -> Path:
    """The shadow of a daemon that ended that many days ago."""
    folder = shadow_of(state, tmpfs, name)
    leave(folder)
    at = time.time() - days * DAYS
    os.utime(folder / UNUSED_NAME, (at, at))
    return folder


def test_a_daemon_that_ends_names_the_memory_of_its_shadow(tmp_path, tmpfs, caplog):
    caplog.set_level(logging.INFO)
    folder = shadow_of(tmp_path / "a", tmpfs)
    leave(folder)
    assert f"GB in {folder}; `p2pcast clean` removes it" in caplog.text
    caplog.clear()
    with state_lock(tmp_path / "b"):
        claim(tmp_path / "b", tmpfs / "empty")
    leave(tmpfs / "empty")
    assert caplog.text == ""


def test_shadow_unused_for_days_is_removed_at_a_start(tmp_path, tmpfs, caplog):
    caplog.set_level(logging.INFO)
    old, new = left_behind(tmp_path / "a", tmpfs, "0", 8), left_behind(tmp_path / "b", tmpfs, "1", 6)
    sweep(tmpfs)
    assert (old.exists(), new.exists()) == (False, True)
    assert f"removed the shadow {old}" in caplog.text
    sweep(tmpfs, kept_days=float("inf"))
    assert new.exists()
    sweep(tmpfs, kept_days=5)
    assert not new.exists()


def test_time_of_a_killed_daemons_shadow_begins_with_the_next_start(tmp_path, tmpfs):
    folder = shadow_of(tmp_path / "a", tmpfs)
    sweep(tmpfs, kept_days=0)
    [found] = find_all(tmpfs)
    assert found.unused_s is not None
    claim(tmp_path / "a", folder)
    assert [one.unused_s for one in find_all(tmpfs)] == [None]


@pytest.mark.parametrize("held", ["shadow", "state"])
def test_shadow_in_use_is_never_removed_for_its_age(tmp_path, tmpfs, held):
    """``state``: a daemon that waits for its first version has locked its state folder alone."""
    folder = left_behind(tmp_path / "a", tmpfs, days=30)
    with Shadow.create(folder, LAYOUT) if held == "shadow" else state_lock(tmp_path / "a"):
        assert [one.in_use for one in find_all(tmpfs)] == [True]
        sweep(tmpfs)
        assert not remove_unused(folder)
    assert folder.exists()
    assert remove_unused(folder)
    assert list(find_all(tmpfs)) == []


@pytest.mark.parametrize("held", ["shadow", "state"])
def test_a_look_at_a_lock_fails_no_daemon(tmp_path, tmpfs, monkeypatch, held):
    """Another process looks while a daemon starts, and lets go of the lock afterwards."""
    state = tmp_path / "a"
    folder = shadow_of(state, tmpfs)
    look = os.open(folder if held == "shadow" else state / "lock" / "daemon", os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_SH)
    pauses = []

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 1:
            os.close(look)

    monkeypatch.setattr(folder_locks, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    assert shadow_of(state, tmpfs) == folder
    assert len(pauses) == 1


def test_clean_command_lists_and_removes_unused_shadows(tmp_path, tmpfs, monkeypatch):
    monkeypatch.setattr(find_all, "__defaults__", (tmpfs,))
    monkeypatch.setattr(module.remove_halves, "__defaults__", (tmpfs,))
    old, new, used = (left_behind(tmp_path / name, tmpfs, name, days) for name, days in (("a", 9), ("b", 1), ("c", 9)))
    half = tmpfs / f".{shadow_prefix()}gone-00"
    half.mkdir()
    with Shadow.create(used, LAYOUT):
        said = CliRunner().invoke(clean, ["--dry-run"], catch_exceptions=False).stdout
        assert {line.split(":")[1].split()[1] for line in said.splitlines() if line.startswith("would be removed")} == {
            str(old),
            str(new),
        }
        assert said.endswith(" GB would be freed\n")
        for options, there in (
            (("--dry-run",), {old, new, used, half}),
            (("--older-than", "8"), {new, used}),
            ((), {used}),
        ):
            done = CliRunner().invoke(clean, [*options, "--json"], catch_exceptions=False)
            rows = {Path(row["path"]): row for row in json.loads(done.stdout)["shadows"]}
            assert {path for path, row in rows.items() if not row["removed"]} == there - {half}
            assert set(tmpfs.iterdir()) == there
        assert rows[used] | {"bytes": 0} == {
            "path": str(used),
            "bytes": 0,
            "state": str(tmp_path / "c"),
            "state_exists": True,
            "in_use": True,
            "unused_s": None,
            "due": False,
            "removed": False,
        }
        said = CliRunner().invoke(clean, [], catch_exceptions=False).stdout
    assert f"shadow {used}: 0.00 GB, in use, state folder {tmp_path / 'c'}" in said


def test_clean_command_keeps_folders_without_an_owner(tmp_path, tmpfs, monkeypatch):
    monkeypatch.setattr(find_all, "__defaults__", (tmpfs,))
    folder = shadow_of(tmp_path / "a", tmpfs)
    (folder / OWNER_NAME).unlink()
    said = CliRunner().invoke(clean, [], catch_exceptions=False).stdout
    assert folder.exists()
    assert "no known state folder" in said


def test_status_lists_shadows_also_where_no_daemon_answers(tmp_path, tmpfs, monkeypatch):
    monkeypatch.setattr(find_all, "__defaults__", (tmpfs,))
    folder = left_behind(tmp_path / "a", tmpfs, days=3)
    shutil.rmtree(tmp_path / "a")
    done = CliRunner().invoke(status, ["--hub", "http://127.0.0.1:9"])
    assert done.exit_code != 0
    assert f"shadow {folder}: 0.00 GB, unused for 72 h, state folder {tmp_path / 'a'}, which is gone" in done.stdout

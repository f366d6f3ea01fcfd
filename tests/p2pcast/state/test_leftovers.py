"""Shadows that nobody will open again are removed; one that may still be used stays, whatever became of its process."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from p2pcast.cli.state_folder import check
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.daemon import shadow_prefix
from p2pcast.errors import LocalError
from p2pcast.state import leftovers as module
from p2pcast.state.leftovers import OWNER_NAME, claim, leftovers, remove, sweep
from p2pcast.state.shadow import PATCHES_NAME, Shadow, locked
from p2pcast.store.state_format import state_lock

LAYOUT = Layout([Tensor("a", "BF16", (100,))])


@pytest.fixture
def tmpfs(tmp_path) -> Path:
    (tmp_path / "tmpfs").mkdir()
    return tmp_path / "tmpfs"


def shadow_of(state: Path, tmpfs: Path, name: str = "0") -> Path:
    """As a killed peer leaves it: with a patch that was being written."""
    folder = tmpfs / f"{shadow_prefix()}{name}"
    with state_lock(state):
        claim(state, folder)
        Shadow.create(folder, LAYOUT).close()
        (folder / PATCHES_NAME / "0.3.p2pp.part").write_bytes(b"x" * 9000)
    return folder


def test_a_shadow_outlives_its_process(tmp_path, tmpfs):
    folder = shadow_of(tmp_path / "a", tmpfs)
    before = json.loads((folder / OWNER_NAME).read_text())
    sweep(tmpfs)
    assert folder.exists()
    assert list(leftovers(tmpfs)) == []
    claim(tmp_path / "a", folder)  # the next start
    assert json.loads((folder / OWNER_NAME).read_text()) == before


def test_the_shadow_of_a_state_folder_that_is_gone_is_removed(tmp_path, tmpfs):
    folder, other = shadow_of(tmp_path / "a", tmpfs), shadow_of(tmp_path / "b", tmpfs, "1")
    shutil.rmtree(tmp_path / "a")
    [left] = leftovers(tmpfs)
    assert (left.folder, left.proved) == (folder, True)
    assert left.nbytes >= 9000
    sweep(tmpfs)
    assert list(tmpfs.iterdir()) == [other]


def test_a_shadow_that_was_given_up_for_another_is_removed(tmp_path, tmpfs):
    first = shadow_of(tmp_path / "a", tmpfs)
    second = shadow_of(tmp_path / "a", tmpfs, "1")
    sweep(tmpfs)
    assert (first.exists(), second.exists()) == (False, True)


def test_the_shadow_of_a_state_folder_made_anew_is_removed(tmp_path, tmpfs):
    folder = shadow_of(tmp_path / "a", tmpfs)
    shutil.rmtree(tmp_path / "a")
    shadow_of(tmp_path / "a", tmpfs, "1")
    sweep(tmpfs)
    assert not folder.exists()


def test_what_a_process_has_locked_stays(tmp_path, tmpfs):
    folder = shadow_of(tmp_path / "a", tmpfs)
    shutil.rmtree(tmp_path / "a")
    [left] = leftovers(tmpfs)
    with Shadow.create(folder, LAYOUT):
        sweep(tmpfs)
        assert not remove(left)
    assert folder.exists()
    assert remove(left)


def test_what_was_claimed_since_it_was_found_stays(tmp_path, tmpfs):
    folder = shadow_of(tmp_path / "a", tmpfs)
    shutil.rmtree(tmp_path / "a")
    [left] = leftovers(tmpfs)
    shadow_of(tmp_path / "b", tmpfs)
    assert not remove(left)
    assert folder.exists()


@pytest.mark.parametrize("changed", [{"device": -1}, {"root": [-1, -1]}])
def test_a_state_folder_that_may_be_elsewhere_keeps_its_shadow(tmp_path, tmpfs, changed):
    """Its file system is not mounted, or its path is another container's."""
    folder = shadow_of(tmp_path / "a", tmpfs)
    record = json.loads((folder / OWNER_NAME).read_text())
    (folder / OWNER_NAME).write_text(json.dumps(record | changed))
    shutil.rmtree(tmp_path / "a")
    sweep(tmpfs)
    assert folder.exists()
    assert list(leftovers(tmpfs)) == []


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"state": 1}'])
def test_a_folder_that_does_not_say_whose_it_is_is_shown_and_stays(tmp_path, tmpfs, text):
    folder = shadow_of(tmp_path / "a", tmpfs)
    shutil.rmtree(tmp_path / "a")
    (folder / OWNER_NAME).unlink()
    if text is not None:
        (folder / OWNER_NAME).write_text(text)
    sweep(tmpfs)
    [left] = leftovers(tmpfs)
    assert not left.proved
    assert not remove(left)
    assert folder.exists()


def test_links_and_half_removed_folders(tmp_path, tmpfs):
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
def test_another_users_folder_stays(tmp_path, tmpfs):
    folder = shadow_of(tmp_path / "a", tmpfs)
    shutil.rmtree(tmp_path / "a")
    os.chown(folder, 65534, 65534)
    sweep(tmpfs)
    assert folder.exists()


def test_a_shadow_in_use_is_not_claimed(tmp_path, tmpfs):
    folder = shadow_of(tmp_path / "a", tmpfs)
    before = (folder / OWNER_NAME).read_bytes()
    with state_lock(tmp_path / "b"), Shadow.create(folder, LAYOUT), pytest.raises(LocalError, match="in use by another process"):
        claim(tmp_path / "b", folder)
    assert (folder / OWNER_NAME).read_bytes() == before


def test_a_folder_that_is_removed_while_it_is_being_locked_is_made_anew(tmpfs, monkeypatch):
    folder = tmpfs / "x"
    real, calls = module.private.own_folder, []

    def own_folder(path, marks, *, make=True):
        fd = real(path, marks, make=make)
        calls.append(path)
        if len(calls) == 1:
            path.rmdir()  # as `remove` does in another process
        return fd

    monkeypatch.setattr(module.private, "own_folder", own_folder)
    fd = locked(folder, make=True)
    assert os.path.samestat(os.stat(folder), os.fstat(fd))
    os.close(fd)


def test_check_shows_what_is_left_over_and_removes_it(tmp_path, tmpfs, monkeypatch):
    state = tmp_path / "b"
    kept = shadow_of(state, tmpfs, "1")
    for name in ("deltas", "anchors"):
        (state / name).mkdir()
    (state / "peer.json").write_text('{"node": "00", "run": "", "newest": null, "evicted": []}')
    gone = shadow_of(tmp_path / "a", tmpfs)
    shutil.rmtree(tmp_path / "a")
    monkeypatch.setattr(leftovers, "__defaults__", (tmpfs,))
    for options, removed in (((), False), (("--repair",), True)):
        done = CliRunner().invoke(check, [str(state), "--shadow", str(kept), "--json", *options], catch_exceptions=False)
        [item] = json.loads(done.stdout)["leftovers"]
        assert (item["path"], item["proved"], item["removed"]) == (str(gone), True, removed)
        assert gone.exists() != removed
    assert kept.exists()

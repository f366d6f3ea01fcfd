"""Installation by safetensors:DIR: folders of checkpoints, whole whatever happens."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from held_weights import LAYOUT, check, hold, install, names, small_files, state

from p2pcast.checkpoint.folder_form import MARKERS, FolderForm, StepNames
from p2pcast.codec.digest import MASK, digest, word_dtype
from p2pcast.files import disk
from p2pcast.ground.errors import IntegrityError, LocalError, RetryableError, UsageError
from p2pcast.ground.version import Version
from rollout_node.installers import step_folders
from rollout_node.installers.checkpoint_folder import FolderInstaller
from rollout_node.installers.installer import Audit
from rollout_node.installers.step_folders import StepFolders
from trainer_node.publish.checkpoint_watcher import scan


@pytest.fixture
async def target(tmp_path):
    installer = FolderInstaller(tmp_path / "out", small_files, keep=2)
    await installer.start()
    yield installer
    await installer.close()


async def test_old_versions_are_removed_after_new_versions(target, shadow, tmp_path):
    out = tmp_path / "out"
    assert (target.committed, target.ready) == (None, False)
    for step in range(5):
        version = Version(0, step)
        await target.stage(version, hold(shadow, version, step))
        assert not (out / f"step_{step}").exists()
        report = await target.commit(version)
        assert report.detail["folder"] == str(out / f"step_{step}")
        assert (target.committed, target.ready) == (version, True)
        assert os.readlink(out / "latest") == f"step_{step}"
        check(out / "latest", version, step)
        assert names(out) == {"latest", *(f"step_{n}" for n in (step - 1, step) if n >= 0)}


async def test_a_step_that_returns_in_a_new_branch_takes_the_place(target, shadow, tmp_path):
    out = tmp_path / "out"
    for step in (4, 5):
        await install(target, shadow, Version(0, step), step)
    await install(target, shadow, Version(1, 4), 99)
    check(out / "step_4", Version(1, 4), 99)
    check(out / "step_5", Version(0, 5), 5)
    assert os.readlink(out / "latest") == "step_4"
    await install(target, shadow, Version(1, 5), 98)
    check(out / "step_5", Version(1, 5), 98)
    assert names(out) == {"latest", "step_4", "step_5"}


async def test_without_atomic_exchange_a_folder_is_still_replaced(target, shadow, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "exchange", lambda one, other: False)
    await install(target, shadow, Version(0, 4), 4)
    await install(target, shadow, Version(1, 4), 99)
    check(tmp_path / "out" / "step_4", Version(1, 4), 99)
    assert names(tmp_path / "out") == {"latest", "step_4"}


async def test_the_same_bytes_are_not_written_again(target, shadow, tmp_path):
    out = tmp_path / "out"
    await install(target, shadow, Version(0, 4), 4)
    before = (out / "step_4" / "model.safetensors").stat().st_ino
    await install(target, shadow, Version(0, 4), 4)
    assert (out / "step_4" / "model.safetensors").stat().st_ino == before
    (out / "step_4" / "tokenizer" / "vocab.txt").write_text("1")
    await install(target, shadow, Version(1, 4), 4)  # another branch, these very bytes
    assert (out / "step_4" / "model.safetensors").stat().st_ino == before
    check(out / "step_4", Version(1, 4), 4)
    (out / "step_4" / "extra").touch()
    await install(target, shadow, Version(1, 4), 4)
    assert (out / "step_4" / "model.safetensors").stat().st_ino != before
    check(out / "step_4", Version(1, 4), 4)


def sums() -> dict[int, int]:
    """Digest of each tensor of ``state(1)``."""
    data, found = state(1), dict.fromkeys(range(len(LAYOUT.tensors)), 0)
    for cell in LAYOUT.cells:
        words = np.frombuffer(data, word_dtype(cell.word_bytes), cell.words, cell.offset)
        found[cell.tensor] = (found[cell.tensor] + digest(words, cell)) & MASK
    return found


@pytest.mark.parametrize("loss", ["removed", "STABLE", "another branch", "link"])
async def test_a_check_sees_that_the_version_is_gone(target, shadow, tmp_path, loss):
    await target.check()
    await install(target, shadow, Version(0, 1), 1)
    await target.check()
    assert (target.committed, target.ready) == (Version(0, 1), True)
    folder = tmp_path / "out" / "step_1"
    if loss == "removed":
        shutil.rmtree(folder)
    elif loss == "STABLE":
        (folder / "STABLE").unlink()
    elif loss == "another branch":
        (folder / "STABLE").write_text("1.1\n")
    else:
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    await target.check()
    assert (target.committed, target.ready) == (None, False)


async def test_an_audit_reads_the_folder_back(target, shadow, tmp_path):
    with pytest.raises(LocalError, match="nothing to audit"):
        await target.audit(LAYOUT, sums())
    await install(target, shadow, Version(0, 1), 1)
    assert await target.audit(LAYOUT, sums()) == Audit(Version(0, 1), [], [])
    assert target.ready
    name = LAYOUT.tensors[1].name
    assert await target.audit(LAYOUT, sums() | {1: 5}) == Audit(Version(0, 1), [name], [])
    assert (target.committed, target.ready) == (None, False)


@pytest.mark.parametrize("damage", ["a bit", "cut short", "removed", "another layout"])
async def test_an_audit_finds_damage_and_the_next_install_repairs_the_folder(target, shadow, tmp_path, damage):
    await install(target, shadow, Version(0, 1), 1)
    path = tmp_path / "out" / "step_1" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    if damage == "a bit":
        path.write_bytes(data)
    elif damage == "cut short":
        path.write_bytes(data[:-9])
    elif damage == "removed":
        path.unlink()
    else:
        path.write_bytes(data.replace(b"a.weight", b"z.weight", 1))
    found = (await target.audit(LAYOUT, sums())).wrong
    assert len(found) == (1 if damage == "a bit" else len(LAYOUT.tensors))
    await install(target, shadow, Version(0, 1), 1)
    assert (await target.audit(LAYOUT, sums())).wrong == []
    check(tmp_path / "out" / "step_1", Version(0, 1), 1)


async def test_a_folder_that_was_removed_whole_is_made_again_and_locked(target, shadow, tmp_path):
    await install(target, shadow, Version(0, 1), 1)
    shutil.rmtree(tmp_path / "out")
    await install(target, shadow, Version(0, 2), 2)
    check(tmp_path / "out" / "latest", Version(0, 2), 2)
    other = FolderInstaller(tmp_path / "out", small_files, keep=2)
    with pytest.raises(LocalError, match="another process"):
        await other.start()
    await other.close()


async def test_superseded_and_unstaged_versions(target, shadow, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(LocalError, match=r"0\.1 isn't staged, nothing is"):
        await target.commit(Version(0, 1))
    await target.stage(Version(0, 1), hold(shadow, Version(0, 1), 1))
    await target.stage(Version(0, 2), hold(shadow, Version(0, 2), 2))
    assert len(names(out)) == 1
    with pytest.raises(LocalError, match=r"0\.1 isn't staged, 0\.2 is"):
        await target.commit(Version(0, 1))
    assert not target.ready
    await target.commit(Version(0, 2))
    assert target.ready
    assert names(out) == {"latest", "step_2"}
    await target.stage(Version(0, 3), hold(shadow, Version(0, 3), 3))
    await target.close()
    assert names(out) == {"latest", "step_2"}


async def test_foreign_files_stay(target, shadow, tmp_path):
    out = tmp_path / "out"
    for step in (1, 2):
        (out / f"step_{step}").mkdir()
        (out / f"step_{step}" / "precious").touch()
    (out / "step_2" / "STABLE").touch()
    for step in (1, 2):
        with pytest.raises(LocalError, match="not written by p2pcast"):
            await target.stage(Version(0, step), hold(shadow, Version(0, step), step))
    for step in (3, 4, 5):
        await install(target, shadow, Version(0, step), step)
    assert names(out) == {"latest", "step_1", "step_2", "step_4", "step_5"}


async def test_leftovers_of_a_killed_process_are_removed(target, shadow, tmp_path):
    out = tmp_path / "out"
    await install(target, shadow, Version(0, 1), 1)
    await target.close()
    (out / ".step_2.part-00ff").mkdir()
    (out / ".step_2.part-00ff" / "config.json").touch()
    (out / ".latest.part-00ff").symlink_to("step_2")
    (out / "step_1").rename(out / ".step_1.part-00fe-replaced")
    again = FolderInstaller(out, small_files, keep=2)
    await again.start()
    assert names(out) == {"latest", "step_1"}
    check(out / "latest", Version(0, 1), 1)
    with pytest.raises(LocalError, match="written by another process"):
        await FolderInstaller(out, small_files, keep=2).start()
    await again.close()


@pytest.mark.parametrize("style", MARKERS)
async def test_folders_have_the_names_and_markers_of_their_form(shadow, tmp_path, style):
    out, marker = tmp_path / "out", MARKERS[style]
    form = FolderForm(StepNames.parse("weight_v{step:06}"), marker)
    for name in ("step_1", ".step_9.part-00ff", ".weight_v9.part-00ff"):
        (out / name).mkdir(parents=True)
    for step in (1, 2, 3):
        installer = FolderInstaller(out, small_files, keep=2, form=form)
        await install(installer, shadow, Version(0, step), step)
        await installer.close()
        (out / f".weight_v{step:06}.part-00ff").mkdir()
    installer = FolderInstaller(out, small_files, keep=2, form=form)
    await installer.start()
    latest = out / "latest"
    assert names(out) == {"latest", "step_1", ".step_9.part-00ff", ".weight_v9.part-00ff", "weight_v000002",
                          "weight_v000003"}  # fmt: skip
    assert os.readlink(latest) == "weight_v000003"
    assert (latest / marker.last).read_text() == "0.3\n"
    assert all((latest / name).read_bytes() == b"" for name in marker.before)
    others = {p.name for p in latest.iterdir()} - {path.split("/")[0] for path in small_files(Version(0, 3))}
    assert others == {"model.safetensors", marker.last, *marker.before}
    assert [found.step for found in scan(out, form)] == [2, 3], "the hub of another run could read them"
    await installer.close()


async def test_a_death_at_any_rename_leaves_whole_checkpoints(shadow, tmp_path, monkeypatch):
    """Both ways to replace a step, killed before each rename: a named folder is whole, and the next start repairs the
    rest.
    """
    real = disk.rename

    class Died(BaseException):
        pass

    for left in range(1, 6):
        out = tmp_path / str(left)
        folders = StepFolders(out, 2)
        folders.start()
        wanted = threading.Event()
        for version, seed in ((Version(0, 1), 1), (Version(1, 1), 2)):
            folders.stage(version, hold(shadow, version, seed), small_files(version), wanted)
            if seed == 1:
                folders.publish(version)
                folders.settle(version)
        count = 0

        def rename(path, to, left=left):
            nonlocal count
            count += 1
            if count == left:
                raise Died
            return real(path, to)

        monkeypatch.setattr(disk, "rename", rename)
        monkeypatch.setattr(disk, "exchange", lambda one, other: False)
        try:
            folders.publish(Version(1, 1))
        except Died:
            pass
        else:
            assert left > 3
        monkeypatch.undo()
        os.close(folders._lock_fd)  # the process is gone
        StepFolders(out, 2).start()
        assert names(out) == {"latest", "step_1"}
        check(out / "step_1", *((Version(0, 1), 1) if left <= 2 else (Version(1, 1), 2)))


@pytest.mark.parametrize(
    ("given", "folder", "file"), [(None, 0o700, 0o600), (0o755, 0o755, 0o644), (0o750, 0o750, 0o640)]
)
async def test_installed_files_take_the_access_rights_of_their_folder(shadow, tmp_path, given, folder, file):
    """With any umask, because other users' engines read the folder."""
    out = tmp_path / "out"
    if given is not None:
        out.mkdir()
        out.chmod(given)
    before = os.umask(0o077 if given else 0)
    try:
        installer = FolderInstaller(out, lambda _: {"config.json": b"{}", "code/a.py": b""}, keep=2)
        await install(installer, shadow, Version(0, 1), 1)
        await installer.close()
    finally:
        os.umask(before)
    made = [out, *(p for p in out.rglob("*") if not p.is_symlink())]
    assert {stat.S_IMODE(p.stat().st_mode) for p in made if p.is_dir()} == {folder}
    assert {stat.S_IMODE(p.stat().st_mode) for p in made if p.is_file()} == {file}


async def test_bad_paths_and_bad_folders(shadow, tmp_path):
    for path in ("../x", "/x", "STABLE", "model.safetensors", "a//b", ".hidden"):
        installer = FolderInstaller(tmp_path / "out", lambda _, path=path: {path: b""}, keep=1)
        await installer.start()
        with pytest.raises(IntegrityError):
            await installer.stage(Version(0, 1), hold(shadow, Version(0, 1), 1))
        assert names(tmp_path / "out") == set()
        await installer.close()
    (tmp_path / "other" / "latest").mkdir(parents=True)
    with pytest.raises(LocalError, match="not a link"):
        await FolderInstaller(tmp_path / "other", small_files, keep=1).start()
    (tmp_path / "file").touch()
    with pytest.raises(LocalError):
        await FolderInstaller(tmp_path / "file", small_files, keep=1).start()
    with pytest.raises(UsageError):
        FolderInstaller(tmp_path / "none", small_files, keep=0)


async def test_cancelled_staging_leaves_nothing(target, shadow, tmp_path, monkeypatch):
    path = hold(shadow, Version(0, 1), 1)
    entered, go = threading.Event(), threading.Event()
    real = os.fsync

    def slow(fd):
        entered.set()
        go.wait(600)
        real(fd)

    monkeypatch.setattr(os, "fsync", slow)
    task = asyncio.create_task(target.stage(Version(0, 1), path))
    await asyncio.to_thread(entered.wait, 600)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    monkeypatch.undo()
    with pytest.raises(LocalError, match="nothing is"):
        await target.commit(Version(0, 1))
    assert names(tmp_path / "out") == set()
    wanted = threading.Event()
    wanted.set()
    with pytest.raises(RetryableError):
        target._folders.stage(Version(0, 1), path, {}, wanted)


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 24 KiB: room for one version, not for two."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24k,mode=700", "tmpfs", folder], capture_output=True
    ).returncode:
        pytest.skip("this container may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("foreseen", [True, False])
async def test_a_full_disk_is_one_clear_error(shadow, small_disk, monkeypatch, foreseen):
    installer = FolderInstaller(small_disk, small_files, keep=2)
    await installer.start()
    await install(installer, shadow, Version(0, 1), 1)
    if not foreseen:  # another process fills the disk during the write
        elsewhere = os.statvfs(".")
        monkeypatch.setattr(os, "statvfs", lambda _: elsewhere)
    with pytest.raises(LocalError, match="no room for version" if foreseen else "no space is left"):
        await installer.stage(Version(0, 2), hold(shadow, Version(0, 2), 2))
    assert not installer.ready
    assert installer.committed == Version(0, 1)
    assert names(small_disk) == {"latest", "step_1"}
    check(small_disk / "latest", Version(0, 1), 1)
    await installer.close()


async def test_copy_across_and_within_file_systems(shadow, tmp_path):
    """/dev/shm to disk takes sendfile, disk to disk copy_file_range; bytes are the same."""
    source = hold(shadow, Version(0, 1), 1)
    for folder in (tmp_path, Path("/dev/shm")):
        target = folder / f"p2pcast-test-{os.getpid()}"
        try:
            step_folders._copy_synced(source, target, threading.Event())
            assert target.read_bytes() == source.read_bytes()
        finally:
            target.unlink(missing_ok=True)

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from p2pcast.checkpoint import Checkpoint
from p2pcast.codec.digest import MASK, digest, word_dtype
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.errors import IntegrityError, LocalError, RetryableError, UsageError
from p2pcast.state.shadow import Shadow
from p2pcast.store import disk
from p2pcast.version import Version
from rollout_node.installers import step_folders
from rollout_node.installers.checkpoint_folder import FolderInstaller
from rollout_node.installers.command import CommandInstaller
from rollout_node.installers.installer import Audit
from rollout_node.installers.step_folders import StepFolders
from tests.process_ends import wait_for_end

LAYOUT = Layout(
    [Tensor("a.weight", "BF16", (300, 7)), Tensor("b", "F32", (5,)), Tensor("c", "U8", (3,))], cell_words=512
)


def small_files(version: Version) -> dict[str, bytes]:
    return {"config.json": b"{}", "tokenizer/vocab.txt": str(version.branch).encode()}


def state(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(LAYOUT.nbytes)


@pytest.fixture
def shadow(tmp_path):
    with Shadow.create(tmp_path / "shadow", LAYOUT) as shadow:
        yield shadow


def hold(shadow: Shadow, version: Version, seed: int) -> Path:
    data = state(seed)
    shadow.fill(version, lambda c: np.frombuffer(data, word_dtype(c.word_bytes), c.words, c.offset))
    return shadow.path


@pytest.fixture
async def target(tmp_path):
    installer = FolderInstaller(tmp_path / "out", small_files, keep=2)
    await installer.start()
    yield installer
    await installer.close()


def check(folder: Path, version: Version, seed: int) -> None:
    """The folder is exactly this version, and an ordinary checkpoint."""
    assert (folder / "STABLE").read_text() == f"{version}\n"
    found = Checkpoint.open(folder)
    words = b"".join(found.words(c).tobytes() for c in LAYOUT.cells)
    assert found.layout(cell_words=512) == LAYOUT
    assert words == state(seed)
    assert found.small_files() == small_files(version)


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


async def install(installer, shadow: Shadow, version: Version, seed: int):
    await installer.stage(version, hold(shadow, version, seed))
    return await installer.commit(version)


# -- safetensors:DIR


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


# -- exec:CMD


async def test_a_command_cannot_be_audited(shadow, tmp_path):
    installer = CommandInstaller("true", tmp_path / "scratch", small_files)
    await installer.start()
    assert installer.commit_needs_shadow
    with pytest.raises(LocalError, match="nothing to audit"):
        await installer.audit(LAYOUT, {})
    await install(installer, shadow, Version(0, 1), 1)
    await installer.check()
    assert (installer.committed, installer.ready) == (Version(0, 1), True)
    assert await installer.audit(LAYOUT, {}) == Audit(Version(0, 1), [], [t.name for t in LAYOUT.tensors])
    await installer.close()


PYTHON = shlex.quote(sys.executable)


def command(code: str) -> str:
    return f"{PYTHON} -S -c {shlex.quote(code)}"


async def test_command_sees_the_version(shadow, tmp_path):
    seen = tmp_path / "seen"
    code = (
        "import os; e = os.environ; d = e['P2PCAST_DIR'];"
        "same = open(d + '/model.safetensors', 'rb').read() == open(e['P2PCAST_SHADOW'], 'rb').read();"
        f"print(e['P2PCAST_VERSION'], e['P2PCAST_STEP'], os.path.basename(d), same, file=open({str(seen)!r}, 'a'))"
    )
    installer = CommandInstaller(command(code), tmp_path / "scratch", small_files)
    await installer.start()
    for step in (1, 2, 3):
        report = await install(installer, shadow, Version(1, step), step)
        assert report.detail["folder"] == str(tmp_path / "scratch" / f"step_{step}")
        assert (installer.committed, installer.ready) == (Version(1, step), True)
    assert seen.read_text() == "1.1 1 step_1 True\n1.2 2 step_2 True\n1.3 3 step_3 True\n"
    assert names(tmp_path / "scratch") == {"latest", "step_2", "step_3", "command.log"}
    check(tmp_path / "scratch" / "latest", Version(1, 3), 3)
    await installer.close()


async def test_a_failing_command_is_not_a_commit(shadow, tmp_path):
    good = tmp_path / "good"
    code = (
        "import os, sys\n"
        f"if os.environ['P2PCAST_STEP'] in open({str(good)!r}).read().split(): sys.exit()\n"
        "print('first'); print('engine said no', file=sys.stderr); sys.exit(3)"
    )
    good.write_text("1")
    installer = CommandInstaller(command(code), tmp_path / "scratch", small_files)
    await installer.start()
    await install(installer, shadow, Version(0, 1), 1)
    for step in (2, 3, 4, 5):
        with pytest.raises(LocalError, match=rf"version 0\.{step} not committed: exit status 3.*engine said no"):
            await install(installer, shadow, Version(0, step), step)
        assert (installer.committed, installer.ready) == (None, False)
    # The last good one stays, failed ones don't pile up.
    assert names(tmp_path / "scratch") == {"latest", "step_1", "step_4", "step_5", "command.log"}
    check(tmp_path / "scratch" / "latest", Version(0, 1), 1)
    good.write_text("1 5")
    await installer.commit(Version(0, 5))
    assert (installer.committed, installer.ready) == (Version(0, 5), True)
    assert os.readlink(tmp_path / "scratch" / "latest") == "step_5"
    await installer.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_command_without_end_is_stopped_with_its_children(shadow, tmp_path):
    pids = tmp_path / "pids"
    code = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import signal; signal.pause()'])\n"
        f"open({str(pids)!r} + '.part', 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(pids)!r} + '.part', {str(pids)!r})\n"
        "child.wait()"
    )
    timeouts_s = iter((2, 8, 32, 128))
    while not pids.exists():  # on a busy machine the command needs more time to start its child
        timeout_s = next(timeouts_s)
        installer = CommandInstaller(command(code), tmp_path / "scratch", small_files, timeout_s=timeout_s)
        await installer.start()
        with pytest.raises(LocalError, match=f"no end after {timeout_s} s"):
            await install(installer, shadow, Version(0, 1), 1)
        assert not installer.ready
        await installer.close()
    for pid in map(int, pids.read_text().split()):
        await asyncio.to_thread(wait_for_end, pid)


async def test_cancelling_a_commit_ends_the_command(shadow, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = f"import os, signal; open({str(fifo)!r}, 'w').write(str(os.getpid())); signal.pause()"
    installer = CommandInstaller(command(code), tmp_path / "scratch", small_files)
    await installer.start()
    task = asyncio.create_task(install(installer, shadow, Version(0, 1), 1))
    pid = int(await asyncio.to_thread(fifo.read_text))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive(pid)
    assert (installer.committed, installer.ready) == (None, False)
    await installer.close()


async def test_a_command_that_dies_by_a_signal(shadow, tmp_path):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    installer = CommandInstaller(command(code), tmp_path / "scratch", small_files)
    await installer.start()
    with pytest.raises(LocalError, match=f"ended by signal {int(signal.SIGKILL)}.*printed nothing"):
        await install(installer, shadow, Version(0, 1), 1)
    await installer.close()


async def test_commands_that_are_none(tmp_path):
    for text in ("", "  ", "'open"):
        with pytest.raises(UsageError):
            CommandInstaller(text, tmp_path / "scratch", small_files)
    with pytest.raises(LocalError, match="no command '/no/such'"):
        await CommandInstaller("/no/such thing", tmp_path / "scratch", small_files).start()
    # No shell: this is one word with a semicolon.
    installer = CommandInstaller("true;false", tmp_path / "scratch", small_files)
    with pytest.raises(LocalError):
        await installer.start()

"""Attacks by another user of this machine on folders and files: created first, linked elsewhere, writable by all.

Tests with two users run as the users root and ``nobody``.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.files import disk, private_folders
from p2pcast.files.atomic_files import atomic_write
from p2pcast.ground.errors import LocalError
from p2pcast.ground.version import Version
from p2pcast.process.daemon_process import original_umask, restrict_umask
from p2pcast.state.patch_file import PatchFile, PatchWriter
from p2pcast.state.shadow import MARKS_NAME, MODEL_NAME, PATCHES_NAME, Shadow
from p2pcast.state.stale_shadows import OWNER_NAME, claim
from p2pcast.store.state_format import state_lock

LAYOUT = Layout([Tensor("a", "BF16", (100,))])
PRECIOUS = b"root's own"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def open_umask() -> Iterator[None]:
    """A careless user's umask: permission bits are restricted only by explicit modes."""
    before = os.umask(0)
    yield
    os.umask(before)


def lock_state(folder: Path) -> None:
    with state_lock(folder):
        pass


def make_shadow(folder: Path) -> None:
    Shadow.create(folder, LAYOUT).close()


MAKERS = pytest.mark.parametrize("make", [lock_state, make_shadow])


# -- the folder


@pytest.mark.root
@MAKERS
@pytest.mark.parametrize("bits", ["0o777", "0o755"])
def test_folder_created_by_another_user_is_refused(shared, stranger, make, bits):
    stranger(f"os.mkdir(sys.argv[1], {bits})", shared / "x")
    with pytest.raises(
        LocalError, match=r"x belongs to user 65534, not to the user of this process \(0\); run this as that user"
    ):
        make(shared / "x")
    assert list((shared / "x").iterdir()) == []


@pytest.mark.root
@MAKERS
def test_link_in_place_of_a_folder_is_refused(shared, stranger, tmp_path, make):
    stranger("os.symlink(sys.argv[1], sys.argv[2])", tmp_path, shared / "x")
    with pytest.raises(LocalError, match="x is a link; name its target folder"):
        make(shared / "x")
    assert list(tmp_path.iterdir()) == []


@MAKERS
def test_world_writable_folder_is_refused(tmp_path, make):
    (tmp_path / "x").mkdir()
    (tmp_path / "x").chmod(0o777)
    with pytest.raises(LocalError, match=r"all users of this machine may write to .*chmod 700"):
        make(tmp_path / "x")
    assert list((tmp_path / "x").iterdir()) == []


@MAKERS
def test_folder_that_others_may_rename_is_refused(tmp_path, make):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(LocalError, match=r"may rename files in .*open.*chmod \+t"):
        make(tmp_path / "open" / "x")
    (tmp_path / "open").chmod(0o1777)
    make(tmp_path / "open" / "x")


@pytest.mark.root
@MAKERS
def test_folder_behind_another_users_link_is_refused(tmp_path, make):
    """A link whose target leads over another user's link is refused too; this user's own links are allowed."""
    (tmp_path / "real").mkdir()
    (tmp_path / "theirs").symlink_to(tmp_path / "real")
    (tmp_path / "ours").symlink_to("theirs")
    make(tmp_path / "ours" / "x")
    os.chown(tmp_path / "theirs", 12345, 12345, follow_symlinks=False)
    for name in ("theirs", "ours"):
        with pytest.raises(LocalError, match=f"{tmp_path}/theirs is a link of user 12345"):
            make(tmp_path / name / "x")


@MAKERS
def test_new_folder_is_private(tmp_path, make, open_umask):
    make(tmp_path / "x")
    assert {mode(p) & private_folders.OTHERS for p in (tmp_path / "x", *(tmp_path / "x").rglob("*"))} == {0}


def test_folder_of_version_0_1_is_made_private(tmp_path, open_umask):
    state, other = tmp_path / "state", tmp_path / "other"
    other.touch()
    (state / "anchors" / "0.1").mkdir(parents=True)
    for name in ("lock", "peer.json", "anchors/0.1/model.safetensors"):
        (state / name).write_bytes(b"x")
    (state / "latest").symlink_to(other)
    for path in (state, *state.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o775 if path.is_dir() else 0o664)
    lock_state(state)
    assert {mode(p) for p in (state, *state.rglob("*")) if p.is_dir()} == {0o700}
    assert {mode(p) for p in state.rglob("*") if p.is_file() and not p.is_symlink()} == {0o600}
    assert mode(other) == 0o666


@pytest.mark.root
def test_another_users_file_in_an_open_folder_is_named(shared, stranger):
    state = shared / "state"
    state.mkdir()
    (state / "lock").touch()
    state.chmod(0o777)
    stranger("open(sys.argv[1], 'w').close()", state / "trust.json")
    state.chmod(0o755)
    with pytest.raises(LocalError, match=r"trust.json belongs to user 65534"):
        lock_state(state)


@MAKERS
def test_folder_with_foreign_files_is_not_made_private(tmp_path, make):
    (tmp_path / "x").mkdir()
    (tmp_path / "x").chmod(0o755)
    (tmp_path / "x" / "thesis.tex").touch()
    with pytest.raises(LocalError, match="holds files that are not p2pcast's"):
        make(tmp_path / "x")
    assert mode(tmp_path / "x") == 0o755


# -- files in it


@pytest.fixture
def precious(tmp_path) -> Path:
    path = tmp_path / "precious"
    path.write_bytes(PRECIOUS)
    return path


def put_patch(folder: Path) -> None:
    PatchWriter(folder / PATCHES_NAME / "0.2.p2pp", LAYOUT, Version(0, 1), Version(0, 2)).finish(0)


def open_shadow(folder: Path) -> None:
    Shadow.open(folder, LAYOUT).close()


@pytest.mark.parametrize(
    ("name", "work"),
    [
        (MODEL_NAME, make_shadow),
        (MODEL_NAME, open_shadow),
        (MARKS_NAME, open_shadow),
        (f"{PATCHES_NAME}/0.2.p2pp.part", put_patch),
        ("lock", lock_state),
    ],
)
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_link_at_an_opened_name_leaves_its_target_unchanged(tmp_path, precious, name, work, link):
    folder = tmp_path / "x"
    with Shadow.create(folder, LAYOUT) as shadow, shadow.filling(Version(0, 1)) as put:
        put(LAYOUT.cells[0], shadow.words(LAYOUT.cells[0]))
    (folder / name).unlink(missing_ok=True)
    link(precious, folder / name)
    with contextlib.suppress(LocalError):
        work(folder)
    assert precious.read_bytes() == PRECIOUS


def test_shadow_is_not_opened_through_a_link(tmp_path):
    with Shadow.create(tmp_path / "x", LAYOUT) as shadow, shadow.filling(Version(0, 1)) as put:
        put(LAYOUT.cells[0], shadow.words(LAYOUT.cells[0]))
    (tmp_path / "x" / MODEL_NAME).rename(tmp_path / "elsewhere")
    (tmp_path / "x" / MODEL_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        LocalError, match=r"model.safetensors is a link, not a regular file, or belongs to another user"
    ):
        open_shadow(tmp_path / "x")


def test_link_in_place_of_the_patches_folder_leaves_its_target_unchanged(tmp_path):
    make_shadow(tmp_path / "x")
    (tmp_path / "x" / PATCHES_NAME).rmdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "0.1.p2pp").write_bytes(PRECIOUS)
    (tmp_path / "x" / PATCHES_NAME).symlink_to(tmp_path / "mine")
    with pytest.raises(LocalError, match="patches is a link"):
        make_shadow(tmp_path / "x")
    assert (tmp_path / "mine" / "0.1.p2pp").read_bytes() == PRECIOUS


def test_link_in_place_of_the_record_leaves_its_target_unchanged(tmp_path, precious):
    lock_state(tmp_path / "state")
    make_shadow(tmp_path / "x")
    (tmp_path / "x" / OWNER_NAME).symlink_to(precious)
    claim(tmp_path / "state", tmp_path / "x")
    assert precious.read_bytes() == PRECIOUS
    assert not (tmp_path / "x" / OWNER_NAME).is_symlink()


def test_patch_is_not_read_through_a_link(tmp_path, precious):
    (tmp_path / "0.2.p2pp").symlink_to(precious)
    with pytest.raises(LocalError, match="it is a link"):
        PatchFile.open(tmp_path / "0.2.p2pp", LAYOUT)


def test_written_files_are_private_unless_requested(tmp_path, open_umask):
    disk.make_folder(tmp_path / "a" / "b")
    os.close(disk.create(tmp_path / "file", os.O_WRONLY))
    atomic_write(tmp_path / "small", b"")
    assert [mode(tmp_path / n) for n in ("a", "a/b", "file", "small")] == [0o700, 0o700, 0o600, 0o600]
    os.umask(0o027)
    atomic_write(tmp_path / "asked", b"", None)
    assert mode(tmp_path / "asked") == 0o640


def test_daemon_files_are_private(tmp_path):
    before = os.umask(0o022)
    try:
        restrict_umask()
        (tmp_path / "log").touch()
        assert (mode(tmp_path / "log"), original_umask()) == (0o600, 0o022)
    finally:
        os.umask(before)


# -- folders for others to read


@pytest.mark.parametrize(("given", "expected"), [(0o700, 0o700), (0o755, 0o755), (0o2775, 0o755), (0o750, 0o750)])
def test_a_shared_folders_mode_decides_access(tmp_path, given, expected):
    tmp_path.chmod(given)
    assert private_folders.check_shared(tmp_path) == expected


def test_world_writable_shared_folder_is_refused(tmp_path):
    tmp_path.chmod(0o1777)
    with pytest.raises(LocalError, match="chmod o-w"):
        private_folders.check_shared(tmp_path)


@pytest.mark.root
def test_shared_folder_of_another_user_is_refused(tmp_path):
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(LocalError, match="belongs to user 65534"):
        private_folders.check_shared(tmp_path)

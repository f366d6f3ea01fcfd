from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2pcast.files import disk
from p2pcast.files.atomic_files import atomic_folder, atomic_write, explained, fsync_dir
from p2pcast.ground.errors import LocalError


def test_write_replaces_and_leaves_no_part(tmp_path: Path) -> None:
    target = tmp_path / "a"
    atomic_write(target, b"one")
    atomic_write(target, b"two", 0o600)
    assert target.read_bytes() == b"two"
    assert target.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["a"]


def test_write_without_replace_keeps_the_first(tmp_path: Path) -> None:
    target = tmp_path / "a"
    atomic_write(target, b"one", replace=False)
    with pytest.raises(FileExistsError) as caught:
        atomic_write(target, b"two", replace=False)
    assert isinstance(caught.value, LocalError)
    assert str(target) in str(caught.value)
    assert target.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "no space is left"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EPERM, "permission denied"),
        (errno.ENOENT, "no such file"),
    ],
)
def test_os_errors_become_plain_reasons(code: int, words: str) -> None:
    with pytest.raises(LocalError, match=rf"cannot write /x/y: .*{words}"), explained("write", "/x/y"):
        raise OSError(code, os.strerror(code))


def test_full_device_is_named() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with (
            pytest.raises(LocalError, match="cannot write /dev/full: no space is left"),
            explained("write", "/dev/full"),
        ):
            disk.write(fd, Path("/dev/full"), b"x")
    finally:
        os.close(fd)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"none/a: there is no such file or folder"):
        atomic_write(tmp_path / "none" / "a", b"")
    with pytest.raises(LocalError, match="cannot sync"):
        fsync_dir(tmp_path / "none")


def test_folder_appears_whole(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "out"
    with atomic_folder(final) as part:
        (part / "sub").mkdir()
        (part / "sub" / "x").write_bytes(b"1")
        assert not final.exists()
        assert part.name.startswith(".out.part-")
    assert (final / "sub" / "x").read_bytes() == b"1"
    assert os.listdir(final.parent) == ["out"]


def _fail(part: Path) -> None:
    (part / "x").write_bytes(b"1")
    raise ZeroDivisionError


def test_folder_is_removed_on_failure(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "out") as part:
        _fail(part)
    assert os.listdir(tmp_path) == []


def test_folder_failure_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"nowhere/x: there is no such"), atomic_folder(tmp_path / "out") as part:
        (part / "nowhere" / "x").write_bytes(b"1")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["full", "file", "link"])
def test_folder_does_not_overwrite(tmp_path: Path, kind: str) -> None:
    final = tmp_path / "out"
    if kind == "full":
        final.mkdir()
        (final / "x").write_bytes(b"mine")
    elif kind == "file":
        final.write_bytes(b"mine")
    else:
        final.symlink_to("nowhere")
    before = os.listdir(tmp_path)
    with pytest.raises(LocalError, match="choose another name"), atomic_folder(final):
        pytest.fail("the block must not run")
    assert os.listdir(tmp_path) == before


def test_folder_replaces_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with atomic_folder(tmp_path / "out") as part:
        (part / "x").write_bytes(b"1")
    assert os.listdir(tmp_path / "out") == ["x"]


def test_killed_writer_leaves_no_final_name(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from p2pcast.files.atomic_files import atomic_folder\n"
        "with atomic_folder(Path(sys.argv[1])) as part:\n"
        "    (part / 'x').write_bytes(b'half'); os._exit(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], check=False, timeout=600)
    assert done.returncode == 9
    assert not (tmp_path / "out").exists()
    assert all(name.startswith(".out.part-") for name in os.listdir(tmp_path))

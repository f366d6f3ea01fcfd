"""Scans of checkpoint folders at once after a change, and by the clock where the file system reports none."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import sys
from pathlib import Path

import asyncinotify
import pytest

from p2pcast.checkpoint.folder_form import STABLE
from tests.trainer_node.publish.test_checkpoint_watcher import write_checkpoint
from trainer_node.publish import checkpoint_watcher, folder_events
from trainer_node.publish.checkpoint_watcher import FoundCheckpoint

NEVER_S = 3600.0


async def until_watched(folder: Path, events: folder_events.FolderEvents) -> None:
    """Return once changes of the folder are reported; the watch begins in a thread."""
    for number in range(10_000):
        (folder / f"probe_{number}").mkdir(exist_ok=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await events.wait(NEVER_S)
            return
    raise AssertionError("no event came")


async def test_a_renamed_folder_and_a_last_file_are_reported_and_other_files_are_not(tmp_path: Path) -> None:
    run, part = tmp_path / "run", tmp_path / "part"
    run.mkdir()
    part.mkdir()
    async with folder_events.folder_events(run, STABLE) as events, asyncio.timeout(600):
        await until_watched(run, events)
        part.rename(run / "step_1")
        await events.wait(NEVER_S)
        (run / "step_1" / STABLE).touch()
        await events.wait(NEVER_S)
        # A file's events come in the order of the changes, so those of the first file would have come by then.
        (run / "step_1" / "model.safetensors").write_bytes(b"weights")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await events.wait(NEVER_S)


async def test_a_version_is_found_at_once_without_a_scan_by_the_clock(tmp_path: Path) -> None:
    watching = checkpoint_watcher.watch(tmp_path, poll_s=NEVER_S)
    async with contextlib.aclosing(watching) as events, asyncio.timeout(600):
        write_checkpoint(tmp_path / "step_1")
        assert isinstance(await anext(events), FoundCheckpoint)
        following = asyncio.ensure_future(anext(events))
        for step in range(2, 10_000):
            # The first folders may come before the watch has begun.
            write_checkpoint(tmp_path / f"step_{step}")
            await asyncio.wait([following], timeout=0.05)
            if following.done():
                break
        assert isinstance(following.result(), FoundCheckpoint)


@pytest.mark.parametrize("missing", ["watches", "inotify"])
async def test_without_events_folders_are_scanned_by_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    caplog.set_level("INFO")

    def refused(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if missing == "watches":
        monkeypatch.setattr(asyncinotify.Inotify, "add_watch", refused)
    else:
        monkeypatch.setitem(sys.modules, "asyncinotify", None)
    monkeypatch.setattr(folder_events, "RETRY_S", 0.001)
    watching = checkpoint_watcher.watch(tmp_path, poll_s=0.01)
    async with contextlib.aclosing(watching) as events, asyncio.timeout(600):
        for step in (1, 2):
            write_checkpoint(tmp_path / f"step_{step}")
            assert isinstance(await anext(events), FoundCheckpoint)
    assert sum("by the clock" in record.message for record in caplog.records) == 1


async def test_a_vanished_folder_does_not_end_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_watch = asyncinotify.Inotify.add_watch

    def late(inotify: asyncinotify.Inotify, path: Path, mask: asyncinotify.Mask) -> asyncinotify.Watch:
        if path.name == "gone":
            path.rmdir()
        return add_watch(inotify, path, mask)

    monkeypatch.setattr(asyncinotify.Inotify, "add_watch", late)
    async with folder_events.folder_events(tmp_path, STABLE) as events, asyncio.timeout(600):
        await until_watched(tmp_path, events)
        (tmp_path / "gone").mkdir()
        await events.wait(NEVER_S)
        await until_watched(tmp_path, events)


async def test_a_folder_that_is_made_later_or_anew_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_events, "RETRY_S", 0.01)
    run = tmp_path / "run"
    async with folder_events.folder_events(run, STABLE) as events, asyncio.timeout(600):
        await events.wait(0.05)
        for _ in range(2):
            run.mkdir()
            await until_watched(run, events)
            shutil.rmtree(run)

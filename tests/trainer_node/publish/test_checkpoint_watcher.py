"""The watcher: its decisions with a given clock, then real folders on a real disk."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from p2pcast.checkpoint import Checkpoint
from p2pcast.checkpoint.folder_form import MARKERS, FolderForm, StepNames
from p2pcast.ground.errors import IntegrityError, LocalError
from tests.support.until import until
from trainer_node.publish import checkpoint_watcher
from trainer_node.publish.checkpoint_watcher import (
    SETTLE_S,
    Damaged,
    Folder,
    FolderWatch,
    FoundCheckpoint,
    fingerprint_of,
    scan,
)

ROOT = Path("/checkpoints")


def folder(step: int, content: str = "a", *, stable: bool = True, last: bool | None = None) -> Folder:
    return Folder(step, ROOT / f"step_{step}", content, stable, stable if last is None else last)


class Disk:
    """Which folders are sound, and how often each was checked."""

    def __init__(self) -> None:
        self.broken: dict[int, Exception] = {}
        self.checks: list[int] = []

    def __call__(self, path: Path) -> Path:
        step = int(path.name.removeprefix("step_"))
        self.checks.append(step)
        if step in self.broken:
            raise self.broken[step]
        return path


def found(step: int, content: str) -> FoundCheckpoint[Path]:
    return FoundCheckpoint(step, ROOT / f"step_{step}", content, ROOT / f"step_{step}")


def observed(watch: FolderWatch[Any], now: float, listing: list[Folder]) -> list[FoundCheckpoint[Any] | Damaged]:
    return list(watch.observe(now, listing))


def steps(events: list[FoundCheckpoint[Any] | Damaged]) -> list[int]:
    return [event.step for event in events]


# -- decisions


def test_existing_folders_are_reported_once_in_step_order() -> None:
    watch = FolderWatch(Disk())
    listing = [folder(10), folder(9), folder(2)]
    assert steps(observed(watch, 0.0, listing)) == [2, 9, 10]
    assert observed(watch, 0.2, listing) == []
    assert observed(watch, 0.4, [*listing, folder(11)]) == [found(11, "a")]


def test_without_stable_a_folder_must_settle() -> None:
    disk = Disk()
    watch = FolderWatch(disk)
    assert observed(watch, 0.0, [folder(1, "a", stable=False)]) == []
    assert observed(watch, 0.5, [folder(1, "b", stable=False)]) == []
    assert observed(watch, SETTLE_S + 0.25, [folder(1, "b", stable=False)]) == []
    assert disk.checks == []
    assert steps(observed(watch, SETTLE_S + 0.5, [folder(1, "b", stable=False)])) == [1]
    assert observed(watch, 9.0, [folder(1, "b", stable=True)]) == [], "a late STABLE is no new content"


def test_half_written_waits_in_silence_and_is_checked_once_per_content() -> None:
    disk = Disk()
    disk.broken[1] = IntegrityError("shard 2 of 3 is missing")
    watch = FolderWatch(disk)
    for tick in range(20):
        assert observed(watch, tick * 0.5, [folder(1, "a", stable=False)]) == []
    assert disk.checks == [1]
    disk.broken.clear()
    assert observed(watch, 10.0, [folder(1, "b", stable=True)]) == [found(1, "b")]


def test_damaged_is_reported_once_skipped_and_taken_when_mended() -> None:
    disk = Disk()
    disk.broken[1] = IntegrityError("model.safetensors: 8 bytes short")
    watch = FolderWatch(disk)
    events = [observed(watch, t * 0.2, [folder(1), folder(2)]) for t in range(20)]
    assert [event for batch in events for event in batch] == [
        found(2, "a"),
        Damaged(1, ROOT / "step_1", "model.safetensors: 8 bytes short"),
    ]
    assert disk.checks == [1, 2]
    assert observed(watch, 5.0, [folder(1, "still bad"), folder(2)]) == []
    assert steps(observed(watch, 5.2, [folder(1, "still bad"), folder(2)])) == [1]
    disk.broken.clear()
    assert observed(watch, 6.0, [folder(1, "good"), folder(2)]) == [found(1, "good")]


def test_deleted_while_read_is_forgotten_and_the_next_taken() -> None:
    disk = Disk()
    disk.broken[1] = LocalError("step_1/model.safetensors: gone")
    watch = FolderWatch(disk)
    assert steps(observed(watch, 0.0, [folder(1), folder(2)])) == [2]
    assert observed(watch, 0.2, [folder(2)]) == []
    disk.broken.clear()
    assert steps(observed(watch, 0.4, [folder(1), folder(2)])) == [1]


def test_local_trouble_is_reported_once_and_tried_again() -> None:
    disk = Disk()
    disk.broken[1] = PermissionError(13, "Permission denied")
    watch = FolderWatch(disk)
    observed(watch, 0.0, [folder(1)])
    told = observed(watch, 0.2, [folder(1)])
    assert len(told) == 1
    assert isinstance(told[0], Damaged)
    assert observed(watch, checkpoint_watcher.RETRY_S + 0.1, [folder(1)]) == []
    assert disk.checks == [1, 1]
    disk.broken.clear()
    assert observed(watch, 2 * checkpoint_watcher.RETRY_S + 0.2, [folder(1)]) == [found(1, "a")]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_a_shortage_of_this_machine_is_no_fault_of_a_folder(number: int) -> None:
    disk = Disk()
    disk.broken[1] = OSError(number, os.strerror(number))
    watch = FolderWatch(disk)
    with pytest.raises(OSError, match=os.strerror(number)):
        observed(watch, 0.0, [folder(1)])


def test_a_scan_without_descriptors_names_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step_1").mkdir()
    listed = os.scandir

    def scandir(path: Path) -> Any:
        if path.name == "step_1":
            raise OSError(errno.EMFILE, "Too many open files")
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(LocalError, match="can't list it: Too many open files"):
        scan(tmp_path)


def test_rewritten_and_lower_steps_are_reported_again() -> None:
    watch = FolderWatch(Disk())
    observed(watch, 0.0, [folder(5), folder(6)])
    assert observed(watch, 1.0, [folder(5), folder(6, "other")]) == [found(6, "other")]
    assert observed(watch, 2.0, [folder(4), folder(5)]) == [found(4, "a")]
    assert observed(watch, 3.0, [folder(6, "other")]) == [], "it only vanished for a moment"
    assert observed(watch, 4.0, [folder(6, "a")]) == [found(6, "a")]


def test_an_old_stable_over_new_files_must_settle() -> None:
    watch = FolderWatch(Disk())
    observed(watch, 0.0, [folder(1, "a")])
    assert observed(watch, 1.0, [folder(1, "b", last=False)]) == []
    assert observed(watch, 1.5, [folder(1, "c", last=False)]) == []
    assert observed(watch, 1.5 + SETTLE_S, [folder(1, "c", last=False)]) == [found(1, "c")]


def test_a_ready_step_waits_briefly_for_a_settling_lower_step() -> None:
    watch = FolderWatch(Disk())
    assert observed(watch, 0.0, [folder(1, stable=False), folder(2)]) == []
    assert steps(observed(watch, SETTLE_S, [folder(1, stable=False), folder(2)])) == [1, 2]
    watch = FolderWatch(Disk())
    for tick in range(4):
        assert observed(watch, tick * 0.3, [folder(1, str(tick), stable=False), folder(2)]) == []
    assert steps(observed(watch, 1.1, [folder(1, "later", stable=False), folder(2)])) == [2]


def test_memory_of_deleted_folders_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_watcher, "KEPT_GONE", 3)
    watch = FolderWatch(Disk())
    for step in range(10):
        assert steps(observed(watch, float(step), [folder(step)])) == [step]
    assert observed(watch, 20.0, [folder(7)]) == []
    assert steps(observed(watch, 21.0, [folder(1)])) == [1]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.integers(0, 5), st.tuples(st.sampled_from("abc"), st.booleans()), max_size=5),
        min_size=1,
        max_size=12,
    ),
    st.sets(st.sampled_from("abc")),
)
def test_any_folder_history_yields_sound_steps_in_order(
    history: list[dict[int, tuple[str, bool]]], sound: set[str]
) -> None:
    """Any history of folders: only sound content is found, in order, never twice in a row; content that stays sound is
    found in the end.
    """
    current: dict[str, str] = {}

    def check(path: Path) -> Path:
        if current[path.name] not in sound:
            raise IntegrityError("damaged")
        return path

    watch = FolderWatch(check)
    reported: dict[int, str] = {}
    damaged: list[tuple[int, str]] = []
    ticks = [*history, history[-1], history[-1], history[-1]]
    for number, state in enumerate(ticks):
        listing = [folder(step, content, stable=stable) for step, (content, stable) in state.items()]
        current = {f.path.name: f.fingerprint for f in listing}
        events = observed(watch, number * 0.6, listing)
        assert steps(events) == sorted(steps(events))
        for event in events:
            if isinstance(event, FoundCheckpoint):
                assert event.fingerprint in sound
                assert reported.get(event.step) != event.fingerprint
                reported[event.step] = event.fingerprint
            else:
                assert state[event.step][1]
                damaged.append((event.step, state[event.step][0]))
    for step, (content, stable) in history[-1].items():
        if content in sound:
            assert reported[step] == content
        elif stable:
            assert (step, content) in damaged


def test_a_folder_is_opened_when_its_event_is_asked_for() -> None:
    disk = Disk()
    events = FolderWatch(disk).observe(0.0, [folder(1), folder(2), folder(3)])
    assert next(events).step == 1
    assert disk.checks == [1]
    assert next(events).step == 2
    assert disk.checks == [1, 2]


def test_known_content_is_neither_opened_nor_reported() -> None:
    disk = Disk()
    known = {(1, "a")}
    watch = FolderWatch(disk, lambda step, fingerprint: (step, fingerprint) in known)
    assert steps(observed(watch, 0.0, [folder(1), folder(2)])) == [2]
    assert disk.checks == [2]
    assert steps(observed(watch, 1.0, [folder(1, "b"), folder(2)])) == [1]
    known.clear()
    assert observed(watch, 2.0, [folder(1, "b"), folder(2)]) == []


def test_the_opened_content_of_a_waiting_folder_is_reported() -> None:
    opened: list[object] = []

    def open_(path: Path) -> object:
        opened.append(object())
        return opened[-1]

    watch = FolderWatch(open_)
    assert observed(watch, 0.0, [folder(1, stable=False), folder(2)]) == []
    first, second = observed(watch, SETTLE_S, [folder(1, stable=False), folder(2)])
    assert (second.checkpoint, first.checkpoint) == tuple(opened)


# -- real folders


def write_checkpoint(path: Path, value: int = 0, *, stable: bool = True) -> Path:
    draft = path.with_name(f"{path.name}.tmp")
    draft.mkdir(parents=True)
    (draft / "config.json").write_text("{}")
    save_file({"w": np.full((8, 8), value, np.float32)}, draft / "model.safetensors")
    if stable:
        (draft / "STABLE").touch()
    draft.rename(path)
    return path


def test_scan_takes_step_folders_alone(tmp_path: Path) -> None:
    elsewhere = write_checkpoint(tmp_path / "elsewhere" / "step_1")
    run = tmp_path / "run"
    for name in (
        "step_12",
        "step_3",
        "step_5.tmp",
        ".step_6",
        "step_",
        "step_x",
        "step_-1",
        "base",
        "step_٣",
        "step_" + "9" * 19,
    ):
        (run / name).mkdir(parents=True)
    (run / "step_4").write_text("a file")
    (run / "step_7").symlink_to(elsewhere, target_is_directory=True)
    (run / "step_8").symlink_to(run / "nowhere")
    assert [f.step for f in scan(run)] == [3, 7, 12]
    assert scan(tmp_path / "not made yet") == []
    with pytest.raises(LocalError, match="step_4"):
        scan(run / "step_4")


def test_fingerprint_follows_content_and_not_stable(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "step_1", stable=False)
    seen = [scan(tmp_path)[0]]

    def changed(act: Callable[[], object]) -> bool:
        act()
        seen.append(scan(tmp_path)[0])
        return seen[-1].fingerprint != seen[-2].fingerprint

    weights = path / "model.safetensors"
    assert not changed(lambda: None)
    assert not changed((path / "STABLE").touch)
    assert seen[-1].marked
    assert seen[-1].marked_last
    assert changed(lambda: os.utime(weights, ns=(0, seen[0].step + (1 << 62))))
    assert seen[-1].marked
    assert not seen[-1].marked_last
    assert changed(lambda: weights.write_bytes(weights.read_bytes() + b"x"))
    assert changed(lambda: (path / "sub").mkdir() or (path / "sub" / "vocab.txt").touch())
    assert changed(lambda: (path / "dangling").symlink_to("nothing"))
    assert changed(lambda: weights.rename(path / "other.safetensors"))


def test_a_rewrite_in_place_with_the_old_time_is_seen(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "step_1")
    before, weights = scan(tmp_path)[0], path / "model.safetensors"
    info, contents = weights.stat(), weights.read_bytes()
    while weights.stat().st_ctime_ns == info.st_ctime_ns:  # the kernel's clock ticks every few milliseconds
        with weights.open("r+b") as file:
            file.write(contents[:-1] + bytes([contents[-1] ^ 1]))
        os.utime(weights, ns=(info.st_atime_ns, info.st_mtime_ns))
    after = weights.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (info.st_size, info.st_mtime_ns, info.st_ino)
    found = scan(tmp_path)[0]
    assert found.fingerprint != before.fingerprint
    assert not found.marked_last


def test_a_marker_that_a_slow_copy_brings_first_is_not_the_last(tmp_path: Path) -> None:
    """``cp -a`` and ``rsync -a`` copy STABLE before config.json, with the times of the source."""
    path = write_checkpoint(tmp_path / "step_1", stable=False)
    marker = path / "STABLE"
    marker.touch()
    os.utime(marker, ns=(0, marker.stat().st_mtime_ns - 10**9))
    late = path / "tokenizer.json"
    while not late.exists() or late.stat().st_ctime_ns <= marker.stat().st_ctime_ns:
        late.write_bytes(b"{}")
    os.utime(late, ns=(0, marker.stat().st_mtime_ns - 10**9))
    found = scan(tmp_path)[0]
    assert found.marked
    assert not found.marked_last


def test_where_folders_have_a_marker_a_folder_without_waits_for_its_own() -> None:
    disk = Disk()
    watch = FolderWatch(disk, marker_learned="STABLE")
    assert observed(watch, 0.0, [folder(1)]) == [found(1, "a")]
    later = [folder(1), folder(2, stable=False)]
    assert observed(watch, 1.0, later) == []
    assert observed(watch, 1.0 + 2 * SETTLE_S, later) == []
    named = observed(watch, 1.0 + checkpoint_watcher.UNMARKED_S, later)
    assert named == [
        Damaged(2, ROOT / "step_2", "it has no STABLE, unlike step_1: write STABLE last, or start the hub with "
                "--step-marker none")
    ]  # fmt: skip
    assert observed(watch, 9 * checkpoint_watcher.UNMARKED_S, later) == []
    assert disk.checks == [1]
    assert observed(watch, 900.0, [folder(1), folder(2)]) == [found(2, "a")]


def test_a_run_whose_folders_have_no_marker_waits_for_none() -> None:
    watch = FolderWatch(Disk(), lambda step, content: step == 1, marker_learned="STABLE")
    observed(watch, 0.0, [folder(1, stable=False), folder(2, stable=False)])
    listing = [folder(1, stable=False), folder(2, stable=False)]
    assert steps(observed(watch, SETTLE_S, listing)) == [2]
    assert observed(watch, 5.0, [folder(1, stable=False), folder(2), folder(3, stable=False)]) == []
    assert observed(watch, 7.0, [folder(1), folder(2), folder(3, stable=False)]) == [], "a late STABLE teaches it too"


def test_of_two_folders_of_one_step_the_shorter_name_counts() -> None:
    disk = Disk()
    twin = Folder(60, ROOT / "step_060", "b", True, True)
    watch = FolderWatch(disk)
    events = observed(watch, 0.0, [twin, folder(60)])
    assert events == [
        found(60, "a"),
        Damaged(60, ROOT / "step_060", "step_60 is the same step: remove or rename one of the two"),
    ]
    assert observed(watch, 9.0, [twin, folder(60)]) == []
    assert observed(watch, 10.0, [twin]) == [FoundCheckpoint(60, ROOT / "step_060", "b", ROOT / "step_060")]


def test_scan_takes_the_names_of_its_pattern_alone(tmp_path: Path) -> None:
    form = FolderForm(StepNames.parse("weight_v{step:06}"), MARKERS["none"])
    for name in ("weight_v000007", "weight_v1000000", "weight_v7", "weight_v0000007", "step_3", "weight_v000007.tmp"):
        (tmp_path / name).mkdir()
    assert [(one.step, one.path.name) for one in scan(tmp_path, form)] == [
        (7, "weight_v000007"),
        (1_000_000, "weight_v1000000"),
    ]


def test_a_folder_without_its_required_marker_is_never_complete() -> None:
    disk = Disk()
    watch = FolderWatch(disk, marker_required=True)
    for now in (0.0, SETTLE_S, 10 * SETTLE_S):
        assert observed(watch, now, [folder(1, stable=False)]) == []
    assert disk.checks == []
    assert steps(observed(watch, 20.0, [folder(1, stable=True)])) == [1]


def test_a_required_marker_older_than_its_files_waits_for_a_quiet_folder() -> None:
    watch = FolderWatch(Disk(), marker_required=True)
    assert observed(watch, 0.0, [folder(1, last=False)]) == []
    assert steps(observed(watch, SETTLE_S, [folder(1, last=False)])) == [1]


def test_stages_of_a_handshake_are_no_content(tmp_path: Path) -> None:
    """The trainer and the receiver of prime-rl write four markers around the weights."""
    form = FolderForm(marker=MARKERS["prime-rl"])
    path = tmp_path / "step_1"
    path.mkdir()
    (path / ".sender_ready").touch()
    empty = scan(tmp_path, form)[0]
    for name in (".receiver_ready", ".started"):
        (path / name).touch()
    assert scan(tmp_path, form) == [empty]
    save_file({"w": np.zeros(4, np.float32)}, path / "model.safetensors")
    written = scan(tmp_path, form)[0]
    assert written.fingerprint != empty.fingerprint
    assert not written.marked
    (path / ".finished").touch()
    finished = scan(tmp_path, form)[0]
    assert finished.marked_last
    assert finished.fingerprint == written.fingerprint


def test_check_refuses_every_truncation(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "step_1")
    Checkpoint.open(path)
    whole = (path / "model.safetensors").read_bytes()
    for size in (*range(0, len(whole), 7), len(whole) - 1):
        (path / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises((IntegrityError, LocalError)):
            Checkpoint.open(path)
    shutil.rmtree(path)
    with pytest.raises((IntegrityError, LocalError)):
        Checkpoint.open(path)


async def test_watch_follows_a_trainer(tmp_path: Path) -> None:
    run = tmp_path / "run"
    async with contextlib.aclosing(checkpoint_watcher.watch(run, poll_s=0.01)) as events, asyncio.timeout(600):
        write_checkpoint(run / "step_2", 2)
        first = await anext(events)
        assert isinstance(first, FoundCheckpoint)
        assert first.step == 2
        assert first.path == run / "step_2"

        (write_checkpoint(run / "step_3", 3, stable=False) / "STABLE").touch()
        assert (await anext(events)).step == 3

        broken = write_checkpoint(tmp_path / "step_4", 4)
        (broken / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ....")
        broken.rename(run / "step_4")
        damaged = await anext(events)
        assert isinstance(damaged, Damaged)
        assert damaged.step == 4
        assert damaged.reason

        shutil.rmtree(run / "step_2")
        write_checkpoint(run / "step_2", 20)
        again = await anext(events)
        assert isinstance(again, FoundCheckpoint)
        assert again.step == 2
        assert again.fingerprint != first.fingerprint


async def test_watch_stops_when_cancelled_in_mid_check(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "step_1")
    loop = asyncio.get_running_loop()
    entered, release = asyncio.Event(), threading.Event()

    def check(path: Path) -> None:
        loop.call_soon_threadsafe(entered.set)
        assert release.wait(30)

    async def follow() -> None:
        async with contextlib.aclosing(checkpoint_watcher.watch(tmp_path, open_=check)) as events:
            await anext(events)

    task = asyncio.create_task(follow(), name="follow")
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()


async def test_the_watcher_keeps_no_reported_checkpoint_open(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "step_1")
    async with contextlib.aclosing(checkpoint_watcher.watch(tmp_path, poll_s=0.01)) as events, asyncio.timeout(600):
        found = await anext(events)
        reference = weakref.ref(found.checkpoint)
        del found
        waiting = asyncio.ensure_future(anext(events))
        await until(lambda: reference() is None)
        waiting.cancel()
        await asyncio.wait([waiting])


def test_a_fingerprint_changes_with_the_folder(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "step_1")
    before = fingerprint_of(1, path, MARKERS["STABLE"])
    assert [f.fingerprint for f in scan(tmp_path)] == [before]
    (path / "config.json").write_text("{}")
    assert fingerprint_of(1, path, MARKERS["STABLE"]) not in (before, None)
    shutil.rmtree(path)
    assert fingerprint_of(1, path, MARKERS["STABLE"]) is None

"""The watcher: its decisions with a given clock, then real folders on a real disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from p2pcast.errors import IntegrityError, LocalError
from trainer_node import watcher
from trainer_node.watcher import SETTLE_S, Damaged, Folder, Found, Watch, check_checkpoint, scan

ROOT = Path("/checkpoints")


def folder(step: int, content: str = "a", *, stable: bool = True, last: bool | None = None) -> Folder:
    return Folder(step, ROOT / f"step_{step}", content, stable, stable if last is None else last)


class Disk:
    """Which folders are sound, and how often each was checked."""

    def __init__(self) -> None:
        self.broken: dict[int, Exception] = {}
        self.checks: list[int] = []

    def __call__(self, path: Path) -> None:
        step = int(path.name.removeprefix("step_"))
        self.checks.append(step)
        if step in self.broken:
            raise self.broken[step]


def steps(events: list[watcher.Event]) -> list[int]:
    return [event.step for event in events]


# -- decisions


def test_existing_folders_are_told_in_step_order_and_once() -> None:
    watch = Watch(Disk())
    listing = [folder(10), folder(9), folder(2)]
    assert steps(watch.observe(0.0, listing)) == [2, 9, 10]
    assert watch.observe(0.2, listing) == []
    assert watch.observe(0.4, [*listing, folder(11)]) == [Found(11, ROOT / "step_11", "a")]


def test_without_stable_a_folder_must_settle() -> None:
    disk = Disk()
    watch = Watch(disk)
    assert watch.observe(0.0, [folder(1, "a", stable=False)]) == []
    assert watch.observe(0.5, [folder(1, "b", stable=False)]) == []
    assert watch.observe(SETTLE_S + 0.25, [folder(1, "b", stable=False)]) == []
    assert disk.checks == []
    assert steps(watch.observe(SETTLE_S + 0.5, [folder(1, "b", stable=False)])) == [1]
    assert watch.observe(9.0, [folder(1, "b", stable=True)]) == [], "a late STABLE is no new content"


def test_half_written_waits_in_silence_and_is_checked_once_per_content() -> None:
    disk = Disk()
    disk.broken[1] = IntegrityError("shard 2 of 3 is missing")
    watch = Watch(disk)
    for tick in range(20):
        assert watch.observe(tick * 0.5, [folder(1, "a", stable=False)]) == []
    assert disk.checks == [1]
    disk.broken.clear()
    assert watch.observe(10.0, [folder(1, "b", stable=True)]) == [Found(1, ROOT / "step_1", "b")]


def test_damaged_is_reported_once_skipped_and_taken_when_mended() -> None:
    disk = Disk()
    disk.broken[1] = IntegrityError("model.safetensors: 8 bytes short")
    watch = Watch(disk)
    events = [watch.observe(t * 0.2, [folder(1), folder(2)]) for t in range(20)]
    assert [event for batch in events for event in batch] == [
        Found(2, ROOT / "step_2", "a"),
        Damaged(1, ROOT / "step_1", "model.safetensors: 8 bytes short"),
    ]
    assert disk.checks == [1, 2]
    assert watch.observe(5.0, [folder(1, "still bad"), folder(2)]) == []
    assert steps(watch.observe(5.2, [folder(1, "still bad"), folder(2)])) == [1]
    disk.broken.clear()
    assert watch.observe(6.0, [folder(1, "good"), folder(2)]) == [Found(1, ROOT / "step_1", "good")]


def test_deleted_while_read_is_forgotten_and_the_next_taken() -> None:
    disk = Disk()
    disk.broken[1] = LocalError("step_1/model.safetensors: gone")
    watch = Watch(disk)
    assert steps(watch.observe(0.0, [folder(1), folder(2)])) == [2]
    assert watch.observe(0.2, [folder(2)]) == []
    disk.broken.clear()
    assert steps(watch.observe(0.4, [folder(1), folder(2)])) == [1]


def test_local_trouble_is_reported_once_and_tried_again() -> None:
    disk = Disk()
    disk.broken[1] = OSError(24, "Too many open files")
    watch = Watch(disk)
    watch.observe(0.0, [folder(1)])
    told = watch.observe(0.2, [folder(1)])
    assert len(told) == 1
    assert isinstance(told[0], Damaged)
    assert watch.observe(watcher.RETRY_S + 0.1, [folder(1)]) == []
    assert disk.checks == [1, 1]
    disk.broken.clear()
    assert watch.observe(2 * watcher.RETRY_S + 0.2, [folder(1)]) == [Found(1, ROOT / "step_1", "a")]


def test_rewritten_and_lower_steps_are_told_again() -> None:
    watch = Watch(Disk())
    watch.observe(0.0, [folder(5), folder(6)])
    assert watch.observe(1.0, [folder(5), folder(6, "other")]) == [Found(6, ROOT / "step_6", "other")]
    assert watch.observe(2.0, [folder(4), folder(5)]) == [Found(4, ROOT / "step_4", "a")]
    assert watch.observe(3.0, [folder(6, "other")]) == [], "it only vanished for a moment"
    assert watch.observe(4.0, [folder(6, "a")]) == [Found(6, ROOT / "step_6", "a")]


def test_an_old_stable_over_new_files_must_settle() -> None:
    watch = Watch(Disk())
    watch.observe(0.0, [folder(1, "a")])
    assert watch.observe(1.0, [folder(1, "b", last=False)]) == []
    assert watch.observe(1.5, [folder(1, "c", last=False)]) == []
    assert watch.observe(1.5 + SETTLE_S, [folder(1, "c", last=False)]) == [Found(1, ROOT / "step_1", "c")]


def test_a_ready_step_waits_for_a_lower_one_that_settles_but_not_for_ever() -> None:
    watch = Watch(Disk())
    assert watch.observe(0.0, [folder(1, stable=False), folder(2)]) == []
    assert steps(watch.observe(SETTLE_S, [folder(1, stable=False), folder(2)])) == [1, 2]
    watch = Watch(Disk())
    for tick in range(4):
        assert watch.observe(tick * 0.3, [folder(1, str(tick), stable=False), folder(2)]) == []
    assert steps(watch.observe(1.1, [folder(1, "later", stable=False), folder(2)])) == [2]


def test_memory_of_deleted_folders_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "KEPT_GONE", 3)
    watch = Watch(Disk())
    for step in range(10):
        assert steps(watch.observe(float(step), [folder(step)])) == [step]
    assert watch.observe(20.0, [folder(7)]) == []
    assert steps(watch.observe(21.0, [folder(1)])) == [1]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.integers(0, 5), st.tuples(st.sampled_from("abc"), st.booleans()), max_size=5),
        min_size=1,
        max_size=12,
    ),
    st.sets(st.sampled_from("abc")),
)
def test_whatever_happens(history: list[dict[int, tuple[str, bool]]], sound: set[str]) -> None:
    """Any history of folders: only sound content is found, in order, never twice in a row; what stays sound is found in the end."""
    current: dict[str, str] = {}

    def check(path: Path) -> None:
        if current[path.name] not in sound:
            raise IntegrityError("damaged")

    watch = Watch(check)
    found: dict[int, str] = {}
    damaged: list[tuple[int, str]] = []
    ticks = [*history, history[-1], history[-1], history[-1]]
    for number, state in enumerate(ticks):
        listing = [folder(step, content, stable=stable) for step, (content, stable) in state.items()]
        current = {f.path.name: f.fingerprint for f in listing}
        events = watch.observe(number * 0.6, listing)
        assert steps(events) == sorted(steps(events))
        for event in events:
            if isinstance(event, Found):
                assert event.fingerprint in sound
                assert found.get(event.step) != event.fingerprint
                found[event.step] = event.fingerprint
            else:
                assert state[event.step][1]
                damaged.append((event.step, state[event.step][0]))
    for step, (content, stable) in history[-1].items():
        if content in sound:
            assert found[step] == content
        elif stable:
            assert (step, content) in damaged


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
    assert seen[-1].stable
    assert seen[-1].stable_last
    assert changed(lambda: os.utime(weights, ns=(0, seen[0].step + (1 << 62))))
    assert seen[-1].stable
    assert not seen[-1].stable_last
    assert changed(lambda: weights.write_bytes(weights.read_bytes() + b"x"))
    assert changed(lambda: (path / "sub").mkdir() or (path / "sub" / "vocab.txt").touch())
    assert changed(lambda: (path / "dangling").symlink_to("nothing"))
    assert changed(lambda: weights.rename(path / "other.safetensors"))


def test_check_refuses_every_truncation(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "step_1")
    check_checkpoint(path)
    whole = (path / "model.safetensors").read_bytes()
    for size in (*range(0, len(whole), 7), len(whole) - 1):
        (path / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises((IntegrityError, LocalError)):
            check_checkpoint(path)
    shutil.rmtree(path)
    with pytest.raises((IntegrityError, LocalError)):
        check_checkpoint(path)


async def test_watch_follows_a_trainer(tmp_path: Path) -> None:
    run = tmp_path / "run"
    async with contextlib.aclosing(watcher.watch(run, poll_s=0.01)) as events, asyncio.timeout(30):
        write_checkpoint(run / "step_2", 2)
        first = await anext(events)
        assert isinstance(first, Found)
        assert first.step == 2
        assert first.path == run / "step_2"

        write_checkpoint(run / "step_3", 3, stable=False)
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
        assert isinstance(again, Found)
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
        async with contextlib.aclosing(watcher.watch(tmp_path, check=check)) as events:
            await anext(events)

    task = asyncio.create_task(follow(), name="follow")
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()

"""From complete folders to versions, with real folders and a recorded pipeline."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from parts import write_checkpoint

from p2pcast.checkpoint import Checkpoint, folder
from p2pcast.checkpoint.folder_form import DEFAULT
from p2pcast.checkpoint.safetensors_file import SafetensorsFile
from p2pcast.ground.errors import IntegrityError, LocalError
from p2pcast.ground.version import Version
from p2pcast.state.staging import Staging
from trainer_node.publish.checkpoint_source import CheckpointSource
from trainer_node.publish.checkpoint_watcher import FoundCheckpoint, scan
from trainer_node.publish.publish_history import PublishHistory
from trainer_node.publish.published import Published

V = Version


class Versions:
    """The lifecycle, recorded."""

    def __init__(self) -> None:
        self.begun: list[Version] = []
        self.finished: list[Version] = []
        self.skipped: dict[str, str] = {}
        self.failed = False
        self.may_begin = asyncio.Event()
        self.may_begin.set()
        self.news = asyncio.Event()

    async def until_may_begin(self) -> None:
        await self.may_begin.wait()

    def begin(self, version: Version) -> None:
        self.begun.append(version)

    async def finish(self, done: Published) -> None:
        self.finished.append(done.version)
        self.news.set()

    def skip(self, name: str, why: str) -> None:
        self.skipped[name] = why
        self.news.set()

    def unskip(self, name: str) -> None:
        self.skipped.pop(name, None)


class Publishing:
    """The pipeline, recorded; ``errors`` are raised one after the other."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.sources: list[Any] = []
        self.errors: list[Exception] = []
        self.same: Version | None = None
        self.head = V(0, 1)
        self.repairs = False
        self._branch = 0

    def version_for(self, step: int) -> Version:
        return V(self._branch, step)

    def mark_of(self, version: Version) -> str:
        return f"mark {version}"

    async def unchanged(self, step: int, checkpoint: Checkpoint, remembered: str | None) -> Version | None:
        return self.same

    def other_files(self, version: Version, files: dict[str, bytes]) -> list[str]:
        return sorted(files)

    async def publish(self, version: Version, layout: Any, source: Any) -> Published:
        self.sources.append(source)
        if self.errors:
            self._branch += 1
            raise self.errors.pop(0)
        return Published(version, "delta", 1, 1, 1, 1, 0.0)

    async def repair(self) -> bool:
        return self.repairs


class Parts:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.versions, self.publishing = Versions(), Publishing()
        self.history = PublishHistory(root / "published.log", set)
        self.staging = Staging(1)
        self.source = CheckpointSource(self.versions, self.publishing, self.history, self.staging, DEFAULT)

    def found(self, step: int, **options: Any) -> FoundCheckpoint[Checkpoint]:
        path = write_checkpoint(self.root / "run" / f"step_{step}", step, **options)
        return FoundCheckpoint(step, path, scan(path.parent)[-1].fingerprint, Checkpoint.open(path))

    async def take(self, found: FoundCheckpoint[Checkpoint]) -> None:
        await self.source.take(found)


@pytest.fixture
async def parts(tmp_path: Path):
    made = Parts(tmp_path)
    (tmp_path / "run").mkdir()
    yield made
    made.history.close()
    made.staging.close()


async def test_a_folder_is_opened_once_from_the_watcher_to_the_encoder(parts: Parts, monkeypatch) -> None:
    opened: list[Path] = []
    made = SafetensorsFile.__init__

    def counted(self: SafetensorsFile, path: Path) -> None:
        opened.append(path)
        made(self, path)

    monkeypatch.setattr(folder.SafetensorsFile, "__init__", counted)
    write_checkpoint(parts.root / "run" / "step_1")
    running = asyncio.ensure_future(parts.source.run(parts.root / "run"))
    async with asyncio.timeout(600):
        await parts.versions.news.wait()
    assert parts.versions.finished == [V(0, 1)]
    assert opened == [parts.root / "run" / "step_1" / "model.safetensors"]
    running.cancel()
    await asyncio.wait([running])


async def test_a_published_folder_is_not_opened_again(parts: Parts, monkeypatch) -> None:
    found = parts.found(1)
    parts.history.note(1, folder=found.fingerprint)
    monkeypatch.setattr(Checkpoint, "open", classmethod(lambda cls, path: pytest.fail("opened")))
    assert parts.source._is_published(1, found.fingerprint)
    assert not parts.source._is_published(1, "other")
    assert not parts.source._is_published(2, found.fingerprint)


async def test_a_published_folder_is_remembered_with_its_weights(parts: Parts) -> None:
    found = parts.found(1)
    parts.versions.skipped["step_1"] = "it was bad before"
    await parts.take(found)
    assert parts.versions.begun == parts.versions.finished == [V(0, 1)]
    assert (parts.history[1].folder, parts.history[1].mark) == (found.fingerprint, "mark 0.1")
    assert parts.versions.skipped == {}
    assert parts.publishing.sources[0]._checkpoint is found.checkpoint


async def test_the_same_weights_are_not_published_again(parts: Parts) -> None:
    parts.publishing.same = V(0, 1)
    found = parts.found(1)
    await parts.take(found)
    assert parts.versions.begun == []
    assert parts.history[1].folder == found.fingerprint


@pytest.mark.parametrize("brought", ["", None])
async def test_a_folder_with_other_files_than_its_ranks_opens_no_branch(parts: Parts, caplog, brought) -> None:
    """The same holds for ``--base``, and for a record of the release before, which has no digest of the files."""
    parts.history.note(1, mark="m", files=brought)
    parts.publishing.same = V(0, 1)
    await parts.take(parts.found(1))
    assert parts.versions.begun == []
    assert "step_1 has other small files than version 0.1, which keeps its own: config.json" in caplog.text


async def test_records_of_a_trainer_that_come_late_are_no_reason_for_a_version(parts: Parts) -> None:
    found = parts.found(1)
    await parts.take(found)
    (found.path / "trainer_state.json").write_text("{}")
    parts.publishing.same = V(0, 1)
    await parts.take(
        FoundCheckpoint(1, found.path, scan(found.path.parent)[-1].fingerprint, Checkpoint.open(found.path))
    )
    assert parts.versions.begun == [V(0, 1)]
    (found.path / "tokenizer.json").write_text("{}")
    await parts.take(
        FoundCheckpoint(1, found.path, scan(found.path.parent)[-1].fingerprint, Checkpoint.open(found.path))
    )
    assert len(parts.versions.begun) == 2


async def test_small_files_of_an_older_version_are_named_and_no_engine_goes_back(parts: Parts) -> None:
    parts.history.note(1, folder="before", files="others")
    parts.publishing.same, parts.publishing.head = V(0, 1), V(0, 2)
    await parts.take(parts.found(1))
    assert parts.versions.begun == []
    assert "since version 0.1 (config.json)" in parts.versions.skipped["step_1"]
    assert parts.history[1].folder == "before"


async def test_a_record_of_the_release_before_counts_and_is_completed(parts: Parts) -> None:
    """Such a record has no times at which inodes changed."""
    found = parts.found(1)
    parts.history.note(1, folder=found.fingerprint.split("-")[0])
    assert parts.source._is_published(1, found.fingerprint)
    assert parts.history[1].folder == found.fingerprint
    assert not parts.source._is_published(1, found.fingerprint.split("-")[0] + "-00")


@pytest.mark.parametrize("when", ["weights", "small file"])
async def test_a_waiting_folder_that_changes_is_left_to_the_watcher(parts: Parts, when: str) -> None:
    found = parts.found(1)
    parts.versions.may_begin.clear()
    taking = asyncio.ensure_future(parts.take(found))
    await asyncio.sleep(0)
    if when == "weights":
        shutil.rmtree(found.path)
        write_checkpoint(found.path, 9)
    else:
        (found.path / "config.json").write_text("other")
    parts.versions.may_begin.set()
    await taking
    assert parts.publishing.sources == []
    assert parts.versions.skipped == {}
    assert parts.history[1].folder is None


async def test_a_waiting_folder_that_is_deleted_is_skipped(parts: Parts) -> None:
    found = parts.found(1)
    shutil.rmtree(found.path)
    await parts.take(found)
    assert parts.versions.skipped == {"step_1": "it was deleted while it was read"}


async def test_an_error_costs_one_version_and_is_named(parts: Parts) -> None:
    parts.publishing.errors = [LocalError("cut short")]
    await parts.take(parts.found(1))
    assert parts.versions.skipped == {"step_1": "cut short"}
    await parts.take(parts.found(2))
    assert parts.versions.finished == [V(1, 2)]


async def test_the_reason_is_the_folders_present_fault(parts: Parts) -> None:
    found = parts.found(1)
    parts.publishing.errors = [LocalError("a byte is gone")]
    original = parts.publishing.publish

    async def cut(version: Version, layout: Any, source: Any) -> Published:
        (found.path / "model.safetensors").write_bytes(b"short")
        return await original(version, layout, source)

    parts.publishing.publish = cut  # type: ignore[method-assign]
    await parts.take(found)
    assert "too few for a safetensors file" in parts.versions.skipped["step_1"]


async def test_a_failing_hub_disk_ends_the_source(parts: Parts) -> None:
    parts.versions.failed = True
    parts.publishing.errors = [LocalError("no space is left")]
    with pytest.raises(LocalError, match="no space"):
        await parts.take(parts.found(1))


@pytest.mark.parametrize(("repairs", "finished"), [(True, [V(1, 1)]), (False, [])])
async def test_a_repaired_shadow_is_worth_one_more_try(parts: Parts, repairs, finished) -> None:
    parts.publishing.errors, parts.publishing.repairs = [IntegrityError("rot")], repairs
    await parts.take(parts.found(1))
    assert parts.versions.finished == finished
    assert parts.versions.skipped == ({} if repairs else {"step_1": "rot"})


async def test_a_second_failure_is_not_tried_again(parts: Parts) -> None:
    parts.publishing.errors, parts.publishing.repairs = [IntegrityError("rot"), IntegrityError("more rot")], True
    await parts.take(parts.found(1))
    assert parts.versions.skipped == {"step_1": "more rot"}
    assert parts.versions.begun == [V(0, 1), V(1, 1)]


async def test_a_damaged_folder_is_skipped(parts: Parts) -> None:
    path = write_checkpoint(parts.root / "run" / "step_1")
    (path / "model.safetensors").write_bytes(b"short")
    (path / "STABLE").touch()
    running = asyncio.ensure_future(parts.source.run(parts.root / "run"))
    async with asyncio.timeout(600):
        await parts.versions.news.wait()
    assert "step_1" in parts.versions.skipped
    running.cancel()
    await asyncio.wait([running])

from __future__ import annotations

import json

import pytest
from recorder import Background, blocking

from p2pcast.artifact.signed_records import KEY_BYTES, run_id
from p2pcast.ground.errors import LocalError
from p2pcast.ground.version import Version
from p2pcast.process.daemon_process import StateFile
from rollout_node.control import saved_hub_state
from rollout_node.control.saved_hub_state import FACTS, SavedHubState

KEY = bytes(range(KEY_BYTES))
HUB, A, B = bytes(16), (b"a" * 16, "host", 1), (b"b" * 16, "::1", 2)


class Disk:
    def __init__(self, tmp_path) -> None:
        self.path = tmp_path / "peer.json"
        self.background = Background()

    def open(self) -> SavedHubState:
        self.file = StateFile(self.path, {"members": None, **FACTS})
        return SavedHubState(self.file, run_id(KEY), self.background, blocking)

    @property
    def facts(self):
        return json.loads(self.path.read_text())


@pytest.fixture
def disk(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_hub_state, "SETTLE_S", 0.0)
    return Disk(tmp_path)


async def test_a_new_peer_knows_nothing(disk):
    saved = disk.open()
    assert (saved.key, saved.commit, saved.target, saved.hold, saved.newest) == (None, "auto", None, None, None)
    assert (saved.neighbourhood, saved.lead) == (None, None)


async def test_the_key_is_durable_at_once(disk):
    await disk.open().keep_key(KEY)
    assert disk.open().key == KEY


@pytest.mark.parametrize("kept", ["zz", KEY.hex()[2:], 7, bytes(KEY_BYTES).hex()])
async def test_a_key_that_is_damaged_or_of_another_run_does_not_count(disk, kept):
    disk.open()
    disk.file.update(key=kept)
    assert disk.open().key is None


async def test_facts_are_written_in_the_background_and_once_for_a_burst(disk):
    saved = disk.open()
    saved.keep(commit="barrier", target="0.7")
    saved.keep(hold="0.8")
    assert await disk.background.run() == ["memory"]
    again = disk.open()
    assert (again.commit, again.target, again.hold) == ("barrier", Version(0, 7), Version(0, 8))


async def test_a_fact_that_has_not_changed_is_not_written(disk):
    disk.open().keep(commit="auto")
    assert disk.background.work == []


async def test_unsaved_facts_are_written_at_the_end(disk):
    saved = disk.open()
    saved.keep(target="0.7")
    saved.close()
    assert disk.open().target == Version(0, 7)
    for _, work in disk.background.work:
        work.close()


async def test_after_the_end_no_task_is_begun(disk):
    saved = disk.open()
    saved.close()
    saved.keep(target="0.7")
    assert disk.background.work == []


async def test_the_saved_neighbourhood_is_restored(disk):
    saved = disk.open()
    saved.keep_neighbourhood(HUB, A, [B], [A, B])
    await disk.background.run()
    assert disk.open().neighbourhood == (HUB, A, [B], [A, B])
    saved.keep_neighbourhood(HUB, None, [], [])
    await disk.background.run()
    assert disk.open().neighbourhood == (HUB, None, [], [])


async def test_the_saved_lead_is_restored(disk):
    disk.open().keep(lead=saved_hub_state.row(A))
    await disk.background.run()
    assert disk.open().lead == A


async def test_facts_that_are_damaged_count_as_unknown(disk):
    disk.open()
    disk.file.update(commit="sometimes", target="x", hold=[], newest={}, neighbourhood={"hub": 1}, lead=[1])
    saved = disk.open()
    assert (saved.commit, saved.target, saved.hold, saved.newest) == ("auto", None, None, None)
    assert (saved.neighbourhood, saved.lead) == (None, None)


@pytest.mark.parametrize("durable", [False, True])
async def test_the_newest_version_is_durable_at_once_where_that_is_asked_for(disk, durable):
    await disk.open().keep_newest(Version(1, 2), durable=durable)
    assert len(disk.background.work) == (not durable)
    await disk.background.run()
    assert disk.open().newest == Version(1, 2)


async def test_a_full_disk_is_logged_and_ends_nothing(disk, monkeypatch, caplog):
    saved = disk.open()

    def full(**_) -> None:
        raise LocalError("no space left")

    monkeypatch.setattr(disk.file, "update", full)
    saved.keep(target="0.7")
    await disk.background.run()
    assert "no space left" in caplog.text
    saved.keep(target="0.8")
    saved.close()
    assert caplog.text.count("no space left") == 2
    for _, work in disk.background.work:
        work.close()

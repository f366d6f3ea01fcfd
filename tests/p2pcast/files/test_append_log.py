from __future__ import annotations

import errno
from pathlib import Path

import pytest

from p2pcast.files import disk
from p2pcast.files.append_log import AppendLog
from p2pcast.ground.errors import LocalError


def test_records_survive_a_restart_in_order(tmp_path: Path) -> None:
    log = AppendLog(tmp_path / "a.log")
    log.append({"n": 1})
    log.append({"n": 2, "text": "two\nlines   ü"}, {"n": 3})
    log.close()
    again = AppendLog(tmp_path / "a.log")
    assert again.records == [{"n": 1}, {"n": 2, "text": "two\nlines   ü"}, {"n": 3}] == log.records
    assert (tmp_path / "a.log").stat().st_mode & 0o777 == 0o600


def test_torn_last_line_is_cut_off_and_the_next_record_follows(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    log = AppendLog(path)
    log.append({"n": 1})
    whole = path.stat().st_size
    log.append({"n": 2})
    log.close()
    data = path.read_bytes()
    for end in range(whole, len(data)):
        path.write_bytes(data[:end])
        again = AppendLog(path)
        assert again.records == [{"n": 1}]
        again.append({"n": 3})
        again.close()
        assert AppendLog(path).records == [{"n": 1}, {"n": 3}]


def test_damage_before_the_last_line_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    log = AppendLog(path)
    log.append({"n": 1}, {"n": 2}, {"n": 3})
    log.close()
    data = bytearray(path.read_bytes())
    second = data.index(b"\n") + 12
    data[second] ^= 1
    path.write_bytes(data)
    with pytest.raises(LocalError, match="damaged in line 2"):
        AppendLog(path)


def test_rewrite_replaces_all_records_and_appending_continues(tmp_path: Path) -> None:
    log = AppendLog(tmp_path / "a.log")
    for n in range(5):
        log.append({"n": n})
    log.rewrite(log.records[-2:])
    log.append({"n": 5})
    log.close()
    assert AppendLog(tmp_path / "a.log").records == [{"n": 3}, {"n": 4}, {"n": 5}]


def test_failed_folder_sync_is_repeated_with_the_next_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, real, synced = AppendLog(tmp_path / "a.log"), disk.sync_folder, []

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(disk, "sync_folder", full)
    with pytest.raises(LocalError, match="no space is left"):
        log.append({"n": 1, "text": "long"}, {"n": 2})
    assert log.records == []
    monkeypatch.setattr(disk, "sync_folder", lambda path: (synced.append(path), real(path)))
    log.append({"n": 3})
    log.append({"n": 4})
    assert synced == [tmp_path]
    log.close()
    assert AppendLog(tmp_path / "a.log").records == [{"n": 3}, {"n": 4}]


def test_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    (tmp_path / "a.log").symlink_to(tmp_path / "other")
    with pytest.raises(LocalError):
        AppendLog(tmp_path / "a.log").append({"n": 1})
    assert (tmp_path / "other").read_text() == ""

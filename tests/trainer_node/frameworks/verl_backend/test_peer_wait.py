"""Waits at a peer that is not there; synced_run.py waits at real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pcast.ground.errors import RetryableError, UsageError
from p2pcast.ground.version import Version
from trainer_node.frameworks.verl_backend.peer_wait import peer_folder, wait_staged


def test_variables_of_the_worker_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERS", "/peers")
    assert peer_folder("$PEERS/a") == Path("/peers/a")
    monkeypatch.delenv("PEERS")
    with pytest.raises(UsageError, match=r"'\$PEERS/a' names a variable that this machine's worker does not have"):
        peer_folder("$PEERS/a")


def test_a_missing_peer_is_waited_for_until_the_time_limit(tmp_path: Path) -> None:
    asked = 0

    def wanted() -> bool:
        nonlocal asked
        asked += 1
        return True

    with pytest.raises(RetryableError, match=r"has not staged version 0\.4 or a newer one within 0\.3 s \(no daemon"):
        wait_staged(tmp_path, Version(0, 4), 0.3, wanted)
    assert asked > 1


def test_a_wait_of_an_earlier_sync_ends(tmp_path: Path) -> None:
    with pytest.raises(RetryableError, match=r"a later sync has begun: version 0\.4"):
        wait_staged(tmp_path, Version(0, 4), 60.0, lambda: False)

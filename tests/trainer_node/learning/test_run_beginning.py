"""Where a learner may begin, by what its folder, the ledger and the hub hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pcast.ground.errors import RefusedError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import RunFacts
from trainer_node.learning.checkpoints import CheckpointPosition, StoredCheckpoint
from trainer_node.learning.run_beginning import RunBeginning


def begun(step: int | None, ledger: tuple[int, int] = (0, 0), newest: Version | None = None, every: int = 10) -> None:
    """``ledger``: its step, and the acknowledged one. Raises RefusedError."""
    folder = Path("run/checkpoints")
    stored = None
    if step is not None:
        name = f"000001-{step:09d}"
        stored = StoredCheckpoint(folder / name, CheckpointPosition(1, 1, step), {}, {}, b"d" * 32)
    beginning = RunBeginning(folder, stored, RunFacts("task", 2, 4, *ledger), every, "http://ledger")
    beginning.check_ledger()
    beginning.check_hub("hub:7077", newest)


@pytest.mark.parametrize(
    ("step", "ledger", "newest"),
    [
        (None, (0, 0), None),
        (None, (0, 0), Version(0, 0)),
        (None, (0, 0), Version(1, 0)),
        (0, (4, 0), Version(1, 4)),
        (50, (60, 50), Version(2, 60)),
        (50, (0, 0), Version(2, 60)),
        (50, (0, 0), Version(0, 0)),
        (50, (40, 30), Version(1, 45)),
        (100, (140, 100), Version(1, 140)),
    ],
    ids=[
        "a new run",
        "a new run on the hub's base",
        "a crash before the first checkpoint",
        "a crash after the first one",
        "a crash after a later one",
        "a new ledger",
        "a new ledger and hub",
        "a restored hub and ledger",
        "rare checkpoints",
    ],
)
def test_run_goes_on(step: int | None, ledger: tuple[int, int], newest: Version | None) -> None:
    begun(step, ledger, newest)


@pytest.mark.parametrize(
    ("step", "ledger", "newest", "numbers"),
    [
        (None, (60, 60), Version(1, 60), "holds no checkpoint, .* at step 0, and the ledger http://ledger .* step 60"),
        (None, (5, 0), Version(1, 5), "at step 0, and the ledger http://ledger .* step 5"),
        (None, (0, 0), Version(1, 60), "at step 0, and the hub hub:7077 holds version 1.60"),
        (20, (60, 60), Version(1, 60), "holds 000001-000000020, .* at step 20, and the ledger .* step 60"),
        (20, (0, 0), Version(1, 60), "at step 20, and the hub hub:7077 holds version 1.60"),
    ],
    ids=[
        "an empty folder",
        "unacknowledged",
        "an empty folder at a new ledger",
        "an old copy",
        "an old copy at the hub",
    ],
)
def test_run_is_not_undone(step: int | None, ledger: tuple[int, int], newest: Version | None, numbers: str) -> None:
    with pytest.raises(RefusedError, match=numbers) as error:
        begun(step, ledger, newest)
    assert "--from-start" in str(error.value)


def test_learner_that_goes_back_within_reach_says_so(caplog: pytest.LogCaptureFixture) -> None:
    begun(50, (60, 60), Version(1, 60))
    assert "holds this run to step 60: going back to step 50 opens trained batches again" in caplog.text

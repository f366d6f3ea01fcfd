"""A real run, with a real vLLM and two workers, of a data set with every kind of bad row, prompt, play and reward."""

from __future__ import annotations

from pathlib import Path

import pytest
from poisoned_task import ALL, GOOD, LONGEST, MARKS
from real_run import RealRun
from real_server import make_model

from tests.daemons.rollouts.parity_task import Parity

# test_poisoned_run.py and test_blocking_plays.py are the samples.
pytestmark = [pytest.mark.vllm, pytest.mark.prove, pytest.mark.timeout(3600)]

STEPS = 3


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
def test_a_real_run_of_bad_rows_goes_on_and_blames_no_worker(
    tmp_path: Path, database: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm", reason="needs vLLM", exc_type=ImportError)
    monkeypatch.setenv(MARKS, str(tmp_path))
    (tmp_path / "hung").touch()  # the wait for a prompt that hangs is tried elsewhere
    model = make_model(tmp_path / "model", vocabulary=Parity.vocabulary)
    longest = ["--max-model-len", str(LONGEST)]
    options = {"engine_flags": longest, "worker_options": ["--play-step", "1"]}
    with RealRun(tmp_path, ALL, STEPS, model, engines=1, workers=2, database=database, **options) as run:
        batches = run.learn()
        codes = run.workers_end()
        status = run.status("ledger")
    assert set(codes.values()) == {0}
    assert [batch.step for batch in batches] == list(range(STEPS))
    assert {group.group.prompt[0] - 3 for batch in batches for group in batch.groups} == {GOOD}
    assert {row["blamed"] for row in status["workers"]} == {0}
    # The run may end before two workers agree on each kind.
    assert set(status["rejected_jobs"]) <= {"hung play", "failed play", "refused prompt", "not scored"}
    assert "failed play" in status["rejected_jobs"]
    assert status["rejected_prompts"] > 0

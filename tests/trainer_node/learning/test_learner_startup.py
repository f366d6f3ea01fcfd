"""The part of a configuration that a learner tells its ledger."""

from __future__ import annotations

from typing import Any

import pytest

from p2pcast.rollouts.overlong import TREATMENTS, Overlong
from trainer_node.learning import learner_startup
from trainer_node.learning.learner_config import LearnerConfig, TrainTable


@pytest.mark.parametrize("overlong", TREATMENTS)
def test_the_ledger_judges_by_the_treatment_of_the_learners_rows(
    overlong: Overlong, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(learner_startup, "BatchClient", lambda url, **options: made.append(options))
    learner_startup._client(LearnerConfig(train=TrainTable(overlong=overlong)))
    assert [options["overlong"] for options in made] == [overlong]

"""The weights that a trial's rollouts come from, as its learner's steps see them."""

from __future__ import annotations

from typing import Any

import pytest

from examples.research import learning_trial


def watched_ages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Filled by trials from now on: (learner step, step of the weights) of each row that is trained on."""
    ages: list[tuple[int, int]] = []
    rows_of = learning_trial.rows_of

    def watched(batch: Any, **options: Any) -> Any:
        rows = rows_of(batch, **options)
        ages.extend((batch.step, row.single_version) for row in rows)
        return rows

    monkeypatch.setattr(learning_trial, "rows_of", watched)
    return ages

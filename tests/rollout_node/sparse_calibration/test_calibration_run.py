"""The script of a calibration, beside a stand-in of vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from p2pcast.ground.errors import LocalError
from p2pcast.sparse.budget_schedule import BudgetSchedule
from rollout_node.sparse_calibration.calibration_run import rollouts
from rollout_node.vllm_plugin import sparse_attention


class DenseEngine:
    """As ``vllm.LLM``, of a model without a sparse layer: answers would equal those of dense attention."""

    def __init__(self, model: str, **_: Any) -> None:
        self.model = model

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        return [function(self.model)]

    def generate(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a dense engine is calibrated")


def test_engine_without_a_sparse_layer_is_not_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each budget would seem large enough."""
    stand_in, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    vars(stand_in).update(LLM=DenseEngine, SamplingParams=SimpleNamespace)
    vars(platforms).update(current_platform=SimpleNamespace(is_cpu=lambda: True))
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr(sparse_attention, "has_layers", lambda model: False)
    asked = {"model": "some-model", "prompts": [[1]], "budgets": {1: BudgetSchedule((1,)).document()}, "tokens": 2}
    asked |= {"candidates": 1, "block_size": 32, "longest": 4, "at_once": 1}
    with pytest.raises(LocalError, match="no layer of some-model"):
        rollouts(asked)

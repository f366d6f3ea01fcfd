"""Which models have a layer that follows schedules."""

from __future__ import annotations

import logging
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the modules that vLLM imports
    from rollout_node.vllm_plugin import SPARSE_VARIABLE, sparse_attention
    from rollout_node.vllm_plugin.sparse_attention.paged_backend import SparseImplementation
    from rollout_node.vllm_plugin.transfer_engine import VllmRankModel


def layer(number: int, window: Any = (-1, -1), kind: str = "decoder") -> Any:
    impl = SparseImplementation()
    vars(impl).update(attn_type=kind, alibi_slopes=None, sliding_window=window)
    return SimpleNamespace(impl=impl, layer_name=f"model.layers.{number}.self_attn.attn")


@pytest.mark.parametrize(
    ("layers", "follows"),
    [
        ([layer(0), layer(1), layer(2)], True),
        ([layer(0), layer(1), layer(2, 127), layer(3, None)], True),
        ([layer(0), layer(1)], False),
        ([layer(0), layer(1), layer(2, 127), layer(3, (127, 0))], False),
        ([layer(2, kind="encoder_only")], False),
        ([SimpleNamespace(impl=object(), layer_name="model.layers.2.self_attn.attn"), SimpleNamespace()], False),
    ],
)
def test_model_follows_schedules_by_a_layer_that_may_be_sparse(layers: list[Any], *, follows: bool) -> None:
    assert sparse_attention.has_layers(SimpleNamespace(modules=lambda: iter(layers))) == follows


@pytest.mark.parametrize("variable", ["1", "0"])
def test_server_that_is_dense_despite_its_variable_says_so(
    variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(SPARSE_VARIABLE, variable)
    monkeypatch.setattr(logging.getLogger("vllm.p2pcast"), "handlers", [caplog.handler])
    parallel = SimpleNamespace(data_parallel_index=0, data_parallel_size=1, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel)
    model = SimpleNamespace(model="no/such", hf_config=None)
    rank = VllmRankModel(config, model, torch.device("cpu"), torch.nn.Linear(1, 1))
    assert rank.use_schedule is None
    assert ("its attention is dense" in caplog.text) == (variable == "1")

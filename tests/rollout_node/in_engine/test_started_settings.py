"""A version whose config.json makes another model is refused for a running engine, with the settings' names."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import LocalError
from rollout_node.in_engine.installation import DerivedParts, Installation
from rollout_node.in_engine.started_settings import FILE, StartedSettings

transformers = pytest.importorskip("transformers")
LOG = logging.getLogger("test")
MODEL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def config(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = transformers.Qwen3Config(**MODEL, tie_word_embeddings=True).to_dict()
    return found | changes


@pytest.fixture
def started(tmp_path: Path) -> StartedSettings:
    (tmp_path / FILE).write_text(json.dumps(config(id2label={0: "no", 1: "yes"}, pruned_heads={0: [1]})))
    found = StartedSettings(transformers.Qwen3Config, str(tmp_path), LOG)
    (tmp_path / FILE).unlink()  # a later version may replace it
    return found


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({}, []),
        ({"pruned_heads": {"0": [1]}}, []),  # JSON writes a number that is a key as text
        ({"pruned_heads": {"1": [1]}}, ["pruned_heads.0", "pruned_heads.1"]),
        ({"id2label": {"0": "a", "1": "b"}, "transformers_version": "0", "unsloth_version": "1"}, []),
        ({"dtype": "float32", "use_cache": False, "attention_dropout": 0.5, "eos_token_id": 3, "pad_token_id": 4}, []),
        ({"tie_word_embeddings": False, "hidden_act": "gelu"}, ["hidden_act", "tie_word_embeddings"]),
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, ["rope_parameters.rope_theta"]),
        ({"model_type": "qwen2"}, ["model_type"]),
    ],
)
def test_settings_that_make_another_model_are_named(
    started: StartedSettings, changes: dict[str, Any], differing: list[str]
) -> None:
    version = config(pruned_heads={0: [1]}) | changes
    assert started.differing(json.dumps(version).encode()) == differing


def test_a_default_may_be_left_out(started: StartedSettings) -> None:
    short = {"model_type": "qwen3", **MODEL, "tie_word_embeddings": True, "pruned_heads": {"0": [1]}}
    assert started.differing(json.dumps(short).encode()) == []
    del short["num_key_value_heads"]
    assert started.differing(json.dumps(short).encode()) == ["num_key_value_heads"]


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"7", b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_configuration_differs(started: StartedSettings, text: bytes) -> None:
    assert started.differing(text) == [FILE]


def test_an_engine_without_such_a_file_compares_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert StartedSettings(transformers.Qwen3Config, str(tmp_path), LOG).differing(b"{}") == []
    assert "not compared" in caplog.text


def test_settings_that_no_class_reads_are_compared_raw(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"layers": 2, "model_type": "own"}')
    started = StartedSettings(object, str(tmp_path), LOG)
    assert started.differing(b'{"model_type": "own", "layers": 2}') == []
    assert started.differing(b'{"model_type": "own", "layers": 3}') == ["layers"]


def test_a_version_with_other_settings_is_refused(started: StartedSettings, make_run: Callable[..., Any]) -> None:
    layout = Layout([Tensor("weight", "BF16", (4, 4))])
    run = make_run(layout, np.zeros(layout.nbytes, np.uint8))
    model, derived = torch.nn.Linear(4, 4, bias=False), DerivedParts(["all: whole"], pytest.fail)
    installation = Installation(model, layout, derived, settings=started)
    run.small = {FILE: json.dumps(config(hidden_act="gelu", pruned_heads={0: [1]})).encode()}
    with pytest.raises(LocalError, match=r"0\.0 is refused: .* in hidden_act; start the engine"):
        installation.prepare(run.files, run.version, lambda: False)
    run.small = {FILE: json.dumps(config(pruned_heads={0: [1]})).encode()}
    assert installation.prepare(run.files, run.version, lambda: False) is not None

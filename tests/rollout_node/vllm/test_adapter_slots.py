"""LoRA adapters in a real vLLM engine: slots and answers after each version equal those of vLLM's own loader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_server import ENVIRONMENT, make_model

pytestmark = pytest.mark.vllm

TOLERANCE = 1e-4
"""Largest difference of a log-probability between an adapter and the merged model, in float32: the two round sums in
different orders."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("vllm", reason="needs vLLM", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("adapters")
    models = [make_model(folder / dtype, dtype=dtype) for dtype in ("bfloat16", "float32")]
    (folder / "work").mkdir()
    command = [sys.executable, str(Path(__file__).with_name("adapter_engine.py")), *map(str, models)]
    environment = {**os.environ, **ENVIRONMENT, "P2PCAST_SOCK": "/nonexistent"}
    done = subprocess.run(
        [*command, str(folder / "work")], env=environment, text=True, capture_output=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_slots_and_answers_equal_the_result_of_vllms_own_loader(seen: dict[str, Any]) -> None:
    assert seen["installs"] == ["dense", "sparse", "sparse"]
    assert seen["slots"] == seen["says"] == seen["changed"] == [True] * 6
    assert seen["audits"] == [[0, 0]] * 3
    assert seen["in_place"]


def test_an_install_moves_no_adapter_to_another_slot(seen: dict[str, Any]) -> None:
    """A running request reads the slot that vLLM gave it."""
    assert seen["stay"] == [True] * 3


def test_an_adapter_that_left_the_cache_returns_with_the_installed_matrices(seen: dict[str, Any]) -> None:
    assert seen["from_the_cache"] == [True] * 8


def test_three_adapters_that_share_one_slot_are_scaled_once(seen: dict[str, Any]) -> None:
    """``--max-loras 1``: an adapter that returns to the slot, or to the host cache, has its version's factor."""
    rotated = seen["rotated"]
    assert rotated["dropped"] == [True] * 4
    assert rotated["says"] == [True] * 12
    assert rotated["audits"] == [True] * 2


def test_rollback_restores_slots_and_cache(seen: dict[str, Any]) -> None:
    assert seen["rollback"] == [True] * 5


def test_audit_notices_a_flipped_bit_in_each_copy(seen: dict[str, Any]) -> None:
    assert seen["noticed"] == [True] * 5


def test_the_versions_configuration_decides_the_factor(seen: dict[str, Any]) -> None:
    assert seen["configuration"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("rank", "start the server with --max-lora-rank 9"),
        ("stated rank", "has rank 4, and its configuration says 2"),
        ("dora", "does not yet support DoRA"),
        ("embedding", "of plain linear layers alone"),
        ("lone", "its other matrix is missing"),
        ("shape", "does not fit the layer"),
        ("name", "the server has no adapter unknown"),
        ("unnamed", "the run's adapter has no name"),
        ("configuration", "vLLM cannot serve adapter one"),
    ],
)
def test_adapters_that_cannot_be_installed_are_refused_with_the_reason(
    seen: dict[str, Any], case: str, message: str
) -> None:
    assert message in seen["refused"][case]


def test_merged_and_unmerged_adapters_give_the_same_tokens(seen: dict[str, Any]) -> None:
    unmerged, merged = seen["merged"]
    assert [[token for token, _ in row] for row in unmerged] == [[token for token, _ in row] for row in merged]
    pairs = [pair for one, other in zip(unmerged, merged, strict=True) for pair in zip(one, other, strict=True)]
    assert max(abs(one[1] - other[1]) for one, other in pairs) < TOLERANCE

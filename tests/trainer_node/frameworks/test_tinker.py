"""Tinker's data from a real ledger: the package ``tinker`` makes each datum, in an environment of its own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from p2pcast.ground.errors import UsageError
from tests.environments import ROOT
from tests.trainer_node.frameworks.bridge_stage import GROUPS, SIZE, batch_states, filled_ledger, run_in
from trainer_node.frameworks.tinker import LedgerDatums

TRAINER = Path(__file__).parent / "tinker_training.py"


def assert_shifted(one: dict[str, Any]) -> None:
    """Two tokens were sampled after a prompt of two: the first datum's position is that of the prompt's last token."""
    assert one["model_input"][1:] == one["target_tokens"][:-1]
    assert one["mask"] == one["weights"] == [0.0, 1.0, 1.0]
    assert one["logprobs"] == [0.0, -1.0, -1.0]
    first, end = one["target_tokens"][-2:]
    assert end == 2
    # Rewards of a group are 1, 0, 1, 0: their standard deviation is 1/2.
    expected = (0.5 if first == 3 else -0.5) / (0.5 + 1e-4)
    assert one["advantages"][0] == 0.0
    assert all(math.isclose(found, expected, rel_tol=1e-6) for found in one["advantages"][1:])


async def test_each_batch_is_trained_once_though_the_trainer_begins_again(tmp_path: Path) -> None:
    state, journal = tmp_path / "ledger", tmp_path / "journal.json"
    state.mkdir()
    async with filled_ledger(state) as ledger:
        await ledger.publish()
        words = [ledger.url, ledger.bearer, journal]
        # The first trainer takes the batches 0 to 3, and its checkpoint of two steps is its last.
        first = await run_in("bridges", TRAINER, *words, 0, 4, 2)
        second = await run_in("bridges", TRAINER, *words, 2, 4, 4)
    lines = [json.loads(line) for line in (first + second).splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 2, 3]
    for line in lines:
        assert len(line["data"]) == GROUPS * SIZE
        for one in line["data"]:
            assert_shifted(one)
    trained = [(step, "trained") for step in range(4)]
    assert batch_states(state) == sorted([*trained, (2, "reopened"), (3, "reopened")])


def test_unknown_inputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no input of a datum is named 'targets'"):
        LedgerDatums("http://127.0.0.1:7079", tmp_path / "journal", inputs=["targets"])


def test_importing_the_bridges_loads_no_framework() -> None:
    code = """if True:
        import sys
        import trainer_node.frameworks.atropos
        import trainer_node.frameworks.slime_rollouts
        import trainer_node.frameworks.tinker
        print([name for name in ("torch", "tinker", "atroposlib", "slime", "trainer_node.sdk") if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr

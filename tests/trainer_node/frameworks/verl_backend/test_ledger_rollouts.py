"""verl's rollouts from a real ledger: verl's own DataProto and advantages, in verl's environment."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from p2pcast.ground.errors import UsageError
from tests.trainer_node.frameworks.bridge_stage import GROUPS, SIZE, batch_states, filled_ledger, played_hub, run_in
from trainer_node.frameworks.verl_backend.ledger_rollouts import JOURNAL, settings_of

TRAINER = Path(__file__).parent / "ledger_batches.py"


def flat(rows: Any) -> list[float]:
    return [value for row in rows for value in row]


def equal(found: Any, expected: Any) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-7) for a, b in zip(flat(found), flat(expected), strict=True))


def assert_batch(said: dict[str, Any], groups: int) -> None:
    """Two tokens were sampled after a prompt of two; the last ``groups`` - GROUPS groups are fillers."""
    for number, (prompt, response, mask, position) in enumerate(
        zip(said["prompts"], said["responses"], said["response_mask"], said["position_ids"], strict=True)
    ):
        own = number < GROUPS * SIZE
        assert prompt[:-2] == [0] * 4
        assert response[2:] == [0] * 3
        assert response[1] == 2
        assert mask == ([1, 1, 0, 0, 0] if own else [0] * 5)
        assert position == [0, 0, 0, 0, 0, 1, 2, 3, 3, 3, 3]
        assert said["attention_mask"][number] == [0] * 4 + [1] * 4 + [0] * 3
        assert said["rollout_log_probs"][number] == [-1.0, -1.0, 0.0, 0.0, 0.0]
        reward = float(response[0] == 3) if own else 0.5
        assert said["rm_scores"][number] == [0.0, reward, 0.0, 0.0, 0.0]
        expected = (reward - 0.5) / (0.5 + 1e-4)
        assert equal([said["own"][number]], [[expected * one for one in mask]])
        assert equal([said["own_undivided"][number]], [[(reward - 0.5) * one for one in mask]])
    # verl's own estimators agree: Dr. GRPO exactly, GRPO up to verl's standard deviation of a sample.
    assert equal(said["verls_undivided"], said["own_undivided"])
    sample = math.sqrt(SIZE / (SIZE - 1))
    pairs = zip(flat(said["own"]), flat(said["verls"]), strict=True)
    assert all(math.isclose(a, b * sample, abs_tol=1e-3) for a, b in pairs)
    assert said["timing"] == ["p2pcast/ledger_wait"]
    assert len(said["staleness"]) == groups * SIZE


@pytest.mark.prove  # test_synced_run.py and the ledger tests of the other frameworks are samples
@pytest.mark.timeout(600)
async def test_verls_own_advantages_agree_and_each_batch_is_trained_once(tmp_path: Path) -> None:
    state, folder = tmp_path / "ledger", tmp_path / "checkpoints"
    state.mkdir()
    folder.mkdir()
    # After the restart verl loads the checkpoint of two steps, and publishes its weights under branch 1.
    async with filled_ledger(state) as ledger, played_hub("0.0") as hub, played_hub("0.0", "0.4", "1.2") as later:
        await ledger.publish()
        runs = (f"{hub},0,4,{GROUPS}", f"{later},2,5,{GROUPS + 1}")
        printed = await run_in("verl", TRAINER, ledger.url, ledger.bearer, folder, SIZE, *runs)
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    before, refusals, after = lines[:4], lines[4], lines[5:8]
    assert [said["step"] for said in before + after] == [0, 1, 2, 3, 2, 3, 4]
    for said in before:
        assert_batch(said, GROUPS)
    for said in after:
        assert_batch(said, GROUPS + 1)
    assert "temperature 1.0, and the trainer computes with 0.5" in refusals["temperature"]
    assert "has 2 groups of up to 4 samples, and verl trains 2 groups of 3 a step" in refusals["size"]
    assert "has 2 tokens before its response and 2 in it, and verl takes 6 and 1" in refusals["length"]
    states = [(0, "trained"), (1, "trained"), (2, "reopened"), (2, "trained"), (3, "reopened"), (3, "trained")]
    assert batch_states(state) == [*states, (4, "cut")]
    assert list(json.loads((folder / JOURNAL).read_text())["batches"]) == ["4"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, r"p2pcast_ledger\.url is missing: give the ledger's URL"),
        ({"url": 3}, r"p2pcast_ledger\.url=3 is no text"),
        ({"url": "http://a:1", "patience": 3}, r"p2pcast_ledger\.patience is unknown: the keys are url, bearer_file"),
        ({"url": "http://a:1", "patience_s": "3"}, r"p2pcast_ledger\.patience_s='3' is no number"),
        ({"url": "http://a:1", "give_up_s": True}, r"p2pcast_ledger\.give_up_s=True is no number"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, Any] | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        settings_of(given)

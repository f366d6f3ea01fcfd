"""When a runner's generators are hidden. Real engines are in ``tests/rollout_node/vllm/test_generate.py``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout_node.vllm_plugin.seeded_chunks import is_faulty, keep_generators


class Runner:
    """The parts of vLLM's runner that matter: four rows, of which the second and the third have unfinished prompts."""

    def __init__(self, *, fails: bool = False) -> None:
        self.input_batch = SimpleNamespace(num_reqs=4, generators={0: "a", 2: "c", 3: "d"})
        self.discard_request_mask = SimpleNamespace(np=np.array([False, True, True, False, True]))
        self.seen: dict[int, str] = {}
        self._fails = fails

    def sample_tokens(self, grammar_output: Any) -> Any:
        self.seen = dict(self.input_batch.generators)
        if self._fails:
            raise ValueError("no sample")
        return grammar_output


class FaultyRunner(Runner):
    def _bookkeeping_sync(self, generator: Any) -> None:
        generator.set_offset(generator.get_offset() - 4)


class SoundRunner(Runner):
    def _bookkeeping_sync(self, generator: Any) -> None:
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_rows_with_unfinished_prompts_keep_their_generators(fails: bool) -> None:
    keep_generators(FaultyRunner)
    keep_generators(FaultyRunner)
    runner = FaultyRunner(fails=fails)
    if fails:
        with pytest.raises(ValueError, match="no sample"):
            runner.sample_tokens("grammar")
    else:
        assert runner.sample_tokens("grammar") == "grammar"
    assert runner.seen == {0: "a", 3: "d"}
    assert runner.input_batch.generators == {0: "a", 2: "c", 3: "d"}


def test_a_runner_without_the_fault_is_left_alone() -> None:
    before = SoundRunner.sample_tokens
    keep_generators(SoundRunner)
    assert SoundRunner.sample_tokens is before
    assert not is_faulty(SoundRunner)

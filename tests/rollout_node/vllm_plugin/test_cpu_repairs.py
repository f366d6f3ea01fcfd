"""Batches of base and adapter, and logits of scored prompts, in vLLM's own LoRA wrapper for CPUs; and when a runner's
generators are hidden. Real engines are in ``tests/rollout_node/vllm/test_generate.py``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from rollout_node.vllm_plugin.cpu_repairs import is_faulty, keep_generators, repair_lora

RANK, HIDDEN, ROWS, VOCABULARY = 4, 8, (6, 3), 16
SLOTS = 2
PHI = 5
"""vLLM's number of the adapter."""


class Mapping(NamedTuple):
    """As vLLM's ``LoRAMapping``, whose module cannot be imported without warnings."""

    index_mapping: tuple[int, ...]
    prompt_mapping: tuple[int, ...]
    is_prefill: bool = True


class Kept(PunicaWrapperCPU):
    pass


repair_lora(Kept)


def output(kind: type[PunicaWrapperCPU], tokens: list[int], *, slots: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of a layer of two slices before and after the adapter. ``tokens``: number of the adapter of each; 0: the
    base. ``slots``: of which the last has the adapter.
    """
    draw = torch.Generator().manual_seed(0)
    wrapper = kind(max_num_batched_tokens=16, max_batches=16, device="cpu")
    mapping: Any = Mapping(tuple(tokens), tuple(sorted(set(tokens))))
    wrapper.update_metadata(mapping, [*[None] * (slots - 1), PHI], slots, VOCABULARY)
    a, b = [], []
    for rows in ROWS:
        a.append(torch.randn(slots, 1, RANK, HIDDEN, generator=draw))
        b.append(torch.randn(slots, 1, rows, RANK, generator=draw))
    before = torch.randn(len(tokens), sum(ROWS), generator=draw)
    after = before.clone()
    wrapper.add_lora_linear(after, torch.randn(len(tokens), HIDDEN, generator=draw), tuple(a), tuple(b), 1.0, ROWS)
    return before, after


def changed(before: torch.Tensor, after: torch.Tensor) -> list[bool]:
    return [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]


def test_vllm_adds_the_adapter_to_the_base() -> None:
    assert changed(*output(PunicaWrapperCPU, [0, 0, PHI, PHI])) == [True] * 4


@pytest.mark.parametrize("tokens", [[0, 0, PHI, PHI], [PHI, 0, PHI], [PHI, PHI], [0, 0]])
@pytest.mark.parametrize("slots", [1, 2])
def test_tokens_of_the_base_keep_every_bit(tokens: list[int], slots: int) -> None:
    assert changed(*output(Kept, tokens, slots=slots)) == [token == PHI for token in tokens]


def test_tokens_of_the_adapter_equal_the_outputs_of_vllm() -> None:
    assert torch.equal(output(Kept, [0, PHI, PHI])[1][1:], output(PunicaWrapperCPU, [0, PHI, PHI])[1][1:])


class Running(PunicaWrapperCPU):
    """Three requests run: one of the base, and one of each adapter."""

    sampler_indices = torch.tensor([-1, 0, 1])

    def __init__(self) -> None:
        return


class KeptRunning(Running):
    pass


repair_lora(KeptRunning)


def added(wrapper: Running, rows: int, size: float) -> torch.Tensor:
    torch.manual_seed(0)
    logits, hidden = torch.zeros(rows, VOCABULARY), torch.randn(rows, HIDDEN)
    a, b = size * torch.randn(SLOTS, 1, RANK, HIDDEN), torch.randn(SLOTS, 1, VOCABULARY, RANK)
    wrapper.add_lora_logits(logits, hidden, a, b, 1.0)
    return logits


def test_vllm_fails_at_a_prompt_beside_other_requests() -> None:
    with pytest.raises(RuntimeError, match="einsum"):
        added(Running(), 7, 0.0)


def test_a_prompt_is_scored_by_the_head_alone() -> None:
    assert not added(KeptRunning(), 7, 0.0).any()


def test_logits_of_requests_are_the_engines_own() -> None:
    expected = added(Running(), 3, 1.0)
    assert expected.any()
    assert torch.equal(added(KeptRunning(), 3, 1.0), expected)


def test_an_adapter_of_the_head_is_left_to_vllm() -> None:
    with pytest.raises(RuntimeError, match="einsum"):
        added(KeptRunning(), 7, 1.0)


def test_a_second_call_changes_nothing() -> None:
    before = Kept.add_lora_linear, Kept.add_lora_logits
    repair_lora(Kept)
    assert (Kept.add_lora_linear, Kept.add_lora_logits) == before


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

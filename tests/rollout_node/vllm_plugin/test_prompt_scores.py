"""Logits of scored prompts by vLLM's own LoRA wrapper for CPUs."""

from __future__ import annotations

import pytest
import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from rollout_node.vllm_plugin.prompt_scores import keep_prompt_scores

ADAPTERS, RANK, HIDDEN, VOCABULARY = 2, 4, 8, 16


class Wrapper(PunicaWrapperCPU):
    """Three requests run: one of the base, and one of each adapter."""

    sampler_indices = torch.tensor([-1, 0, 1])

    def __init__(self) -> None:
        return


class Kept(Wrapper):
    pass


keep_prompt_scores(Kept)


def added(wrapper: Wrapper, rows: int, size: float) -> torch.Tensor:
    torch.manual_seed(0)
    logits, hidden = torch.zeros(rows, VOCABULARY), torch.randn(rows, HIDDEN)
    a, b = size * torch.randn(ADAPTERS, 1, RANK, HIDDEN), torch.randn(ADAPTERS, 1, VOCABULARY, RANK)
    wrapper.add_lora_logits(logits, hidden, a, b, 1.0)
    return logits


def test_vllm_fails_at_a_prompt_beside_other_requests() -> None:
    with pytest.raises(RuntimeError, match="einsum"):
        added(Wrapper(), 7, 0.0)


def test_a_prompt_is_scored_by_the_head_alone() -> None:
    assert not added(Kept(), 7, 0.0).any()


def test_logits_of_requests_equal_vllms() -> None:
    expected = added(Wrapper(), 3, 1.0)
    assert expected.any()
    assert torch.equal(added(Kept(), 3, 1.0), expected)


def test_an_adapter_of_the_head_is_left_to_vllm() -> None:
    with pytest.raises(RuntimeError, match="einsum"):
        added(Kept(), 7, 1.0)


def test_a_second_call_changes_nothing() -> None:
    before = Kept.add_lora_logits
    keep_prompt_scores(Kept)
    assert Kept.add_lora_logits is before

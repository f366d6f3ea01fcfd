"""Batches of base and adapter in vLLM's own LoRA wrapper for CPUs."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from rollout_node.vllm_plugin.base_rows import keep_base_rows

RANK, HIDDEN, ROWS, VOCABULARY = 4, 8, (6, 3), 16
PHI = 5
"""vLLM's number of the adapter."""


class Mapping(NamedTuple):
    """As vLLM's ``LoRAMapping``, whose module cannot be imported without warnings."""

    index_mapping: tuple[int, ...]
    prompt_mapping: tuple[int, ...]
    is_prefill: bool = True


class Kept(PunicaWrapperCPU):
    pass


keep_base_rows(Kept)


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


def test_a_second_call_changes_nothing() -> None:
    before = Kept.add_lora_linear
    keep_base_rows(Kept)
    assert Kept.add_lora_linear is before

"""What recording makes of loaders that do more than copy one tensor into one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from p2pcast.codec.layout import Layout, Tensor
from rollout_node.vllm_plugin.mapping import Mapping
from rollout_node.vllm_plugin.recording import record

Tensors = Iterable[tuple[str, torch.Tensor]]
LAYOUT = Layout([Tensor(name, "BF16", (2, 3)) for name in ("a", "b", "c")])
A, B, C = range(3)


class Two(torch.nn.Module):
    """``ab`` is for a and b, ``c`` for c."""

    def __init__(self, load: Callable[[Two, Tensors], object]) -> None:
        super().__init__()
        self.ab = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16), requires_grad=False)
        self.c = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16), requires_grad=False)
        self.calls = 0
        self._load = load

    def load_weights(self, weights: Tensors) -> None:
        self.calls += 1
        self._load(self, weights)


def plain(model: Two, weights: Tensors) -> None:
    for name, w in weights:
        {"a": model.ab.data[:2], "b": model.ab.data[2:], "c": model.c.data}[name].copy_(w)


def then(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Callable[[Two, Tensors], None]:
    def changed(weights: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        for name, w in weights:
            yield name, change(name, w)

    return lambda model, weights: plain(model, changed(weights))


def joins_by_cat(model: Two, weights: Tensors) -> None:
    found = dict(weights)
    if "c" in found:
        model.c.data.copy_(found["c"])
    if {"a", "b"} <= found.keys():
        model.ab.data.copy_(torch.cat([found["a"], found["b"]]))


def joins_in_a_buffer(model: Two, weights: Tensors) -> None:
    """``a`` alone reaches the parameter too: that it isn't all can be told only from what is done with ``b``."""
    buffer = None
    for name, w in weights:
        if name == "c":
            model.c.data.copy_(w)
        elif name == "a":
            buffer = w.new_empty(4, 3)
            buffer[:2].copy_(w)
            model.ab.data.copy_(buffer)
        elif buffer is not None:
            buffer[2:].copy_(w)
            model.ab.data.copy_(buffer)


def look(load: Callable[[Two, Tensors], object]) -> tuple[Two, Mapping, list[str]]:
    model = Two(load)
    mapping, _, unreached = record(model, LAYOUT)
    assert all(bool((p == 1).all()) for p in model.parameters())
    return model, mapping, unreached


def test_a_loader_that_copies_is_called_once() -> None:
    model, mapping, unreached = look(plain)
    assert (model.calls, set(mapping.blocks), mapping.reload, unreached) == (1, {A, B, C}, {}, [])


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w + 1,
        lambda w: w.flip(0),
        lambda w: torch.cat([w[1:], w[:1]]),
        lambda w: w.float().to(torch.bfloat16),
        lambda w: w.mul_(2),
        lambda w: torch.empty_like(w).copy_(w),
        lambda w: w[:1],
    ],
)
def test_what_transforms_one_tensor_leaves_the_others_mapped(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, mapping, unreached = look(then(lambda name, w: change(w) if name == "b" else w))
    assert (model.calls, set(mapping.blocks), set(mapping.reload), unreached) == (1, {A, C}, {B}, [])


def looks_at_b(name: str, w: torch.Tensor) -> torch.Tensor:
    return w * w.sum().item() if name == "b" else w


def test_a_loader_that_wants_values_is_asked_for_each_tensor() -> None:
    model, mapping, unreached = look(then(looks_at_b))
    assert (set(mapping.blocks), set(mapping.reload), unreached) == ({A, C}, {B}, [])
    assert model.calls == 1 + 3 + 1


@pytest.mark.parametrize("load", [joins_by_cat, joins_in_a_buffer])
def test_tensors_that_are_joined_are_not_taken_for_unused(load: Callable[[Two, Tensors], object]) -> None:
    _, mapping, unreached = look(load)
    assert C in mapping.blocks
    assert any("tensor b" in name for name in unreached)


def test_tensors_of_another_rank_are_unused_whatever_view_of_them_is_taken() -> None:
    def load(model: Two, weights: Tensors) -> None:
        plain(model, ((name, w) for name, w in ((name, w.t().contiguous().t()) for name, w in weights) if name != "b"))

    model, mapping, unreached = look(load)
    assert (model.calls, set(mapping.blocks), mapping.reload, unreached) == (1, {A, C}, {}, [])

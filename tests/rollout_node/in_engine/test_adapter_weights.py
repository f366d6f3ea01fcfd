"""A toy engine whose run has an adapter beside its model: one version is both, or neither."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stored_run import Run

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import IntegrityError
from rollout_node.in_engine.adapter_weights import AdapterWeights, ModelBesideAdapters
from rollout_node.in_engine.installation import Installation
from rollout_node.in_engine.weight_audit import compare

A, B = "phi/layer.lora_A.weight", "phi/layer.lora_B.weight"
LAYOUT = Layout([Tensor("layer.weight", "BF16", (6, 6)), Tensor(A, "F32", (2, 6)), Tensor(B, "F32", (6, 2))])
MODEL = next(n for n, tensor in enumerate(LAYOUT.tensors) if tensor.name == "layer.weight")
PHI = {0, 1, 2} - {MODEL}


class Toy(torch.nn.Module):
    """A model whose loader transposes, and fails at foreign names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Parameter(torch.randn(6, 6).bfloat16(), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            {"layer.weight": self.layer}[name].data.copy_(tensor.t())


class Copies:
    """``Followers`` that keep a copy of each matrix, and can fail."""

    def __init__(self, weights: AdapterWeights) -> None:
        self.weights, self.fails = weights, False
        self.held: dict[int, torch.Tensor] = {}

    def settings(self, source: Any, version: Any) -> None:
        return None

    def follow(self, settings: None) -> None:
        if self.fails:
            self.fails = False
            raise IntegrityError("a slot was not written")
        self.held = {n: matrix.clone() for n, matrix in self.weights.numbered.items()}

    def differing(self) -> list[int]:
        return [n for n, matrix in self.weights.numbered.items() if not torch.equal(matrix, self.held[n])]


class Engine:
    def __init__(self, folder: Path, *, takes_adapters: bool = True) -> None:
        state = np.random.default_rng(1).integers(0, 60, LAYOUT.nbytes, np.uint8)
        self.run = Run(folder, LAYOUT, state)
        self.toy, self.weights = Toy(), AdapterWeights(LAYOUT, ["phi"])
        self.copies = Copies(self.weights)
        weights, copies = (self.weights, self.copies) if takes_adapters else (None, None)
        whole = ModelBesideAdapters(self.toy, ["phi"], weights)
        self.installation = Installation(whole, LAYOUT, followers=copies)

    def install(self) -> Any:
        how: Any = self.installation.prepare(self.run.files, self.run.version, lambda: False)
        self.installation.commit(self.run.version)
        return how["install"]

    def bits(self) -> list[bytes]:
        tensors = [self.toy.layer.data, *self.weights.numbered.values(), *self.copies.held.values()]
        return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]

    def audit(self) -> tuple[list[str], list[str]]:
        found = self.installation
        entries = found.audit(self.run.files, self.run.version, lambda: False, found.differing_copies())
        return compare(LAYOUT, entries, self.run.digests)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def test_each_commit_writes_model_and_adapter(engine: Engine) -> None:
    assert engine.install() == "dense"
    assert engine.audit() == ([], [])
    for seed in range(4):
        before = engine.bits()
        engine.run.step(seed, share=0.5, bits=0x11)
        assert engine.install() == "sparse"
        assert engine.bits() != before
        assert engine.audit() == ([], [])
    assert engine.copies.held.keys() == PHI


@pytest.mark.parametrize("fault", ["adapter", "model"])
def test_a_commit_that_fails_for_one_leaves_both_unchanged(engine: Engine, fault: str) -> None:
    engine.install()
    held, before = engine.installation.held, engine.bits()
    engine.run.step(1, share=0.5, bits=0x11)
    engine.installation.prepare(engine.run.files, engine.run.version, lambda: False)
    prepared: Any = engine.installation._prepared
    if fault == "adapter":
        engine.copies.fails = True
    else:
        prepared.mark ^= 1  # the model's values, as read back, are not those prepared
    with pytest.raises(IntegrityError):
        engine.installation.commit(engine.run.version)
    assert engine.installation.held == held
    assert engine.bits() == before
    assert engine.install() == "sparse"
    assert engine.audit() == ([], [])


def test_a_first_install_that_fails_for_the_adapter_names_no_version(engine: Engine) -> None:
    engine.copies.fails = True
    with pytest.raises(IntegrityError, match="a slot"):
        engine.install()
    assert engine.installation.held is None
    assert engine.install() == "dense"
    assert engine.audit() == ([], [])


def test_an_audit_names_a_flipped_bit_of_either(engine: Engine) -> None:
    engine.install()
    for number, tensor in (
        (MODEL, engine.toy.layer.data),
        *engine.weights.numbered.items(),
        *engine.copies.held.items(),
    ):
        words = tensor.view(torch.uint8)
        words[0, 0] ^= 1
        assert engine.audit() == ([LAYOUT.tensors[number].name], [])
        words[0, 0] ^= 1
    assert engine.audit() == ([], [])


def test_an_engine_without_adapters_gets_the_model_and_cannot_tell_the_rest(tmp_path: Path) -> None:
    engine = Engine(tmp_path, takes_adapters=False)
    assert engine.install() == "dense"
    engine.run.step(1, share=0.5, bits=0x11)
    assert engine.install() == "sparse"
    assert engine.audit() == ([], [A, B])
    assert not any(matrix.any() for matrix in engine.weights.numbered.values())

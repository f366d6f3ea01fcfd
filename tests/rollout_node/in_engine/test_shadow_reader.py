"""Reading a shadow through a descriptor, as a rank of an engine does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError
from rollout_node.in_engine import shadow_reader
from rollout_node.in_engine.shadow_reader import ShadowReader

STATE = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.arange(4, dtype=torch.int64).to(torch.bfloat16),
    "none": torch.empty(0, 5, dtype=torch.float16),
}
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
LAYOUT = Layout([Tensor(name, NAMES[t.dtype], tuple(t.shape)) for name, t in STATE.items()])
Opened = Callable[[Layout], ShadowReader]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The shadow: tensors at the layout's offsets."""
    save_file(STATE, tmp_path / "shadow")
    return tmp_path / "shadow"


@pytest.fixture
def opened(path: Path) -> Iterator[Opened]:
    fd = os.open(path, os.O_RDONLY)
    yield lambda layout: ShadowReader(fd, layout)
    os.close(fd)


def test_every_tensor_is_read_in_order(opened: Opened) -> None:
    found = dict(opened(LAYOUT).all())
    assert list(found) == [tensor.name for tensor in LAYOUT.tensors]
    assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in STATE.items()}
    assert all(torch.equal(found[name], t) for name, t in STATE.items())


def test_words_are_a_row_of_the_asked_dtype(opened: Opened) -> None:
    reader = opened(LAYOUT)
    numbers = {tensor.name: n for n, tensor in enumerate(LAYOUT.tensors)}
    assert torch.equal(reader.words(numbers["b"], torch.int16), STATE["b"].view(torch.int16))
    assert reader.words(numbers["none"], torch.int16).shape == (0,)


def test_a_write_to_a_tensor_does_not_reach_the_shadow(opened: Opened, path: Path) -> None:
    before = path.read_bytes()
    for _, tensor in opened(LAYOUT).all():
        tensor.fill_(7)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "tensors",
    [
        [Tensor("a", "F32", (2, 3)), Tensor("b", "BF16", (4,))],
        [Tensor("a", "F32", (3, 2)), Tensor("b", "BF16", (4,)), Tensor("none", "F16", (0, 5))],
        [Tensor("a", "F32", (2, 3)), Tensor("b", "F16", (4,)), Tensor("none", "F16", (0, 5))],
        [Tensor("a", "F32", (2, 3)), Tensor("c", "BF16", (4,)), Tensor("none", "F16", (0, 5))],
    ],
    ids=["fewer", "shape", "dtype", "name"],
)
def test_a_state_of_another_layout_is_refused(opened: Opened, tensors: list[Tensor]) -> None:
    with pytest.raises(IntegrityError, match="not those of the layout"):
        opened(Layout(tensors))


def test_a_file_over_the_size_limit_is_refused(opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_STATE_BYTES", path.stat().st_size)
    opened(LAYOUT)
    monkeypatch.setattr(limits, "MAX_STATE_BYTES", path.stat().st_size - 1)
    with pytest.raises(IntegrityError, match="over the limit"):
        opened(LAYOUT)


def test_a_dtype_that_torch_does_not_have_is_refused(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = opened(LAYOUT)
    monkeypatch.setattr(shadow_reader, "TORCH_DTYPES", {})
    with pytest.raises(IntegrityError, match="tensor 'a': torch has no dtype F32"):
        next(reader.all())

"""Deltas of checkpoints from several trainers: optimisers other than Adam, dtypes other than bf16, quantised weights
with scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from p2pcast import offline
from p2pcast.checkpoint import Checkpoint

Make = Callable[..., Path]
Tensors = dict[str, torch.Tensor]
NAMES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64",
    torch.int32: "I32", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


class Lion(torch.optim.Optimizer):
    """Steps are the sign of a mean: every weight moves by the same amount."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.add_(mean.mul(0.9).add(p.grad, alpha=0.1).sign_(), alpha=-group["lr"])
                mean.mul_(0.99).add_(p.grad, alpha=0.01)


OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, 1e-2),
    "momentum": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-6),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-5),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-4),
    "muon": lambda p: torch.optim.Muon(p, 1e-4),
    "lion": lambda p: Lion(p, 1e-6),
}


def trained(optimiser: str, steps: int) -> Iterator[Tensors]:
    """Masters in float32, before and after each step. Some rows of the embedding get no gradient."""
    torch.manual_seed(3)
    masters = {
        "embed": torch.randn(64, 48) * 0.02,
        "up": torch.randn(80, 48) * 0.05,
        "down": torch.randn(48, 80) * 0.05,
    }
    parameters = [tensor.requires_grad_() for tensor in masters.values()]
    takes = OPTIMISERS[optimiser](parameters)
    for _ in range(steps + 1):
        yield {name: tensor.detach().clone() for name, tensor in masters.items()}
        rows = torch.randint(0, 40, (16,))
        hidden = masters["embed"][rows]
        loss = (hidden + torch.relu(hidden @ masters["up"].T) @ masters["down"].T).pow(2).mean()
        takes.zero_grad()
        loss.backward()
        takes.step()


def quantised(masters: Tensors, dtype: torch.dtype, scale_dtype: torch.dtype) -> Tensors:
    """Blocks of 16 × 16, each with its scale; when a block's largest weight moves, all its values change."""
    out: Tensors = {}
    for name, tensor in masters.items():
        blocks = tensor.unfold(0, 16, 16).unfold(1, 16, 16)
        scale = blocks.abs().amax((-1, -2)) / torch.finfo(dtype).max
        if scale_dtype is torch.float8_e8m0fnu:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        whole = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)
        out |= {name: (tensor / whole).to(dtype), f"{name}_scale_inv": scale.to(scale_dtype)}
    return out


def saved(make: Make, folder: Path, tensors: Tensors) -> dict[str, bytes]:
    contents = {name: bytes(t.contiguous().reshape(-1).view(torch.uint8).tolist()) for name, t in tensors.items()}
    make(folder, {name: (NAMES[t.dtype], list(t.shape), contents[name]) for name, t in tensors.items()})
    return contents


def check(make: Make, top: Path, states: list[Tensors], codecs: Sequence[str] = ("flat", "context")) -> None:
    """Apply each delta in each codec; then the whole path by a squash."""
    contents = [saved(make, top / f"step_{k}", state) for k, state in enumerate(states)]
    for codec in codecs:
        for k in range(1, len(states)):
            delta, out = top / f"{codec}-{k}.p2pd", top / f"{codec}-{k}"
            offline.diff(top / f"step_{k - 1}", top / f"step_{k}", delta, codec=codec, cell_words=1500)
            offline.apply_file(top / f"step_{k - 1}", delta, out)
            assert read(out) == contents[k]
            assert offline.verify_folder(out, delta).faults == []
    whole = top / "whole.p2pd"
    offline.squash_files([top / f"flat-{k}.p2pd" for k in range(1, len(states))], whole)
    offline.apply_file(top / "step_0", whole, top / "squashed")
    assert read(top / "squashed") == contents[-1]


def read(folder: Path) -> dict[str, bytes]:
    files = Checkpoint.open(folder).files
    return {t.name: file.words(1, at, t.nbytes).tobytes() for file in files for t, at in file.header.tensors}


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_delta_chain_of_every_optimiser(make_checkpoint: Make, tmp_path: Path, optimiser: str) -> None:
    states = [
        {name: tensor.to(torch.bfloat16) for name, tensor in masters.items()} for masters in trained(optimiser, 2)
    ]
    assert any((states[0][name] != states[-1][name]).any() for name in states[0])
    check(make_checkpoint, tmp_path, states)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_delta_chain_of_other_dtypes(make_checkpoint: Make, tmp_path: Path, dtype: torch.dtype) -> None:
    check(
        make_checkpoint, tmp_path, [{n: t.to(dtype) for n, t in masters.items()} for masters in trained("momentum", 2)]
    )


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.float8_e5m2, torch.float16),
        (torch.float8_e4m3fn, torch.float8_e8m0fnu),
    ],
)
def test_delta_chain_of_fp8_with_scales(
    make_checkpoint: Make, tmp_path: Path, dtype: torch.dtype, scales: torch.dtype
) -> None:
    check(make_checkpoint, tmp_path, [quantised(masters, dtype, scales) for masters in trained("lion", 2)])


def test_delta_chain_of_mixed_dtypes(make_checkpoint: Make, tmp_path: Path) -> None:
    """Norms in float32, a router in float64, counters, a mask, a scalar and an empty tensor beside bf16; one tensor
    becomes NaN.
    """
    states: list[Tensors] = []
    for step, masters in enumerate(trained("adamw", 2)):
        state = {name: tensor.to(torch.bfloat16) for name, tensor in masters.items()}
        state |= {
            "norm": masters["up"][0].clone(),
            "router": masters["up"].double()[:8],
            "half": masters["down"].half(),
        }
        state |= {
            "seen": torch.tensor([step, -step, 1 << 30], dtype=torch.int32),
            "mask": torch.arange(9, dtype=torch.uint8) % (step + 1),
        }
        state |= {"scalar": torch.tensor(0.5 - step), "empty": torch.zeros(0, 4)}
        if step == 2:
            state["norm"].fill_(float("nan"))
        states.append(state)
    check(make_checkpoint, tmp_path, states, ("auto", "flat", "dense", "raw", "context"))

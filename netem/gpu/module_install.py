"""``python -m netem.gpu.module_install``: versions into a torch model on a device, without an engine.

The model has a transformer's matrices; its loader fuses query, key and value, and gate and up, as vLLM's loaders do.
Versions are installed by the code that runs in engines (``rollout_node.in_engine``). On a GPU a CUDA graph of the
model's forward pass is captured before the first version.

Promise: after every version all weights equal, bit for bit, those of a model that was loaded from the shadow. The
graph's output equals that model's. Otherwise IntegrityError.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from netem.bench.measuring import device_clock, device_name, quantile, torch_device
from p2pcast.codec.cell import Patch
from p2pcast.codec.digest import MASK, digest, word_dtype
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version
from p2pcast.state.patch_file import PatchWriter
from p2pcast.state.shadow import Shadow
from rollout_node.in_engine.install_frames import Descriptors
from rollout_node.in_engine.installation import Installation
from rollout_node.in_engine.shadow_reader import ShadowReader

SHARE = 0.012
"""Share of the words that one version changes."""
ROWS = 4
"""Rows of the forward pass's input."""
FUSED = {"q": ("qkv", 0), "k": ("qkv", 1), "v": ("qkv", 2), "gate": ("gate_up", 0), "up": ("gate_up", 1)}
"""Tensor of the checkpoint → parameter of the model, and its place in it in units of the hidden size."""


class Blocks(torch.nn.Module):  # type: ignore[misc]
    """``layers`` blocks of bf16 matrices. Hidden size and intermediate size are ``hidden``."""

    def __init__(self, layers: int, hidden: int, device: torch.device) -> None:
        super().__init__()
        self.hidden = hidden

        def matrix(rows: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(
                torch.zeros(rows, hidden, dtype=torch.bfloat16, device=device), requires_grad=False
            )

        self.blocks = torch.nn.ModuleList()
        for _ in range(layers):
            block = torch.nn.Module()
            for name, parts in (("qkv", 3), ("o", 1), ("gate_up", 2), ("down", 1)):
                block.register_parameter(name, matrix(parts * hidden))
            self.blocks.append(block)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors of the checkpoint, each into its part of a parameter."""
        for name, tensor in weights:
            number, short = name.removeprefix("blocks.").split(".")
            parameter, place = FUSED.get(short, (short, 0))
            target = self.blocks[int(number)].get_parameter(parameter)
            target.data.narrow(0, place * self.hidden, self.hidden).copy_(tensor)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, hidden]. Every parameter counts."""
        for block in self.blocks:
            query, key, value = (rows @ block.get_parameter("qkv").t()).chunk(3, dim=-1)
            rows = rows + (query * key + value) @ block.get_parameter("o").t()
            gate, up = (rows @ block.get_parameter("gate_up").t()).chunk(2, dim=-1)
            rows = rows + (torch.sigmoid(gate) * up) @ block.get_parameter("down").t()
            rows = rows / (1 + rows.abs().amax(dim=-1, keepdim=True))
        return rows


def layout_of(layers: int, hidden: int) -> Layout:
    names = (*FUSED, "o", "down")
    return Layout([Tensor(f"blocks.{n}.{name}", "BF16", (hidden, hidden)) for n in range(layers) for name in names])


class Versions:
    """A run's versions on disk, as a peer stores them: the shadow, and a patch for each version."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.layout, self.version = layout, Version(0, 0)
        self.shadow = Shadow.create(folder, layout)
        generator = np.random.default_rng(0)

        def words(cell: Any) -> Any:
            drawn = generator.standard_normal(cell.words, dtype=np.float32) * np.float32(0.02)
            return (drawn.view(np.uint32) >> 16).astype(word_dtype(cell.word_bytes))

        self.shadow.fill(self.version, words)

    def step(self) -> Version:
        """Make the next version: SHARE of each cell's words move by one or two steps."""
        base, self.version = self.version, Version(0, self.version.step + 1)
        generator = np.random.default_rng(self.version.step)
        path = self.shadow.patch_path(self.version)
        writer = PatchWriter(path, self.layout, base, self.version)
        state = self.shadow.state_digest
        for cell in self.layout.cells:
            old = self.shadow.words(cell).copy()
            positions = np.flatnonzero(generator.random(cell.words, dtype=np.float32) < SHARE).astype(np.uint32)
            new = old.copy()
            new[positions] ^= generator.integers(1, 4, positions.size).astype(new.dtype)
            before, after = digest(old, cell), digest(new, cell)
            writer.add(Patch(cell.index, positions, new[positions], before, after, positions.size))
            state = (state + after - before) & MASK
        writer.finish(state)
        self.shadow.apply(path)
        return self.version

    def adapter_configs(self, version: Version) -> dict[str, bytes]:
        return {}

    def patches(self, base: Version | None, to: Version) -> Descriptors:
        """Files as a peer passes them to an engine: the patch from the version before, or the shadow."""
        path = self.shadow.path if base is None else self.shadow.patch_path(to)
        return Descriptors([os.open(path, os.O_RDONLY)], base is None)


def bench_module_install(
    folder: Path, state_bytes: int, versions: int, *, hidden: int = 4096, device: str | None = None
) -> dict[str, Any]:
    """Install ``versions`` versions of about ``state_bytes`` of bf16 on ``device`` (None: the GPU, if there is one).
    Needs the state twice on the device, and once in ``folder``. Raises IntegrityError.
    """
    where = torch_device(device)
    layers = max(1, state_bytes // (14 * hidden * hidden))
    layout = layout_of(layers, hidden)
    run = Versions(folder, layout)
    try:
        live = Blocks(layers, hidden, where)
        forward, graph = _forward(live, where)
        installation = Installation(live, layout)
        prepare_s, pause_s, values, now = [], [], [], device_clock(where)
        for number in range(versions + 1):
            begun = now()
            found = installation.prepare(run, run.version, lambda: False)
            staged = now()
            installation.commit(run.version)
            committed = now()
            installation.finish()
            _check(run, live, forward, where)
            if number and found is not None:
                prepare_s.append(staged - begun)
                pause_s.append(committed - staged)
                values.append(found["values"])
            if number < versions:
                run.step()
    finally:
        run.shadow.close()
    return {
        "device": device_name(where),
        "state_bytes": layout.nbytes,
        "versions": versions,
        "values": int(np.median(values)),
        "cuda_graph": graph,
        "prepare_p50_s": quantile(prepare_s, 0.5),
        "prepare_p99_s": quantile(prepare_s, 0.99),
        "pause_p50_s": quantile(pause_s, 0.5),
        "pause_p99_s": quantile(pause_s, 0.99),
    }


def _forward(model: Blocks, device: torch.device) -> tuple[Callable[[], torch.Tensor], bool]:
    """The model's forward pass on a fixed input, and whether it is a CUDA graph."""
    rows = _input(model, device)
    if device.type != "cuda":
        return lambda: model(rows), False
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.inference_mode(), torch.cuda.stream(side):
        model(rows)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        output = model(rows)

    def replay() -> torch.Tensor:
        graph.replay()
        return output

    return replay, True


def _input(model: Blocks, device: torch.device) -> torch.Tensor:
    drawn = torch.randn(ROWS, model.hidden, generator=torch.Generator().manual_seed(0))
    return drawn.to(torch.bfloat16).to(device)


def _check(run: Versions, live: Blocks, forward: Callable[[], torch.Tensor], device: torch.device) -> None:
    """Compare the live model with one that is loaded from the shadow."""
    fresh = Blocks(len(live.blocks), live.hidden, device)
    with run.patches(None, run.version) as files:
        fresh.load_weights(ShadowReader(files.fds[0], run.layout).all())
    for (name, expected), (_, found) in zip(fresh.named_parameters(), live.named_parameters(), strict=True):
        if not torch.equal(expected.view(torch.int16), found.view(torch.int16)):
            raise IntegrityError(f"{run.version}: parameter {name} is not that of a freshly loaded model")
    with torch.inference_mode():
        if not torch.equal(fresh(_input(live, device)), forward()):
            raise IntegrityError(f"{run.version}: the forward pass computes with weights of another version")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--mib", type=click.IntRange(1), default=256, help="Size of the bf16 state in MiB, about.")
@click.option("--versions", type=click.IntRange(1), default=20, help="Number of versions after the first.")
@click.option("--hidden", type=click.IntRange(64), default=4096, help="Hidden size of the model.")
@click.option("--device", help="torch device, such as cuda:1 or cpu.  [default: the GPU if any, otherwise the CPU]")
def main(mib: int, versions: int, hidden: int, device: str | None) -> None:
    """Install versions into a torch model, and print the pauses as JSON."""
    with tempfile.TemporaryDirectory(prefix="p2pcast-gpu-", dir="/dev/shm") as folder:
        print(
            json.dumps(bench_module_install(Path(folder), mib << 20, versions, hidden=hidden, device=device)),
            flush=True,
        )


if __name__ == "__main__":
    main()

"""A rank of a toy engine behind a real install socket, in a run that gains an adapter beside its model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stored_run import Run

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import LocalError
from p2pcast.ground.version import Version
from rollout_node.in_engine.adapter_weights import AdapterWeights
from rollout_node.in_engine.install_frames import ALIVE
from rollout_node.in_engine.rank_installer import Command, Introduction, RankInstaller
from rollout_node.in_engine.tensor_accounts import Account, together
from rollout_node.installers.install_socket import InstallSocket
from tests.support.until import until

MODEL = [Tensor("layer.weight", "BF16", (6, 6))]
PHI = [Tensor("phi/layer.lora_A.weight", "F32", (2, 6)), Tensor("phi/layer.lora_B.weight", "F32", (6, 2))]
VERSION = Version(0, 0)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Parameter(torch.zeros(6, 6).bfloat16(), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            {"layer.weight": self.layer}[name].data.copy_(tensor)


class Nothing:
    """``Followers`` without copies."""

    def settings(self, source: Any, version: Any) -> None: ...

    def follow(self, settings: None) -> None: ...

    def differing(self) -> list[int]:
        return []


class ToyRank:
    device, rank, ranks, use_schedule, settings = torch.device("cpu"), 0, 1, None, None

    def __init__(self, *, takes_adapters: bool, derived: bool = False) -> None:
        self.model, self.takes_adapters, self._derived = Layer(), takes_adapters, derived
        self.weights: AdapterWeights | None = None

    def loading(self) -> Any:
        return nullcontext()

    def loading_form(self) -> Any:
        return nullcontext()

    def derived_parts(self) -> list[str]:
        return ["layer: packed"] if self._derived else []

    def followers(self, weights: AdapterWeights) -> Nothing:
        self.weights = weights
        return Nothing()

    def reload_all(self, shadow: Any) -> None:
        raise LocalError("the toy is never loaded as a whole")


class Provider:
    """The peer's files: of the present run."""

    def __init__(self) -> None:
        self.run: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.run, name)


@pytest.fixture
async def peer(tmp_path: Path) -> AsyncIterator[tuple[Path, Provider]]:
    provider = Provider()
    socket = InstallSocket(tmp_path / "install.sock", provider)  # type: ignore[arg-type]
    await socket.start()
    yield socket.path, provider
    await socket.close()


def stored(folder: Path, tensors: list[Tensor]) -> Run:
    layout = Layout(tensors)
    run = Run(folder, layout, np.random.default_rng(len(tensors)).integers(1, 60, layout.nbytes, np.uint8))
    run.small = {"phi/adapter_config.json": b"{}"}
    return run


def newest(run: Run) -> dict[str, Any]:
    """The newest report but for signs of life."""
    return [report for report in run.reports if report["phase"] != ALIVE][-1]


async def installed(installer: RankInstaller, run: Run) -> tuple[dict[str, Any], str]:
    """The rank's introduction, and the kind of the install that followed."""
    await asyncio.to_thread(installer.introduce, Introduction("e", "run"))
    first = newest(run)
    await asyncio.to_thread(installer.obey, Command("prepare", str(VERSION), "n"))
    await until(lambda: newest(run)["phase"] == "prepare")
    assert newest(run)["error"] is None
    report = await asyncio.to_thread(installer.commit_here, str(VERSION), "n")
    assert report is not None
    assert (report["held"], report["mark"]) == (str(VERSION), newest(run)["mark"])
    return first, newest(run)["install"]


def words(tensor: torch.Tensor) -> list[int]:
    found: list[int] = tensor.contiguous().view(torch.uint8).flatten().tolist()
    return found


def state(run: Run, name: str) -> list[int]:
    cells = [c for c in run.layout.cells if run.layout.tensors[c.tensor].name == name]
    return [byte for cell in cells for byte in run.shadow.words(cell).tobytes()]


@pytest.mark.parametrize("takes_adapters", [True, False])
async def test_a_run_may_gain_an_adapter(peer: Any, tmp_path: Path, takes_adapters: bool) -> None:
    """The rank holds no version of the new layout until a dense install. An engine without LoRA names what it lacks."""
    path, provider = peer
    rank = ToyRank(takes_adapters=takes_adapters)
    installer = RankInstaller(rank, path, logging.getLogger("test"))
    provider.run = run = stored(tmp_path / "model", MODEL)
    first, kind = await installed(installer, run)
    assert (first["held"], first["lacks"], first["doubtful"], kind) == (None, [], False, "dense")
    assert installer.serves == str(VERSION)
    provider.run = run = stored(tmp_path / "both", MODEL + PHI)
    await asyncio.to_thread(installer.introduce, Introduction("e", "run"))
    assert (installer.held, installer.serves) == (None, str(VERSION))  # which its answers still come from
    first, kind = await installed(installer, run)
    assert (first["held"], first["lacks"], kind) == (None, [] if takes_adapters else ["phi"], "dense")
    assert first["before"] == str(VERSION)
    assert set(together([first["accounts"]], 1 + len(PHI))) == {Account.COVERED} | (
        set() if takes_adapters else {Account.SKIPPED}
    )
    assert words(rank.model.layer.data) == state(run, "layer.weight")
    held = {} if rank.weights is None else {n: words(rank.weights.numbered[k]) for k, n in rank.weights.names.items()}
    assert held == ({t.name: state(run, t.name) for t in PHI} if takes_adapters else {})


async def test_no_adapter_goes_beside_a_model_loaded_as_a_whole(peer: Any, tmp_path: Path) -> None:
    path, provider = peer
    provider.run = run = stored(tmp_path / "both", MODEL + PHI)
    rank = ToyRank(takes_adapters=True, derived=True)
    await asyncio.to_thread(RankInstaller(rank, path, logging.getLogger("test")).introduce, Introduction("e", "run"))
    assert "layer: packed" in newest(run)["error"]

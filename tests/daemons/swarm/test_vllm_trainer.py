"""The trainer's engine for vLLM 0.33, against its published interface: vLLM's CPU build ends at 0.32. Hub and peers are
real.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import pytest
import torch

from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version
from tests.daemons.conftest import Swarm, read

T = TypeVar("T")
INTERFACE = "vllm.distributed.weight_transfer"


@dataclass
class TrainerInitInfo:
    """As published: the rank, and the backend by class."""

    backend: ClassVar[str]
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class TrainerWeightTransferEngine(ABC, Generic[T]):
    """As published: its abstract methods, and their arguments."""

    def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True) -> None:
        self.client, self.source, self.is_sender = client, source, is_sender

    @classmethod
    @abstractmethod
    def trainer_init(cls, init_info: T, *, client: Any, source: Any = None) -> Any: ...

    @abstractmethod
    def send_weights(self) -> None: ...

    def shutdown(self) -> None: ...


class Factory:
    _registry: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register_engine(cls, name: str, module: str, class_name: str) -> None:
        assert name not in cls._registry
        cls._registry[name] = lambda: getattr(importlib.import_module(module), class_name)

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        return cls._registry[init_info.backend]().trainer_init(init_info, client=client, source=source)


class NoClient:
    """Fails if the engine calls it."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the engine asks vLLM's client for {name}")


class Source:
    """Counts its whole iterations, which are collective."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors, self.iterated = tensors, 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()
        self.iterated += 1


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm.distributed", INTERFACE, f"{INTERFACE}.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[INTERFACE], "WeightTransferTrainerFactory", Factory, raising=False)
    base = sys.modules[f"{INTERFACE}.base"]
    monkeypatch.setattr(base, "TrainerInitInfo", TrainerInitInfo, raising=False)
    monkeypatch.setattr(base, "TrainerWeightTransferEngine", TrainerWeightTransferEngine, raising=False)
    monkeypatch.setattr(Factory, "_registry", {})
    monkeypatch.delitem(sys.modules, "trainer_node.frameworks.vllm_trainer", raising=False)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().astype(np.uint8))


async def test_weights_of_a_source_are_live_when_a_send_returns(swarm: Swarm, interface: None) -> None:
    from trainer_node.frameworks import vllm

    vllm.register()
    vllm.register()
    await swarm.hub_up(checkpoints=None)
    await swarm.peers_up("a", "b")
    draw = torch.Generator().manual_seed(5)
    source = Source({f"w{n}": torch.randn(7, n + 1, generator=draw).to(torch.bfloat16) for n in range(4)})
    hub = "{}:{}".format(*swarm.address)

    def begun(rank: int) -> Any:
        info = vllm.init_info(rank=rank, hub=hub, token_file=str(swarm.folder / "token"))
        return Factory.trainer_init(info, client=NoClient(), source=source)

    engine, other = await asyncio.to_thread(begun, 0), await asyncio.to_thread(begun, 1)
    assert (engine.is_sender, other.is_sender) == (True, False)
    for step in (1, 2, 3):
        await asyncio.to_thread(engine.send_weights)
        other.send_weights()
        for name, peer in swarm.peers.items():
            assert peer.committed == Version(0, step)
            found = read(swarm.out(name) / f"step_{step}")
            assert {n: contents for n, (_, _, contents) in found.items()} == {
                n: bits(tensor) for n, tensor in source.tensors.items()
            }
        source.tensors["w1"][step, 0] += 1
    assert source.iterated == 6
    await asyncio.to_thread(engine.shutdown)
    other.shutdown()


async def test_an_engine_without_a_source_is_refused(interface: None) -> None:
    from trainer_node.frameworks import vllm

    vllm.register()
    with pytest.raises(UsageError, match="give trainer_init a source"):
        Factory.trainer_init(vllm.init_info(rank=0, hub="127.0.0.1:1"), client=NoClient())

"""An engine's LoRA adapters: their matrices exactly as published, and the engine's copies that follow them.

An engine casts, scales and packs an adapter's matrices when it loads them, and keeps them in several places. So a rank
keeps the published matrices in host memory. They are staged, written, proved, audited and rolled back like a model's
weights, and the engine's copies follow them in the same commit. This takes one copy of each adapter in host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Protocol

import torch

from p2pcast.checkpoint.adapter_form import adapter_of
from p2pcast.codec.layout import Layout
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version
from rollout_node.in_engine.loader_recording import TORCH_DTYPES


class AdapterConfigs(Protocol):
    """The source of the adapters' configurations, which is the peer."""

    def adapter_configs(self, version: Version) -> dict[str, bytes]:
        """Path → contents of each ``adapter_config.json``."""


class Followers(Protocol):
    """The copies of the weights from which an engine computes. Every method except ``settings`` runs between two steps
    of the engine.
    """

    def settings(self, source: AdapterConfigs, version: Version) -> Any:
        """Return everything besides its tensors on which the copies of ``version`` depend. Raises P2PCastError for a
        version that the engine cannot load.
        """

    def follow(self, settings: Any) -> None:
        """Update all copies to the weights, and read them back. Raises IntegrityError if one differs."""

    def differing(self) -> list[int]:
        """Numbers of the tensors with a copy that differs from the weights."""


Tensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class AdapterWeights(torch.nn.Module):  # type: ignore[misc]
    """The published matrices of ``adapters``, as a model with a loader; all zero before the first version. Raises
    IntegrityError for a tensor whose dtype torch does not have.
    """

    def __init__(self, layout: Layout, adapters: Collection[str]) -> None:
        super().__init__()
        self.adapters = tuple(adapters)
        self.names: dict[int, str] = {}
        """Number in the layout → name of the matrix."""
        self.numbered: dict[int, torch.Tensor] = {}
        self._by_name: dict[str, torch.Tensor] = {}
        for number, tensor in enumerate(layout.tensors):
            if adapter_of(tensor.name) not in self.adapters:
                continue
            dtype = TORCH_DTYPES.get(tensor.dtype)
            if dtype is None or not dtype.is_floating_point:
                raise IntegrityError(f"{tensor.name}: an adapter of dtype {tensor.dtype} cannot be installed")
            matrix = torch.zeros(tensor.shape, dtype=dtype)
            self.register_buffer(f"matrix_{number}", matrix)
            self.names[number] = tensor.name
            self.numbered[number] = self._by_name[tensor.name] = matrix

    def load_weights(self, tensors: Tensors) -> None:
        for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
            self._by_name[name].copy_(tensor)


class ModelBesideAdapters(torch.nn.Module):  # type: ignore[misc]
    """An engine's model together with the run's ``adapters``: one loader for both, so one commit writes both.
    ``weights``: None if the engine takes no adapters, in which case their tensors are left out.
    """

    def __init__(self, model: torch.nn.Module, adapters: Collection[str], weights: AdapterWeights | None) -> None:
        super().__init__()
        self.model, self.weights = model, weights
        self._adapters = frozenset(adapters)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Pass the model's tensors to its own loader as they come, and do not call it if there are none."""
        others = self._load_adapters(tensors)
        if (first := next(others, None)) is not None:
            self.model.load_weights(chain([first], others))

    def _load_adapters(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            if adapter_of(name) not in self._adapters:
                yield name, tensor
            elif self.weights is not None:
                self.weights.load_weights([(name, tensor)])

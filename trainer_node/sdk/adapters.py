"""The LoRA adapters that a Publisher takes from a training process's tensors, by themselves or next to the model.

Guarantees: a matrix of a chosen adapter gets the name that PEFT gives it in a file. Matrices of other adapters are left
out. So are the model's tensors, unless the adapters are ``beside`` the model: then its tensors get the names of its own
folder. An adapter whose configuration also trains other tensors is refused, so that none is left out silently.
PEFT itself is not imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from p2pcast.checkpoint.adapter_form import (
    CONFIG,
    PEFT_MODEL,
    adapters_of,
    checked_name,
    is_adapter_tensor,
    split_name,
    state_name,
)
from p2pcast.checkpoint.wrapped_names import without_adapter_layers
from p2pcast.ground.errors import UsageError
from trainer_node.sdk.tensors import ExpectedTensors, LiveTensor

_IN_A_MODEL = re.compile(r"(.+\.)?(lora_[AB]|lora_embedding_[AB])\.([^.]+)(\.weight)?")
"""The name of a matrix in PEFT's model, with the adapter's name after ``lora_A``."""
_SIDE = re.compile(r"(?<=lora_)([AB])(?=\.weight$)|(?<=lora_embedding_)([AB])$")


class Adapters:
    """``chosen``: a PEFT model, or a mapping from each adapter's name to its configuration: a mapping as in
    ``adapter_config.json``, or PEFT's object. ``beside``: whether the model is published too. Raises UsageError.
    """

    def __init__(self, chosen: Any, *, beside: bool = False) -> None:
        configs = getattr(chosen, "peft_config", chosen)
        if not isinstance(configs, Mapping) or not configs:
            raise UsageError(
                f"{'with_adapter' if beside else 'adapter'}={type(chosen).__name__}: give a PEFT model, or a mapping"
                " from the name of each adapter to its configuration"
            )
        self._beside = beside
        self._configs = {checked_name(str(name)): _checked(str(name), config) for name, config in configs.items()}
        self._prefixes = {name: name for name in self._configs}

    @property
    def beside(self) -> frozenset[str]:
        """Names of the adapters that are published next to a model; none if only adapters are published."""
        return frozenset(self._configs) if self._beside else frozenset()

    @property
    def files(self) -> dict[str, bytes]:
        """The adapters' configuration files, by their path in the version."""
        return {
            state_name(self._prefixes[name], CONFIG): json.dumps(config, indent=2, sort_keys=True).encode()
            for name, config in self._configs.items()
        }

    def continue_with(self, known: Sequence[ExpectedTensors]) -> None:
        """Check the adapters against ``known``, the tables that the tensors have to match. If the first table has no
        prefixes, as in a folder of a single adapter, and one adapter is chosen, its prefix is left out too. Raises
        UsageError for an adapter whose rank differs from a table's.
        """
        if known and adapters_of(list(known[0].tensors)) == ("",) and len(self._prefixes) == 1:
            self._prefixes = dict.fromkeys(self._prefixes, "")
        for table in known:
            self._check_ranks(table)

    def _check_ranks(self, table: ExpectedTensors) -> None:
        chosen = {self._prefixes[adapter]: (adapter, config) for adapter, config in self._configs.items()}
        for name, tensor in table.tensors.items():
            if name.endswith("lora_A.weight") and (found := chosen.get(split_name(name)[0])) is not None:
                adapter, config = found
                if not config.get("rank_pattern") and tensor.shape[0] != config["r"]:
                    raise UsageError(
                        f"adapter {adapter} has rank {config['r']} here and {tensor.shape[0]} in {table.where}, and"
                        f" ranks stay the same in a run: set rank {tensor.shape[0]}, or begin a new run, with a new"
                        " state folder of the hub"
                    )

    def select(self, live: Iterable[LiveTensor]) -> Iterator[LiveTensor]:
        """Yield the chosen adapters' matrices, and the model's tensors if it is published too. Raises UsageError for an
        adapter without matrices, a matrix without its pair, or a rank that differs from the configuration's.
        """
        found: dict[str, set[str]] = {adapter: set() for adapter in self._configs}
        for one in live:
            adapter, name = self._place(one.name)
            if adapter in self._configs:
                found[adapter].add(name)
                self._check_rank(adapter, name, one)
                yield LiveTensor(state_name(self._prefixes[adapter], name), one.tensor)
            elif self._beside and adapter is None:
                yield LiveTensor(self._model_name(name), one.tensor)
            # The iterator may need this memory for its next tensor.
            del one
        self._check_complete(found)

    def _check_complete(self, found: Mapping[str, Collection[str]]) -> None:
        if missing := sorted(adapter for adapter, names in found.items() if not names):
            raise UsageError(
                f"no tensor belongs to adapter {', '.join(missing)}: its matrices are named "
                "….lora_A.ADAPTER.weight in a PEFT model, or ADAPTER/….lora_A.weight"
            )
        for adapter, names in found.items():
            for name in sorted(names):
                other = _SIDE.sub(lambda side: "B" if side[0] == "A" else "A", name)
                if other not in names:
                    raise UsageError(f"adapter {adapter} has {name} without its other matrix, {other}")

    def _model_name(self, name: str) -> str:
        """The name of a model's tensor in the model's own folder. Raises UsageError if it begins with an adapter's."""
        if (adapter := split_name(name)[0]) in self._configs:
            raise UsageError(f"{name} begins with the name of adapter {adapter} and is no matrix of it: rename one")
        return without_adapter_layers(name.removeprefix(PEFT_MODEL))

    def _place(self, name: str) -> tuple[str | None, str]:
        """Return the adapter and the tensor's name in the adapter's file. The adapter is None for a model's tensor."""
        adapter, rest = split_name(name)
        if is_adapter_tensor(rest):
            return adapter or (next(iter(self._configs)) if len(self._configs) == 1 else ""), rest
        found = _IN_A_MODEL.fullmatch(name)
        if found is None:
            return None, name
        before, kind, adapter, weight = found.groups()
        return adapter, f"{before or ''}{kind}{weight or ''}"

    def _check_rank(self, adapter: str, name: str, one: LiveTensor) -> None:
        config = self._configs[adapter]
        if config.get("rank_pattern") or not name.endswith(".weight"):
            return
        rank = one.shape[:1] if name.endswith("lora_A.weight") else one.shape[1:]
        if len(one.shape) != 2 or rank != (config["r"],):
            raise UsageError(
                f"{one.name}: {list(one.shape)} here, but the configuration of adapter {adapter} says r={config['r']}"
            )


def _checked(name: str, config: Any) -> dict[str, Any]:
    """Return the configuration with values that JSON can hold. Raises UsageError."""
    table = config.to_dict() if hasattr(config, "to_dict") else config
    where = f"adapter {name}"
    if not isinstance(table, Mapping):
        raise UsageError(f"{where}: {type(config).__name__} is no configuration; give a mapping as in {CONFIG}")
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(table), default=_plain, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where}: its configuration cannot be written as JSON: {error}") from None
    rank, alpha = found.get("r"), found.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise UsageError(f"{where}: its configuration needs r, a positive integer, and lora_alpha, a number")
    besides = {
        "use_dora": "DoRA's magnitudes",
        "lora_bias": "biases",
        "modules_to_save": "whole modules",
        "trainable_token_indices": "rows of the embedding",
    }
    kinds = [kind for key, kind in besides.items() if found.get(key)]
    if found.get("bias", "none") != "none":
        kinds.append("biases of the base model")
    if kinds:
        raise UsageError(
            f"{where}: its configuration trains {', '.join(kinds)} besides LoRA's matrices, which an adapter's run does"
            " not carry: publish the whole model instead"
        )
    return {"peft_type": "LORA", **found}


def _plain(value: Any) -> Any:
    """Convert a value for JSON: PEFT keeps module names in sets, and kinds in enumerations."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(getattr(value, "value", value))

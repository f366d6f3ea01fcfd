"""One rank's weights: which version they are, what is staged for them, and how to go there and back.

Promise: ``held`` names a version only while the weights are exactly that version; it is None before the first install,
while a dense install runs, and after anything went wrong that couldn't be undone. No vLLM in here beyond what ``dense``
imports when it reloads a model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from p2pcast.codec.layout import Layout
from p2pcast.errors import IntegrityError, LocalError
from p2pcast.state.patch_file import PatchFile
from p2pcast.version import Version
from rollout_node.install_frames import Descriptors
from rollout_node.vllm_plugin.dense import install_dense, reload_all
from rollout_node.vllm_plugin.mapping import Mapping
from rollout_node.vllm_plugin.recording import Storages, record
from rollout_node.vllm_plugin.shadow_reader import ShadowReader
from rollout_node.vllm_plugin.staging import Staged, stage


class Source(Protocol):
    """Where patches come from: the peer."""

    def patches(self, base: Version | None, to: Version) -> Descriptors: ...


@dataclass(slots=True)
class _Next:
    """A prepared version. ``shadow``: a dense install, read at commit; ``whole``: tensors for the model's loader."""

    version: Version
    base: Version | None
    shadow: ShadowReader | None = None
    staged: Staged = field(default_factory=Staged)
    whole: list[tuple[str, torch.Tensor]] = field(default_factory=list)


class Installation:
    """``derived``: parts of the model that don't compute from the loaded weights; if any, the model is always reloaded whole."""

    def __init__(self, model: torch.nn.Module, model_config: Any, layout: Layout, derived: list[str]) -> None:
        self._model: Any = model
        self._model_config = model_config
        self.layout = layout
        self.derived = derived
        self.held: Version | None = None
        self._next: _Next | None = None
        self._committed: _Next | None = None
        self.mapping: Mapping = Mapping({}, {})
        self.storages = Storages(model)
        self._record()

    def _record(self) -> None:
        if self.derived:
            self.mapping = Mapping({}, dict.fromkeys(range(len(self.layout.tensors)), self.derived[0]))
            return
        self.mapping, self.storages, unreached = record(self._model, self.layout)
        if unreached:
            raise IntegrityError(
                f"no tensor of the run's layout reaches {len(unreached)} of the engine's parameters, {unreached[0]} first; "
                "does the engine serve the model that is trained?"
            )

    def require_layout(self, layout: Layout) -> None:
        """Raises IntegrityError when the run's layout isn't the one that was mapped."""
        if layout != self.layout:
            lines = self.layout.difference(layout) or ["its cells are cut differently"]
            raise IntegrityError(f"the run's layout changed under this engine ({lines[0]}); restart the engine")

    def check_storages(self) -> None:
        """If somebody rebound parameters, learn the mapping anew and forget the version: who knows what they hold."""
        if self.storages.gone(self._model):
            self.held = self._committed = None
            self._record()

    def prepare(self, source: Source, version: Version, cancelled: Callable[[], bool]) -> dict[str, Any] | None:
        """Stage ``version``. Returns metrics, None when cancelled; raises P2PCastError. Writes no weight.

        ``install`` says what commit will do: ``sparse`` any time later; ``dense`` only while the shadow is held still.
        """
        self.finish()
        self._next = None
        if self.held == version:
            self._next = _Next(version, version)
            return {"install": "sparse", "values": 0}
        base = None if self.derived else self.held
        with source.patches(base, version) as files:
            if files.dense:
                self._next = _Next(version, None, ShadowReader(files.fds[0], self.layout))
                return {"install": "dense", "values": self.layout.params}
            patches = [PatchFile.open_fd(fd, self.layout, f"on the way to {version}") for fd in files.fds]
        at = base
        for patch in patches:
            if patch.base != at:
                raise IntegrityError(f"a patch against {patch.base} came where one against {at} belongs")
            at = patch.version
        if at != version:
            raise IntegrityError(f"the patches end at {at}, not at {version}")
        found = _Next(version, base)
        try:
            found.staged = stage(patches, self.layout, self.mapping, self.storages, cancelled)
        except IntegrityError:
            self.held = None
            raise
        if cancelled():
            return None
        if found.staged.reload:
            with source.patches(None, version) as files:
                shadow = ShadowReader(files.fds[0], self.layout)
                numbers = sorted(found.staged.reload)
                found.whole = [(self.layout.tensors[n].name, shadow.tensor(n).clone()) for n in numbers]
        self._next = found
        return {"install": "sparse", "values": found.staged.values, "whole": len(found.whole)}

    def commit(self, version: Version) -> None:
        """Write the prepared version. After an error the old values are back, or ``held`` is None."""
        found = self._next
        if found is None or found.version != version:
            raise LocalError(f"{version} isn't prepared; {found.version if found else 'nothing'} is")
        self._next = None
        if found.shadow is not None:
            self.held = None
            if self.derived:
                reload_all(found.shadow, self._model, self._model_config)
            else:
                install_dense(found.shadow, self.layout, self.mapping, self.storages, self._model)
            found.shadow = None
        else:
            if found.base != self.held:
                raise LocalError(f"{version} was prepared on {found.base}, but this rank holds {self.held}")
            self._committed = found
            try:
                found.staged.apply(self.storages)
                if found.whole:
                    with torch.inference_mode():
                        self._model.load_weights(found.whole)
            except BaseException:
                with suppress(LocalError):
                    self.abort()
                raise
        self.held = version

    def abort(self) -> bool:
        """Forget what is prepared, undo what is committed but not finished. False: it couldn't be, ``held`` is None."""
        self._next = None
        found, self._committed = self._committed, None
        if found is None:
            return self.held is not None
        self.held = None
        found.staged.restore(self.storages)
        if not found.whole:
            self.held = found.base
        return self.held is not None

    def finish(self) -> None:
        """What was committed stays."""
        self._committed = None

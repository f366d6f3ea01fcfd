"""One rank's weights: which version they are, what is staged for them, and how to go there and back.

Promise: ``held`` names a version only while the weights are exactly that version; it is None before the first install,
while a dense install runs, and after anything went wrong that couldn't be undone. What was written is read back before
``held`` says so. A prepare that was cancelled changes nothing, however late it wakes up. No vLLM in here beyond what
``dense`` imports when it reloads a model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from p2pcast.codec.digest import MASK
from p2pcast.codec.layout import Layout
from p2pcast.errors import IntegrityError, LocalError, P2PCastError
from p2pcast.state.patch_file import PatchFile
from p2pcast.version import Version
from rollout_node.install_frames import Descriptors
from rollout_node.vllm_plugin.audit import Entry, digests, rehearsals
from rollout_node.vllm_plugin.dense import install_dense, reload_all
from rollout_node.vllm_plugin.evidence import equal_elements, mapped_elements
from rollout_node.vllm_plugin.mapping import Mapping
from rollout_node.vllm_plugin.recording import Storages, record
from rollout_node.vllm_plugin.shadow_reader import ShadowReader
from rollout_node.vllm_plugin.staging import Staged, stage


class Source(Protocol):
    """Where patches come from: the peer."""

    def patches(self, base: Version | None, to: Version) -> Descriptors: ...


@dataclass(slots=True)
class _Next:
    """A prepared version. ``shadow``: a dense install, read at commit; ``whole``: tensors for the model's loader; ``mark``:
    what a commit that arrived leaves behind (``evidence``)."""

    version: Version
    base: Version | None
    mark: int = 0
    shadow: ShadowReader | None = None
    staged: Staged = field(default_factory=Staged)
    whole: list[tuple[str, torch.Tensor]] = field(default_factory=list)


class _ForeignWeightsError(IntegrityError):
    """The live values aren't those of the version held."""


def _text(version: Version | None) -> str | None:
    return str(version) if version else None


class Installation:
    """``derived``: parts of the model that don't compute from the loaded weights; if any, the model is always reloaded whole."""

    def __init__(self, model: torch.nn.Module, model_config: Any, layout: Layout, derived: list[str]) -> None:
        self._model: Any = model
        self._model_config = model_config
        self.layout = layout
        self.derived = derived
        self.held: Version | None = None
        self.doubtful = False
        """Whether the weights may be no version at all. False with ``held`` None: those that the engine was started with, or
        another run's."""
        self._lock = threading.RLock()
        """Between a prepare that ends and whoever has just told it to stop."""
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
            self.forget()
            self._record()

    @property
    def prepared(self) -> Version | None:
        return self._next.version if self._next else None

    def prepare(
        self, source: Source, version: Version, cancelled: Callable[[], bool], *, whole: bool = False
    ) -> dict[str, Any] | None:
        """Stage ``version``. Returns what is to be reported, None when cancelled; raises P2PCastError. Writes no weight.

        ``install`` says what commit will do: ``sparse`` any time later; ``dense`` only while the shadow is held still.
        ``whole`` makes it dense whatever is held. ``grown`` and ``expected``: as ``Staged`` has them, for ``audit.compare``.
        """
        with self._lock:
            if cancelled():
                return None
            self._committed = self._next = None
        try:
            found, details = self._found(source, version, cancelled, whole)
        except IntegrityError as error:
            with self._lock:
                if cancelled():
                    return None
                if isinstance(error, _ForeignWeightsError):
                    self.forget()
            raise
        with self._lock:
            if cancelled():
                return None
            self._next = found
        grown = [(number, b.start, b.shape, b.from_stride, g & MASK) for (number, b), g in found.staged.grown.items()]
        expected = [*found.staged.expected.items()]
        return {**details, "from": _text(found.base), "mark": found.mark, "grown": grown, "expected": expected}

    def _found(
        self, source: Source, version: Version, cancelled: Callable[[], bool], whole: bool
    ) -> tuple[_Next, dict[str, Any]]:
        if self.held == version and not whole:
            return _Next(version, version), {"install": "sparse", "values": 0}
        base = None if self.derived or whole else self.held
        with source.patches(base, version) as files:
            if files.dense:
                found = _Next(version, None, mapped_elements(self.mapping), ShadowReader(files.fds[0], self.layout))
                return found, {"install": "dense", "values": self.layout.params}
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
        except IntegrityError as error:
            raise _ForeignWeightsError(str(error)) from None
        found.mark = found.staged.mark
        if found.staged.reload and not cancelled():
            with source.patches(None, version) as files:
                shadow = ShadowReader(files.fds[0], self.layout)
                numbers = sorted(found.staged.reload)
                found.whole = [(self.layout.tensors[n].name, shadow.tensor(n).clone()) for n in numbers]
        return found, {"install": "sparse", "values": found.staged.values, "whole": len(found.whole)}

    def commit(self, version: Version) -> int:
        """Write the prepared version, and read it back. Returns the mark of what lies there then. After an error the old
        values are back, or ``held`` is None."""
        found = self._next
        if found is None or found.version != version:
            raise LocalError(f"{version} isn't prepared; {found.version if found else 'nothing'} is")
        if found.shadow is None and found.base != self.held:
            raise LocalError(f"{version} was prepared on {found.base}, but this rank holds {self.held}")
        self._next, self._committed = None, found
        self.held, self.doubtful = None, True  # until it is all there
        try:
            mark = self._write_all(found.shadow) if found.shadow else self._write_changed(found)
            if mark != found.mark:
                raise IntegrityError(f"what was written for {version} isn't there: mark {mark:x} in place of {found.mark:x}")
        except BaseException:
            self.abort()
            raise
        found.shadow = None
        self._hold(version)
        return mark

    def _write_all(self, shadow: ShadowReader) -> int:
        if self.derived:
            reload_all(shadow, self._model, self._model_config)
        else:
            install_dense(shadow, self.layout, self.mapping, self.storages, self._model)
        return equal_elements(shadow, self.mapping, self.storages)

    def _write_changed(self, found: _Next) -> int:
        mark = found.staged.apply(self.storages)
        if found.whole:
            with torch.inference_mode():
                self._model.load_weights(found.whole)
        return mark

    def abort(self) -> bool:
        """Forget what is prepared, undo what is committed but not finished. False: it couldn't be, ``held`` is None.

        A dense install that arrived can't be undone, and stays."""
        with self._lock:
            self._next = None
        found, self._committed = self._committed, None
        if found is None or (found.base is None and self.held is not None):
            return self.held is not None
        self.held, self.doubtful = None, True
        there = found.staged.restore(self.storages)
        if there and not found.whole and found.base is not None:
            self._hold(found.base)
        return self.held is not None

    def forget(self) -> None:
        """These weights aren't what they were taken for: from now on they are of no version, and nothing is built on them."""
        with self._lock:
            self._next = self._committed = None
        self.held, self.doubtful = None, True

    def change_run(self) -> None:
        """Versions of another run are other weights: what is there is whole, but none of this run's."""
        with self._lock:
            self._next = self._committed = None
        self.held = None

    def _hold(self, version: Version) -> None:
        self.held, self.doubtful = version, False

    def audit(self, source: Source, version: Version, cancelled: Callable[[], bool]) -> list[Entry]:
        """What can be told about the live weights, which are ``version``. Needs the shadow for tensors that only reload."""
        entries = digests(self.layout, self.mapping, self.storages, cancelled)
        if self.mapping.reload and not self.derived:
            with suppress(P2PCastError), source.patches(None, version) as files:
                shadow = ShadowReader(files.fds[0], self.layout)
                entries += rehearsals(self._model, shadow, self.layout, self.mapping, self.storages, cancelled)
        return entries

    def finish(self) -> None:
        """What was committed stays."""
        self._committed = None

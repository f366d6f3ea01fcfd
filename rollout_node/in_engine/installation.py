"""One rank's weights: their version, the version staged for them, and the switch between the two.

Guarantee: ``held`` names a version only while the weights are exactly that version. It is None before the first
install, during a dense install, and after a failure that could not be undone. Written values are read back before
``held`` is set. A cancelled prepare changes nothing, however late it returns. No engine is imported here; the engine's
plugin passes ``reload_all``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from p2pcast.checkpoint.adapter_form import adapter_of
from p2pcast.codec.digest import MASK
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, LocalError, P2PCastError
from p2pcast.ground.version import Version
from p2pcast.sparse.budget_schedule import BudgetSchedule
from p2pcast.state.patch_file import PatchFile
from rollout_node.in_engine.adapter_weights import Followers
from rollout_node.in_engine.install_frames import Descriptors
from rollout_node.in_engine.install_proof import equal_elements, mapped_elements
from rollout_node.in_engine.loader_recording import Storages, record, twins_of
from rollout_node.in_engine.loader_rehearsal import LoaderVerdict
from rollout_node.in_engine.shadow_reader import ShadowReader
from rollout_node.in_engine.staged_version import Staged, stage
from rollout_node.in_engine.started_settings import StartedSettings
from rollout_node.in_engine.tensor_accounts import Account, skipped
from rollout_node.in_engine.weight_audit import Entry, digests, rehearsals
from rollout_node.in_engine.weight_mapping import Mapping

_SHOWN = 10
ReloadAll = Callable[[ShadowReader], None]
"""Loads every tensor as the engine does at startup, with everything that the engine derives from the weights, into the
model's existing storage. Each engine's plugin provides one. Raises IntegrityError if a parameter is missing from the
shadow.
"""


@dataclass(frozen=True, slots=True)
class DerivedParts:
    """Parts of a model that compute from derived values instead of the loaded weights: ``reload_all`` always reloads
    the model as a whole. ``names`` has at least one name.
    """

    names: list[str]
    reload_all: ReloadAll


class PatchSource(Protocol):
    """The source of patches, which is the peer."""

    def patches(self, base: Version | None, to: Version) -> Descriptors: ...

    def adapter_configs(self, version: Version) -> dict[str, bytes]: ...


@dataclass(slots=True)
class _Prepared:
    """A prepared version. ``shadow``: for a dense install, read at commit. ``whole``: tensors for the model's loader.
    ``mark``: the mark of a successful commit (``install_proof``). ``schedule``: of sparse attention;
    ``schedule_before``: the one that the commit replaces. ``settings``: for the engine's copies; ``before``: the
    previous version's.
    """

    version: Version
    base: Version | None
    schedule: BudgetSchedule | None
    schedule_before: BudgetSchedule | None = None
    mark: int = 0
    shadow: ShadowReader | None = None
    staged: Staged = field(default_factory=Staged)
    whole: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    settings: Any = None
    before: Any = None


class _ForeignWeightsError(IntegrityError):
    """The live values are not those of the version held."""


def _text(version: Version | None) -> str | None:
    return str(version) if version else None


class Installation:
    """``use_schedule``: called at each commit with the version's sparse-attention schedule; None if the engine has no
    sparse attention. ``followers``: copies of the weights to be kept up to date. ``loading_form``: context manager for
    using the model's loader. ``settings``: a version whose settings differ is refused.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layout: Layout,
        derived: DerivedParts | None = None,
        use_schedule: Callable[[BudgetSchedule | None], None] | None = None,
        followers: Followers | None = None,
        loading_form: Callable[[], AbstractContextManager[None]] = nullcontext,
        settings: StartedSettings | None = None,
    ) -> None:
        self._model: Any = model
        self._followers = followers
        self._settings: Any = None
        """The followers' settings for the version held."""
        self._use_schedule = use_schedule
        self._schedule: BudgetSchedule | None = None
        self._loading_form, self._started = loading_form, settings
        self.layout = layout
        self.derived = derived
        self.held: Version | None = None
        self.before: Version | None = None
        """The version from which the engine computes, if the run's layout has changed since it was committed."""
        self.doubtful = False
        """Whether the weights may match no version.

        If False while ``held`` is None, the weights are those the engine started with, or a different run's.
        """
        self._lock = threading.RLock()
        """Serialises the end of a prepare with its cancellation."""
        self._prepared: _Prepared | None = None
        self._committed: _Prepared | None = None
        self.mapping: Mapping = Mapping({}, {})
        self.storages = Storages(model)
        self._record()

    def _record(self) -> None:
        if self.derived:
            whole = dict.fromkeys(range(len(self.layout.tensors)), self.derived.names[0])
            self.mapping = Mapping({}, whole, twins_of(self._model, self.layout, {}, whole))
            return
        with self._loading_form():
            self.mapping, self.storages, unreached = record(self._model, self.layout)
        if unreached:
            raise IntegrityError(
                f"no tensor of the run's layout reaches {len(unreached)} of the engine's parameters, "
                f"first {unreached[0]}; "
                "check that the engine serves the trained model"
            )

    def check_storages(self) -> None:
        """If parameters were rebound, record the mapping again and forget the version, because the values in the new
        storages are unknown.
        """
        if self.storages.rebound(self._model):
            self.forget()
            self._record()

    def accounts(self, lacks: Collection[str]) -> list[Account]:
        """Return the account of each tensor, by number. ``lacks``: adapters that the engine does not load."""
        mapping, inner = self.mapping, getattr(self._model, "model", None)
        settings = getattr(self._model, "config", None) or getattr(inner, "config", None)
        layers = getattr(getattr(settings, "get_text_config", lambda: settings)(), "num_hidden_layers", None)
        parts = {part for name, _ in self._model.named_parameters() for part in name.split(".")}

        def account(number: int, tensor: Tensor) -> Account:
            if not tensor.elements or any(number in known for known in (mapping.blocks, mapping.reload, mapping.twins)):
                return Account.COVERED
            left_out = adapter_of(tensor.name) in lacks or skipped(tensor.name, parts, layers)
            return Account.SKIPPED if left_out else Account.UNKNOWN

        return [account(number, tensor) for number, tensor in enumerate(self.layout.tensors)]

    @property
    def prepared(self) -> Version | None:
        return self._prepared.version if self._prepared else None

    def prepare(
        self, source: PatchSource, version: Version, cancelled: Callable[[], bool], *, whole: bool = False
    ) -> dict[str, Any] | None:
        """Stage ``version``, writing no weight. Returns the report's fields, or None if cancelled. Raises P2PCastError.

        ``install`` gives the kind of commit: ``sparse`` may be committed at any later time, ``dense`` only while the
        shadow is held still. ``whole`` makes the install dense whatever is held. ``grown`` and ``expected``: as in
        ``Staged``, for ``weight_audit.compare``.
        """
        with self._lock:
            if cancelled():
                return None
            self._committed = self._prepared = None
        try:
            found, details = self._stage(source, version, cancelled, whole)
            if self._followers is not None:
                found.settings = self._followers.settings(source, version)
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
            self._prepared = found
        grown = [(number, b.start, b.shape, b.from_stride, g & MASK) for (number, b), g in found.staged.grown.items()]
        expected = [*found.staged.expected.items()]
        return {**details, "from": _text(found.base), "mark": found.mark, "grown": grown, "expected": expected}

    def _stage(
        self, source: PatchSource, version: Version, cancelled: Callable[[], bool], whole: bool
    ) -> tuple[_Prepared, dict[str, Any]]:
        if self.held == version and not whole:
            return _Prepared(version, version, self._schedule), {"install": "sparse", "values": 0}
        base = None if self.derived or whole else self.held
        with source.patches(base, version) as files:
            schedule = self._read(files.schedule)
            if self._started is not None and files.config and (keys := self._started.differing(files.config)):
                raise LocalError(
                    f"version {version} is refused: its settings differ from those with which this engine was started,"
                    f" in {', '.join(keys[:_SHOWN])}; start the engine on a folder of this version"
                )
            if files.dense:
                found = _Prepared(version, None, schedule)
                found.mark, found.shadow = mapped_elements(self.mapping), ShadowReader(files.fds[0], self.layout)
                self._check_twins(found.shadow, version)
                return found, {"install": "dense", "values": self.layout.params}
            patches = [PatchFile.open_fd(fd, self.layout, f"on the way to {version}") for fd in files.fds]
        at = base
        for patch in patches:
            if patch.base != at:
                raise IntegrityError(f"the peer sent a patch against {patch.base}; expected one against {at}")
            at = patch.version
        if at != version:
            raise IntegrityError(f"the patches end at {at}, not at {version}")
        changed = {self.layout.cells[change.cell].tensor for patch in patches for change in patch.cells}
        if changed & {n for pair in self.mapping.twins.items() for n in pair}:
            with source.patches(None, version) as files:
                self._check_twins(ShadowReader(files.fds[0], self.layout), version)
        found = _Prepared(version, base, schedule)
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

    def _check_twins(self, shadow: ShadowReader, version: Version) -> None:
        """Raises LocalError unless tensors that share one parameter of this rank are equal, bit for bit."""
        for number, twin in self.mapping.twins.items():
            if not torch.equal(*(shadow.words(n, torch.uint8) for n in (number, twin))):
                name, other = (self.layout.tensors[n].name for n in (number, twin))
                raise LocalError(
                    f"version {version} is refused: its {name} differs from its {other}, and this engine has one "
                    "parameter for both (tied); start the engine on a folder of this version, or publish them equal"
                )

    def commit(self, version: Version) -> int:
        """Write the prepared version and read it back. Returns the mark of the values read back.

        After an error, the old values are restored or ``held`` is None.
        """
        found = self._prepared
        if found is None or found.version != version:
            prepared = f"{found.version} is" if found else "no version is"
            raise LocalError(f"{version} isn't prepared; {prepared}")
        if found.shadow is None and found.base != self.held:
            raise LocalError(f"{version} was prepared on {found.base}, but this rank holds {self.held}")
        self._prepared, self._committed = None, found
        found.before = self._settings
        self.held, self.before, self.doubtful = None, None, True  # until the write is verified
        try:
            mark = self._write_all(found.shadow) if found.shadow else self._write_changed(found)
            if mark != found.mark:
                raise IntegrityError(
                    f"the values of {version} were not written: read back mark {mark:x}, expected {found.mark:x}"
                )
            if self._followers is not None:
                self._followers.follow(found.settings)
        except BaseException:
            self.abort()
            raise
        found.shadow, self._settings = None, found.settings
        found.schedule_before = self._schedule
        self._use(found.schedule)
        self._hold(version)
        return mark

    def _write_all(self, shadow: ShadowReader) -> int:
        if self.derived:
            self.derived.reload_all(shadow)
        else:
            with self._loading_form():
                install_dense(shadow, self.layout, self.mapping, self.storages, self._model)
        return equal_elements(shadow, self.mapping, self.storages)

    def _write_changed(self, found: _Prepared) -> int:
        mark = found.staged.apply(self.storages)
        if found.whole:
            with torch.inference_mode(), self._loading_form():
                self._model.load_weights(found.whole)
        return mark

    def abort(self) -> bool:
        """Forget the prepared version, and undo a commit that is not finished. Returns False if it cannot be undone;
        ``held`` is then None, as it is after an error.

        A successful dense install cannot be undone, and stays.
        """
        with self._lock:
            self._prepared = None
        found, self._committed = self._committed, None
        if found is None or (found.base is None and self.held is not None):
            return self.held is not None
        committed = self.held == found.version
        self.held, self.doubtful = None, True
        there = found.staged.restore(self.storages)
        if there and not found.whole and found.base is not None:
            if committed:
                self._use(found.schedule_before)
            self._settings = found.before
            if self._followers is not None:
                self._followers.follow(found.before)
            self._hold(found.base)
        return self.held is not None

    def differing_copies(self) -> list[int]:
        """Numbers of the tensors with a copy that differs from the weights."""
        return [] if self._followers is None else self._followers.differing()

    def forget(self) -> None:
        """Treat the weights as no known version, so that the next prepare is dense."""
        with self._lock:
            self._prepared = self._committed = None
        self.held, self.before, self.doubtful = None, None, True

    def change_run(self) -> None:
        """Called when a different run has started: the weights are intact, but none of its versions."""
        with self._lock:
            self._prepared = self._committed = None
        self.held = self.before = None

    def _read(self, schedule: bytes | None) -> BudgetSchedule | None:
        """Parse the schedule if the engine uses one. Raises UsageError for a malformed schedule."""
        return None if schedule is None or self._use_schedule is None else BudgetSchedule.from_bytes(schedule)

    def _use(self, schedule: BudgetSchedule | None) -> None:
        if self._use_schedule is not None:
            self._use_schedule(schedule)
        self._schedule = schedule

    def _hold(self, version: Version) -> None:
        self.held, self.doubtful = version, False

    def audit(
        self, source: PatchSource, version: Version, cancelled: Callable[[], bool], differing: Collection[int] = ()
    ) -> list[Entry]:
        """Return audit entries for the live weights, which are ``version``. Needs the shadow for tensors that only the
        loader can install. ``differing``: tensors with copies that differ.
        """
        entries = digests(self.layout, self.mapping, self.storages, cancelled)
        entries += [(entry[0], LoaderVerdict.DIFFERS, (), (), entry[4]) for entry in entries if entry[0] in differing]
        if self.mapping.reload and not self.derived:
            with suppress(P2PCastError), source.patches(None, version) as files:
                shadow = ShadowReader(files.fds[0], self.layout)
                entries += rehearsals(self._model, shadow, self.layout, self.mapping, self.storages, cancelled)
        return entries

    def finish(self) -> None:
        """Make the committed version permanent."""
        self._committed = None


def install_dense(shadow: ShadowReader, layout: Layout, mapping: Mapping, storages: Storages, model: Any) -> None:
    """Overwrite all weights with the shadow's values, block by block, in the existing storage. A block takes at most
    ``INSTALL_CHUNK_BYTES`` of device memory. ``mapping.reload`` goes through ``model.load_weights``. This can be undone
    only by a further dense install.
    """
    with torch.inference_mode():
        for view, value in storages.fills:
            view.fill_(value)
        for number, blocks in mapping.blocks.items():
            for block in blocks:
                words = storages.table[block.storage].words
                source = shadow.words(number, words.dtype)
                for part in block.split(limits.INSTALL_CHUNK_BYTES // words.element_size()):
                    to = words.as_strided(part.shape, part.to_stride, part.at)
                    to.copy_(source.as_strided(part.shape, part.from_stride, part.start))
        if mapping.reload:
            model.load_weights((layout.tensors[n].name, shadow.tensor(n)) for n in sorted(mapping.reload))

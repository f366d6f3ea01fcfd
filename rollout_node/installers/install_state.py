"""State of a vLLM installer: all that the installer knows of its engine.

Between two calls of the installer these hold:

- A ready engine has a committed version. So has an engine that counts as away, and that engine isn't ready.
- A stretch has a name only while a version is committed.
- ``installed`` belongs to ``staged``: without a staged version there is no report, and no dense preparation.

The methods here write the fields. Exceptions, each with one writer: ``pausing`` (``engine_pause``), ``marks``
(``rank_preparation``), ``stretch`` (``safe_point``). A lost version and a restarted engine reset them here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from p2pcast.ground.version import Version
from rollout_node.installers.installer import CommitReport


@dataclass(slots=True)
class InstallState:
    """The engine:

    - ``committed``: the version in use; None if it isn't known.
    - ``ready``: fit for traffic.
    - ``away``: ``ready`` is False only because the server could not be reached.
    - ``uncertain``: some rank's report is not reliable. Only a dense install restores a known version.
    - ``pausing``: if the engine is paused, this peer paused it.
    - ``follows``: its attention follows the schedule of budgets that belongs to its version.
    - ``lacks``: adapters of the run that it does not take.
    - ``skipped``: tensors of the run that it leaves out, without an effect (``in_engine.tensor_accounts``).
    - ``stretch``: name of the time since the last write to the weights (``safe_point.SwitchPoint``).

    The staged version:

    - ``staged``: the version that the next commit accepts.
    - ``installed``: report of its switch, if the engine has switched while staging.
    - ``dense``: some rank writes the whole state.
    - ``marks``: by rank, the checksum of the values that the rank prepared.
    """

    committed: Version | None = None
    ready: bool = False
    away: bool = False
    uncertain: bool = False
    pausing: bool = False
    follows: bool = False
    lacks: tuple[str, ...] = ()
    skipped: frozenset[str] = frozenset()
    stretch: str | None = None
    staged: Version | None = None
    installed: CommitReport | None = None
    dense: bool = False
    marks: Mapping[int, int] = field(default_factory=dict)
    _incarnations: Mapping[int, str] = field(default_factory=dict)

    # -- the engine

    def meet(
        self,
        incarnations: Mapping[int, str],
        *,
        follows: bool = False,
        lacks: Collection[str] = (),
        skipped: Collection[str] = (),
    ) -> None:
        """The ranks named their processes. A restart discards earlier findings about the engine."""
        self.follows, self.lacks, self.skipped = follows, tuple(sorted(lacks)), frozenset(skipped)
        if incarnations != self._incarnations:
            self._incarnations = incarnations
            self.uncertain = self.pausing = False

    def doubt(self) -> None:
        """Some rank's report is not reliable."""
        self.uncertain = True

    def trust(self) -> None:
        """All ranks proved one version."""
        self.uncertain = False

    def lose_version(self) -> None:
        """The version in use is not known any more."""
        self.committed, self.ready, self.away, self.stretch = None, False, False, None
        self.drop()

    def lose_contact(self) -> None:
        """The server is out of reach."""
        self.away |= self.ready
        self.ready = False

    def restore_contact(self) -> None:
        """The server answers, and has kept its version."""
        if self.away:
            self.ready, self.away = True, False

    def fail(self) -> None:
        """An install failed: only a commit makes the engine ready again."""
        self.ready = self.away = False

    # -- the staged version

    def prepare(self, *, dense: bool) -> None:
        """All ranks prepared a version. The whole state is written before the engine is ready again."""
        self.dense = dense
        if dense:
            self.ready = False

    def stage(self, version: Version, installed: CommitReport | None) -> None:
        self.staged, self.installed = version, installed

    def commit(self, version: Version) -> None:
        """The engine uses ``version``."""
        self.committed, self.ready, self.away = version, True, False
        self.drop()

    def drop(self) -> None:
        """Nothing is staged."""
        self.staged = self.installed = None
        self.dense = False

    @property
    def commit_needs_shadow(self) -> bool:
        return self.staged is not None and self.dense and self.installed is None

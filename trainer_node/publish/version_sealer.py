"""Owns the hub's node, makes each version that the hub encodes durable, and announces it.

Guarantee: a version is announced as sealed only once it is durable in the hub's store.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from p2pcast.artifact.run_key import RunKey
from p2pcast.artifact.signed_records import Durable, Open
from p2pcast.codec.layout import Layout
from p2pcast.ground.errors import LocalError, P2PCastError, RemoteError
from p2pcast.ground.version import Version
from p2pcast.process.background_tasks import Work
from p2pcast.process.events import Events
from p2pcast.process.shortages import scarce
from p2pcast.relay.holding import Holding
from p2pcast.relay.node import Node, Parent
from p2pcast.state.staging import Staging
from p2pcast.store.artifact_log import ArtifactLog
from p2pcast.store.artifact_store import ArtifactStore
from trainer_node.commit.barrier import Opened, Sealed, VersionAborted
from trainer_node.publish.artifact_announcer import ArtifactAnnouncer

PULLS = 64
"""Number of peers that may pull artifacts that no other peer has from the hub at the same time."""
Observer = Callable[[Opened | Sealed | VersionAborted], None]


class VersionSealer:
    """A ``NodeOwner``. It makes ``node`` itself, since a node needs its owner."""

    def __init__(
        self,
        ident: bytes,
        key: RunKey,
        store: ArtifactStore,
        staging: Staging,
        events: Events,
        announcer: ArtifactAnnouncer,
        later: Callable[[Work, str], None],
    ) -> None:
        """``later`` starts a background task."""
        self.node = Node(self, ident, key.public, max_pulls=PULLS)
        self.observers: list[Observer] = []
        """Called when a version is opened, sealed or aborted."""
        self._key = key
        self._store = store
        self._staging = staging
        self._events = events
        self._announcer = announcer
        self._later = later

    def fail(self, error: P2PCastError) -> None:
        """Stop the hub with this error; only the first error counts."""
        if not self.node.error.done():
            self.node.error.set_exception(error)

    @property
    def failed(self) -> bool:
        """Whether the hub's own disk has failed, so that nothing more can be published."""
        return self.node.error.done()

    def sealed(self, version: Version, size_bytes: int) -> None:
        """Report that ``version`` is durable in the store."""
        self._events.emit("sealed", version=str(version), bytes=size_bytes)
        self._notify(Sealed(version))

    # -- NodeOwner

    def make_log(self, open_: Open, layout: Layout, *, excerpt: bool) -> ArtifactLog:
        raise RemoteError("a hub takes no artifacts from others")

    def on_opened(self, holding: Holding) -> None:
        self._notify(Opened(holding.open.version))
        self._announcer.announce([holding])

    def on_complete(self, holding: Holding) -> None:
        self._later(partial(self._seal, holding), f"seal {holding.open.version}")

    def on_aborted(self, holding: Holding) -> None:
        version = holding.open.version
        self._events.emit("aborted", version=str(version))
        self._notify(VersionAborted(version))
        self._later(partial(self._staging.run, self._store.abandon, holding.log, holding.id), f"abandon {version}")
        self._announcer.withdraw([holding.id])

    def on_offered(self, upstream: Parent) -> None: ...

    def on_upstream_lost(self, upstream: Parent, error: P2PCastError | None) -> None: ...

    # -- sealing

    async def _seal(self, holding: Holding) -> None:
        if not await holding.until_proved():
            return
        manifest, version = holding.assembly.manifest, holding.open.version
        assert manifest is not None
        durable = Durable(holding.id, manifest.body_hash, manifest.run, manifest.version).to_signed(self._key)
        try:
            await self._staging.run(self._store.seal, holding.log, holding.assembly, durable)
        except P2PCastError as error:
            if scarce(error):
                raise  # the version is sealed once there is space
            self.fail(error)
            holding.fail_seal(error)
            return
        except Exception as error:
            if scarce(error):
                raise
            holding.fail_seal(LocalError(f"version {version} could not be sealed: {type(error).__name__}"))
            raise
        self.node.confirm(holding, durable)
        holding.seal()
        self._announcer.announce([holding])
        self.sealed(version, manifest.log)

    def _notify(self, event: Opened | Sealed | VersionAborted) -> None:
        for observer in self.observers:
            observer(event)

"""CATALOG: the hub's artifacts as peers hear of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from p2pcast.ground.version import Version
from p2pcast.wire import messages
from trainer_node.publish.artifact_announcer import ArtifactAnnouncer

ARTIFACT = b"a" * 16


class Hub:
    def __init__(self) -> None:
        self.sealed: set[bytes] = set()
        self.gone: list[bytes] = []
        self.sent: list[messages.Record] = []
        sources: Any = SimpleNamespace(gone=self.gone.append)
        self.announcer = ArtifactAnnouncer(self.sealed.__contains__, sources, self.sent.append)


def holding(*, manifest: bool) -> Any:
    open_ = SimpleNamespace(kind="delta", base=Version(0, 0), version=Version(0, 1), layout=b"l" * 32)
    facts = SimpleNamespace(log=7, state=8, identity=b"i" * 32) if manifest else None
    return SimpleNamespace(id=ARTIFACT, open=open_, assembly=SimpleNamespace(manifest=facts, durable_signed=b"durable"))


def test_an_artifact_is_announced_with_all_that_is_known() -> None:
    hub = Hub()
    hub.announcer.announce([holding(manifest=False)])
    hub.announcer.announce([holding(manifest=True)])
    first, second = (body.artifacts[0] for body in hub.sent)  # type: ignore[attr-defined]
    assert (first.size, first.state, first.identity, first.sealed) == (0, 0, None, False)
    assert (second.size, second.state, second.identity) == (7, 8, b"i" * 32)


def test_the_durable_record_goes_out_only_once_the_store_has_the_artifact() -> None:
    hub = Hub()
    assert hub.announcer.catalog([holding(manifest=True)]).artifacts[0].durable == b""
    hub.sealed.add(ARTIFACT)
    (entry,) = hub.announcer.catalog([holding(manifest=True)]).artifacts
    assert (entry.sealed, entry.durable) == (True, b"durable")


def test_nothing_new_is_not_sent() -> None:
    hub = Hub()
    hub.announcer.announce([])
    assert hub.sent == []


def test_a_withdrawn_artifact_has_no_sources_any_more() -> None:
    hub = Hub()
    hub.announcer.withdraw([ARTIFACT])
    assert hub.gone == [ARTIFACT]
    assert hub.sent == [messages.Catalog([], [ARTIFACT])]

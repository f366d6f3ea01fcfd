"""When engines switch: the hub's commands to peers, each on disk before it is sent."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from parts import Background, emitted, in_thread

from p2pcast.ground.errors import LocalError, RefusedError, UsageError
from p2pcast.ground.version import Version
from p2pcast.process.events import Events
from p2pcast.wire.messages import Hold, Type
from trainer_node.commit.barrier import Left, Opened, Sealed, Superseded, Switched
from trainer_node.commit.commits import REJOIN_S, Commits, CommitTarget
from trainer_node.hub_config import HubConfig
from trainer_node.membership.engine_reports import EngineRow
from trainer_node.membership.peer_record import PeerRecord

V = Version


class Memory(dict[str, Any]):
    """The state file; ``log`` says when it was written."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__(target=None)
        self.log = log
        self.full = False

    def update(self, **facts: Any) -> None:
        if self.full:
            raise LocalError("no space is left")
        super().update(facts)
        self.log.append(("saved", facts["target"]))


class Parts:
    def __init__(self, background: Background, mode: str, timeout_s: float = 1000.0) -> None:
        self.log: list[Any] = []
        self.memory, self.events = Memory(self.log), Events()
        self.versions: set[Version] = set()
        self.errors: list[Exception] = []
        self.background = background
        fleet = SimpleNamespace(
            send_all=lambda record: self.log.append((record.type, record.version)), name_of=lambda ident: f"<{ident}>"
        )
        config = HubConfig(state=Path(), shadow=Path(), commit=mode, barrier_timeout_s=timeout_s, barrier_quorum=0.5)
        self.commits = Commits(
            config, CommitTarget(self.memory, fleet, in_thread), fleet, self.events,
            versions=lambda: self.versions, later=background, fail=self.errors.append,
        )  # fmt: skip

    def report(self, peer: str, staged: Version | None, committed: Version | None = None) -> None:
        record = PeerRecord(peer, peer, "", "host", 1, 0.0)
        record.engines = [EngineRow("e", True, True, staged, committed)]
        self.commits.reported(record)


@pytest.mark.parametrize("mode", ["auto", "barrier"])
async def test_only_a_manual_hub_takes_the_command(background, mode) -> None:
    with pytest.raises(UsageError, match="--commit manual"):
        await Parts(background, mode).commits.command({"version": "0.1"})


async def test_a_command_is_on_disk_before_peers_are_told(background) -> None:
    parts = Parts(background, "manual")
    with pytest.raises(RefusedError, match="not one of this run's"):
        await parts.commits.command({"version": "0.1"})
    parts.versions = {V(0, 1)}
    assert await parts.commits.command({"version": "0.1"}) == {"target": "0.1"}
    assert parts.log == [("saved", [0, 1]), (Type.COMMIT, V(0, 1))]
    assert parts.commits.target.version == V(0, 1)
    assert parts.commits.status() is None
    assert parts.commits.greeting() == []


async def test_events_mean_nothing_without_a_barrier(background) -> None:
    parts = Parts(background, "auto")
    parts.commits.start(V(0, 1))
    parts.commits.handle(Sealed(V(0, 2)))
    assert parts.log == []
    assert background.names == []


async def test_a_round_holds_commits_and_is_announced(background) -> None:
    parts = Parts(background, "barrier")
    parts.commits.start(None)
    parts.report("a", None)
    parts.commits.handle(Opened(V(0, 1)))
    assert parts.commits.greeting() == [Hold(V(0, 1))]
    parts.commits.handle(Sealed(V(0, 1)))
    status = parts.commits.status()
    assert (status["phase"], status["version"], status["waiting_for"]) == ("gathering", "0.1", ["<a>"])
    parts.report("a", V(0, 1))
    await background.settle()
    assert parts.log == [(Type.HOLD, V(0, 1)), ("saved", [0, 1]), (Type.COMMIT, V(0, 1))]
    assert parts.commits.outcomes["committed"] == 1
    assert emitted(parts.events, "barrier") == [{"outcome": "committed", "version": "0.1", "staged": 1, "ready": 1}]
    assert parts.commits.status()["deadline_s"] > 0


async def test_a_quorum_and_a_failure_name_the_late(background, monkeypatch) -> None:
    now = 0.0
    monkeypatch.setattr("trainer_node.commit.commits.time", SimpleNamespace(monotonic=lambda: now, time=lambda: 5.0))
    parts = Parts(background, "barrier", timeout_s=1.0)
    parts.commits.start(None)
    for peer in "abc":
        parts.report(peer, None)
    parts.commits.handle(Opened(V(0, 1)))
    parts.commits.handle(Sealed(V(0, 1)))
    parts.report("a", V(0, 1))
    now = 2.0
    parts.commits.handle(Left("x"))
    assert emitted(parts.events)[-1] == {
        "outcome": "failed", "version": "0.1", "staged": 1, "ready": 3, "needed": 2, "late": ["<b>", "<c>"],
    }  # fmt: skip
    parts.report("b", V(0, 1))
    assert emitted(parts.events)[-1]["outcome"] == "quorum"
    assert parts.commits.status()["last"]["late"] == ["<c>"]
    await background.settle()


async def test_other_ends_of_a_round_are_announced(background, caplog) -> None:
    parts = Parts(background, "barrier")
    parts.commits._announce(Superseded(V(0, 1), V(0, 2)))
    parts.commits._announce(Switched(V(0, 2), (("a", "e"),)))
    parts.commits._announce(Switched(V(0, 2), ()))
    assert emitted(parts.events, "barrier") == [{"outcome": "superseded", "version": "0.1", "by": "0.2"}]
    assert caplog.text.count("have not") == 1


async def test_a_decision_that_cannot_be_saved_ends_the_hub(background) -> None:
    parts = Parts(background, "barrier")
    parts.memory.full = True
    parts.commits.start(None)
    parts.report("a", None)
    parts.commits.handle(Opened(V(0, 1)))
    parts.commits.handle(Sealed(V(0, 1)))
    parts.report("a", V(0, 1))
    await background.settle()
    assert [str(error) for error in parts.errors] == ["no space is left"]
    assert (Type.COMMIT, V(0, 1)) not in parts.log


async def test_a_restarted_barrier_waits_for_its_peers(background, monkeypatch) -> None:
    now = 0.0
    monkeypatch.setattr("trainer_node.commit.commits.time", SimpleNamespace(monotonic=lambda: now, time=lambda: 5.0))
    parts = Parts(background, "barrier")
    parts.commits.start(V(0, 1))
    parts.report("a", V(0, 1))
    assert parts.commits.outcomes["committed"] == 0
    now = REJOIN_S
    parts.commits.handle(Left("x"))
    await background.settle()
    assert parts.commits.outcomes["committed"] == 1

"""Bugs in background tasks of live daemons. Each ends in a daemon that is unhealthy and says why, or that has ended
with exit code 1. A bug is an exception that a real function raises in place of its work.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from p2pcast.cli.status import table
from p2pcast.ground.errors import LocalError
from p2pcast.ground.version import Version
from p2pcast.process.background_tasks import TaskFailedError
from p2pcast.relay import read_ahead
from p2pcast.store import write_behind
from p2pcast.wire import messages
from rollout_node import peer_startup


class Bug(Exception):
    """An unexpected exception."""


def broken(*_: object, **__: object) -> None:
    raise Bug("by a test")


@pytest.fixture
def faulty(swarm):
    swarm.expects_failures = True
    return swarm


async def ends(swarm, daemon, task: str) -> None:
    """With exit code 1 and a line that names the task."""
    error = await swarm.ended(daemon)
    if isinstance(error, BaseExceptionGroup):
        error = next(e for e in error.exceptions if isinstance(e, TaskFailedError))
    assert isinstance(error, TaskFailedError)
    assert (error.exit_code, f"task '{task}' failed: Bug: by a test" in str(error)) == (1, True)


async def unhealthy(swarm, daemon, task: str, why: str = "Bug") -> None:
    """As it shows: health, status, events, metrics; and it goes on."""
    await swarm.until(lambda: not daemon.tasks.healthy()[0], f"{daemon} is unhealthy")
    code, text = await swarm.get(daemon, "/healthz")
    assert (code, task in text, "Traceback" in text, "by a test" in text) == (503, True, False, False)
    status = await swarm.status(daemon)
    [failure, *_] = status["failures"]
    assert f"unhealthy, restart this daemon: task {failure['task']!r} failed" in table(status).renderables[0]
    assert (task in failure["task"], why in failure["why"]) == (True, True)
    assert (
        next(e for e in daemon.events.after(0, 10_000)[1] if e.kind == "task_failed").facts["task"] == failure["task"]
    )
    _, metrics = await swarm.get(daemon, "/metrics")
    assert "p2pcast_healthy 0.0" in metrics
    assert "p2pcast_task_failures_total" in metrics


def logs(daemon) -> list[object]:
    return [holding.log for holding in daemon.node.holdings.values()]


async def begun(swarm, states, *peers: str):
    """A hub and peers at 0.1."""
    hub = await swarm.hub_up()
    found = await swarm.peers_up(*peers)
    state = states.first()
    swarm.publish(1, state)
    await (swarm.live("0.1") if peers else swarm.published("0.1"))
    assert (await swarm.get(hub, "/healthz")) == (200, "ok\n")
    return hub, state, *found


# -- the daemon's own work


async def test_a_hub_that_fails_to_seal_ends_and_its_publish_does_not_hang(faulty, states, monkeypatch):
    hub, state = await begun(faulty, states)
    publish, errors = hub.publishing.pipeline.publish, []

    async def recorded(*args, **named):
        try:
            return await publish(*args, **named)
        except LocalError as error:
            errors.append(str(error))
            raise

    monkeypatch.setattr(hub.publishing.pipeline, "publish", recorded)
    monkeypatch.setattr(hub.state.store, "seal", broken)
    faulty.publish(2, states.trained(state, 2))
    await ends(faulty, hub, "seal 0.2")
    # The publish gets the error before the hub ends; the hub may end before the skipped folder is noted.
    assert errors == ["version 0.2 could not be sealed: Bug"]
    assert hub.publishing.pipeline.head == Version(0, 1)


async def test_a_hub_whose_disk_fails_to_seal_ends_and_its_publish_does_not_hang(faulty, states, monkeypatch):
    hub, state = await begun(faulty, states)

    def full(*_: object) -> None:
        raise LocalError("no space left on device")

    monkeypatch.setattr(hub.state.store, "seal", full)
    faulty.publish(2, states.trained(state, 2))
    error = await faulty.ended(hub)
    errors = error.exceptions if isinstance(error, BaseExceptionGroup) else [error]
    assert "no space left on device" in str(errors[0])
    assert not any(isinstance(e, TaskFailedError) for e in errors)


@pytest.mark.parametrize(
    ("part", "work", "task"),
    [("store", "seal", "seal 0.2"), ("store", "retain", "seal 0.2"), ("shadow", "apply", "staging")],
)
async def test_a_peer_that_fails_with_a_version_ends(faulty, states, monkeypatch, part, work, task):
    _, state, peer = await begun(faulty, states, "a")
    monkeypatch.setattr(peer.relay.store if part == "store" else peer.shadow, work, broken)
    faulty.publish(2, states.trained(state, 2))
    await ends(faulty, peer, task)


async def test_a_hub_that_fails_in_retention_ends(faulty, states, monkeypatch):
    hub, _ = await begun(faulty, states)
    monkeypatch.setattr(hub.state.store, "retain", broken)
    [stored] = hub.state.store.artifacts.values()
    hub.publishing.sealed_artifacts.add(stored)
    await ends(faulty, hub, "retention after 0.1")


async def test_a_hub_whose_disk_fails_in_retention_is_unhealthy_and_goes_on(faulty, states, monkeypatch):
    hub, state = await begun(faulty, states)

    def full(*_: object) -> None:
        raise LocalError("deltas: read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(hub.state.store, "retain", full)
        [stored] = hub.state.store.artifacts.values()
        hub.publishing.sealed_artifacts.add(stored)
        await unhealthy(faulty, hub, "retention after 0.1", "read-only file system")
    faulty.publish(2, states.trained(state, 2))
    await faulty.published("0.2")


@pytest.mark.parametrize("disk", [False, True])
async def test_an_eviction_that_a_peer_cannot_write_is_reported(faulty, states, monkeypatch, disk):
    hub, state, peer = await begun(faulty, states, "a")

    def full(**_: object) -> None:
        raise LocalError("evictions.log: no space left on device")

    monkeypatch.setattr(peer.startup.eviction_log, "save", full if disk else broken)
    hub.state.admission.trust.decide(b"x" * 16, bytes(8), evicted=True, name="x")
    if not disk:
        await ends(faulty, peer, "evicted")
        return
    await unhealthy(faulty, peer, "evicted", "no space left")
    assert b"x" * 16 in peer.startup.eviction_log.evictions.nodes
    monkeypatch.undo()
    faulty.publish(2, states.trained(state, 2))
    await faulty.live("0.2")


async def test_keepalives_that_fail_end_the_daemon(faulty, states, monkeypatch):
    hub, _, peer = await begun(faulty, states, "a")
    monkeypatch.setattr(peer.node.downstream.node, "update_busy", broken)
    await ends(faulty, peer, "keepalives")
    assert hub.tasks.healthy()[0]


async def test_a_barrier_that_fails_ends_the_hub(faulty, states, monkeypatch):
    hub = await faulty.hub_up(commit="barrier")
    await faulty.peer_up("a")
    monkeypatch.setattr(hub.state.state_file, "update", broken)
    faulty.publish(1, states.first())
    error = await faulty.ended(hub)
    assert "by a test" in "".join(map(str, getattr(error, "exceptions", [error])))


async def test_a_write_behind_that_fails_ends_the_peer(faulty, states, monkeypatch):
    _, state, peer = await begun(faulty, states, "a")
    carry = write_behind._write_step
    monkeypatch.setattr(
        write_behind,
        "_write_step",
        lambda notes, artifact, log, *rest: (broken if log in logs(peer) else carry)(notes, artifact, log, *rest),
    )
    faulty.publish(2, states.trained(state, 2))
    await ends(faulty, peer, "node")


async def test_a_failed_warm_up_ends_the_peer_before_joining(faulty, monkeypatch):
    await faulty.hub_up()
    monkeypatch.setattr(peer_startup.Staging, "warm_up", broken)
    assert isinstance(await faulty.ended(faulty.peer_begun("a")), Bug)


# -- work for one connection


async def test_a_failed_certificate_issue_ends_its_link_and_is_reported(faulty, states, monkeypatch):
    faulty.plaintext = False
    hub, state, peer = await begun(faulty, states, "a")
    monkeypatch.setattr(hub.state.admission._authority, "issue", broken)
    peer.startup.hub_session.send(messages.Enrol(peer.startup.certificate._kept.held.request))
    await unhealthy(faulty, hub, "renew a")
    monkeypatch.undo()
    faulty.publish(2, states.trained(state, 2))
    await faulty.live("0.2")


async def test_a_peer_that_fails_to_store_a_certificate_ends(faulty, states, monkeypatch):
    faulty.plaintext = False
    _, _, peer = await begun(faulty, states, "a")
    monkeypatch.setattr(peer.startup.certificate, "_use", broken)
    peer.startup.hub_session.send(messages.Enrol(peer.startup.certificate._kept.held.request))
    await ends(faulty, peer, "certificate")


@pytest.mark.parametrize("at", ["message", "link"])
async def test_an_error_of_the_system_in_a_message_is_not_taken_for_the_connections_own(
    faulty, states, monkeypatch, at
):
    hub, _, peer = await begun(faulty, states, "a")

    def absent(*_: object) -> None:
        raise FileNotFoundError(2, "by a test")

    if at == "message":
        monkeypatch.setattr(hub.publishing.anchors_and_squashes, "ask", absent)
        peer.startup.hub_session.send(messages.Squash((0, 1)))
    else:
        monkeypatch.setattr(hub.control.link_acceptor, "accept_link", absent)
        faulty.peer_begun("b")
    await unhealthy(faulty, hub, "ended this link" if at == "message" else "", "FileNotFoundError")


@pytest.mark.parametrize("plaintext", [True, False])
async def test_a_message_that_the_hub_fails_to_handle_ends_its_link_and_is_reported(
    faulty, states, monkeypatch, plaintext
):
    faulty.plaintext = plaintext
    hub, state, peer = await begun(faulty, states, "a")
    link = peer.startup.hub_session._link
    monkeypatch.setattr(hub.publishing.anchors_and_squashes, "ask", broken)
    peer.startup.hub_session.send(messages.Squash((0, 1)))
    await faulty.until(lambda: link.closed, "that link has ended")
    await unhealthy(faulty, hub, "ended this link")
    faulty.publish(2, states.trained(state, 2))
    await faulty.live("0.2")


async def test_a_failed_read_ahead_ends_that_childs_link_and_is_reported(faulty, states, monkeypatch):
    hub, _ = await begun(faulty, states)
    with monkeypatch.context() as patch:
        patch.setattr(read_ahead, "read_pieces", broken)
        await faulty.peer_up("late")
        await unhealthy(faulty, hub, "read ahead for late")
    await faulty.live("0.1")


async def test_a_failed_timer_is_reported(faulty, states):
    hub, _ = await begun(faulty, states)
    asyncio.get_running_loop().call_later(0, broken)
    await unhealthy(faulty, hub, "callback")


# -- engines


async def test_an_installers_thread_that_fails_makes_its_peer_unready_and_relaying_goes_on(swarm, states, monkeypatch):
    hub, state, peer, other = await begun(swarm, states, "a", "b")
    with monkeypatch.context() as patch:
        patch.setattr(peer.runners[0].installer._folders, "stage", broken)
        swarm.publish(2, states.trained(state, 2))
        await swarm.until(lambda: peer.runners[0].error == "Bug: by a test", "its runner knows")
        code, text = await swarm.get(peer, "/readyz")
        assert (code, "Bug: by a test" in text) == (503, True)
        await swarm.until(
            lambda: any(e.kind == "install_failed" for e in peer.events.after(0, 10_000)[1]), "an event says so"
        )
        await swarm.live("0.2", other)
        assert hub.tasks.healthy()[0]
    await swarm.live("0.2")


# -- the process


def test_the_process_ends_with_one_line_that_names_the_task(tmp_path: Path, tmpfs: Path, states):
    """Exit code 1; the traceback is in the log before it."""
    state = states.first()
    (tmp_path / "checkpoints").mkdir()
    states.write(tmp_path / "checkpoints" / "step_0", state)
    states.write(tmp_path / "checkpoints" / "step_1", states.trained(state, 1))
    program = "\n".join(
        [
            "import sys",
            "from p2pcast.store.artifact_store import ArtifactStore",
            "def broken(*_): raise ZeroDivisionError('by a test')",
            "ArtifactStore.seal = broken",
            "from p2pcast.cli import main",
            "main()",
        ]
    )
    options = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--plaintext", "--state", str(tmp_path / "state")]
    options += ["--shadow", str(tmpfs / "shadow")]
    command = [sys.executable, "-c", program, "seed", str(tmp_path / "checkpoints"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("p2pcast: the daemon ended because its task 'seal 0.1' failed: ZeroDivisionError: by a test")
    assert "Traceback" in done.stderr

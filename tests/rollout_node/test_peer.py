"""The second phase of a peer's start, and a peer that has not joined; nothing of it runs."""

from __future__ import annotations

import contextlib
import json

import pytest
from recorder import Recorder
from starting_peer import KEY, options, starting

from p2pcast.ground.errors import RefusedError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.store.artifact_store import ArtifactStore
from p2pcast.wire import messages
from rollout_node import peer as module
from rollout_node.control.run_key_source import KnownRunKey
from rollout_node.peer import build_peer
from tests.p2pcast.store.artifacts_at_hand import begun, put
from tests.support.nothing_left import NothingLeft, StepError, failing

NODE, HUB = b"n" * 16, b"h" * 16
PLACE = (NODE, "192.0.2.1", 7)
FRESH, RESUMED = KnownRunKey(KEY.public), KnownRunKey(KEY.public, resumed=True)
PARENT_DIALS = Recorder(purpose="data", role="parent", stripes=1)


@contextlib.asynccontextmanager
async def peer(config, key=FRESH):
    async with starting(config) as startup:
        yield await build_peer(startup, key)


def save(config, **facts):
    (config.state / "peer.json").write_text(json.dumps(facts))


async def test_links_for_versions_are_accepted_once_the_peer_is_built(tmp_path):
    async with starting(options(tmp_path)) as startup:
        with pytest.raises(RetryableError, match="not joined yet"):
            startup.acceptor.accept_link(Recorder(remote=NODE), PARENT_DIALS)
        await build_peer(startup, FRESH)
        with pytest.raises(RefusedError, match="was not asked to dial"):
            startup.acceptor.accept_link(Recorder(remote=NODE), PARENT_DIALS)


async def test_the_bearer_file_admits_to_the_http_server(tmp_path):
    config = options(tmp_path)
    async with peer(config) as built:
        assert (config.state / "http.token").read_text() == f"{built.http.access.bearer}\n"


async def test_a_bearer_that_the_hub_names_later_is_served_and_saved(tmp_path):
    config = options(tmp_path)
    async with peer(config) as built:
        built.startup.bearer.replace("b" * 40)
        assert built.http.access.bearer == "b" * 40
        await built.tasks.end()
        assert (config.state / "http.token").read_text() == f"{'b' * 40}\n"


async def test_partly_received_artifacts_are_resumed(tmp_path):
    config = options(tmp_path)
    assembly, _ = begun(ArtifactStore(config.state, KEY.public), "delta", [0])
    async with peer(config) as built:
        holding = built.node.holdings[assembly.open.artifact]
        assert holding.incomplete
        assert holding.artifact.held.count == 1


async def test_a_damaged_artifact_is_named_and_ends_no_peer(tmp_path, caplog):
    config = options(tmp_path)
    stored, _ = put(ArtifactStore(config.state, KEY.public), "delta", 1)
    stored.path.write_bytes(b"damaged")
    async with peer(config) as built:
        assert built.node.holdings == {}
    assert f"not used: {stored.path}" in caplog.text


SAVED = {
    "commit": "barrier",
    "target": "0.3",
    "hold": "0.4",
    "neighbourhood": {"hub": HUB.hex(), "parent": [NODE.hex(), *PLACE[1:]], "backups": [], "neighbours": []},
}


async def test_a_start_without_the_hub_follows_its_last_orders(tmp_path):
    config = options(tmp_path)
    save(config, **SAVED)
    async with peer(config, RESUMED) as built:
        orders = built.startup.orders
        assert (orders.commits, orders.target, orders.hold) == ("barrier", Version(0, 3), Version(0, 4))
        assert built.relay.parent_failover.orders.parent == PLACE
        assert built.startup.hub_session.hub == HUB


async def test_a_start_with_the_hub_does_not_follow_old_orders(tmp_path):
    config = options(tmp_path)
    save(config, **SAVED)
    async with peer(config) as built:
        orders = built.startup.orders
        assert (orders.commits, orders.target, orders.hold) == ("auto", None, None)


async def test_every_message_of_the_hub_has_one_handler(tmp_path):
    async with peer(options(tmp_path)) as built:
        built.startup.dispatcher.begin(built._handlers)
        built.startup.dispatcher.on_hub_message(messages.Hold(Version(0, 3)))
        assert built.startup.orders.hold == Version(0, 3)


async def test_a_new_peer_serves_no_version(tmp_path):
    async with peer(options(tmp_path)) as built:
        assert (built.shadow, built.staged, built.committed) == (None, None, None)
        assert built.status()["name"] == "a"


async def test_a_peer_that_has_not_joined_drains_at_once(tmp_path):
    async with peer(options(tmp_path)) as built:
        await built.drain()
        assert not built.sync.activity.draining


STEPS = [
    "ArtifactStore",
    "build_relay",
    "build_engines",
    "build_sync",
    "Receivers",
    "PeerView",
    "Reporter",
    "HttpServer",
]


@pytest.mark.parametrize("step", STEPS)
async def test_nothing_is_left_open_where_a_step_fails(tmp_path, monkeypatch, step):
    config = options(tmp_path)
    store = ArtifactStore(config.state, KEY.public)
    put(store, "anchor", 1)
    begun(store, "delta", [0])
    monkeypatch.setattr(module, step, failing)
    async with NothingLeft(tmp_path):
        with pytest.raises(StepError):
            async with peer(config):
                pass

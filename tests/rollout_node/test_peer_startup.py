"""The first phase of a peer's start, with its real parts over loopback; nothing of it runs."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from starting_peer import HUB, KEY, RUN, TOKEN, Hub, mirror_in, options, starting

from p2pcast.ground.errors import LocalError, RefusedError, UsageError
from p2pcast.ground.version import Version
from p2pcast.trust.certificate_authority import Authority
from p2pcast.trust.certificates import fingerprint, new_key
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.dial_permissions import Certified
from p2pcast.wire import messages
from rollout_node import peer_startup
from rollout_node.control.peer_certificate import FILE as CERTIFICATE
from rollout_node.control.run_key_source import KnownRunKey
from tests.support.nothing_left import NothingLeft, StepError, failing, listening_at

NODE = bytes(range(16))
OTHER = b"o" * 16


def state_of(folder):
    return json.loads((folder / "peer" / "peer.json").read_text())


async def test_a_peer_listens_from_the_start_and_until_its_end(tmp_path):
    async with starting(options(tmp_path)) as startup:
        address = startup.listener.address
        assert listening_at(address)
    assert not listening_at(address)


async def test_a_state_folder_keeps_its_node(tmp_path):
    async with starting(options(tmp_path)) as first:
        assert state_of(tmp_path)["node"] == first.identity.node.hex()
    async with starting(options(tmp_path)) as second:
        assert second.identity.node == first.identity.node
    async with starting(options(tmp_path, state=tmp_path)) as other:
        assert other.identity.node != first.identity.node


async def test_the_hub_is_joined_with_this_peers_facts_and_gives_the_key(tmp_path):
    async with Hub() as hub, starting(options(tmp_path, hub=hub.address, region="eu")) as startup:
        assert await startup.run_key.obtain() == KnownRunKey(KEY.public)
        [join] = hub.joined
        assert (join.name, join.region, join.listen[1]) == ("a", "eu", startup.listener.address[1])
        assert (join.held, join.engine) == (None, None)
        assert startup.hub_session.hub == HUB
        assert startup.welcome.hub_key == KEY.public
        assert startup.bearer.token == "b" * 40
    assert state_of(tmp_path)["key"] == KEY.public.hex()


async def test_a_peer_that_ends_leaves_the_hub(tmp_path):
    async with Hub() as hub:
        async with starting(options(tmp_path, hub=hub.address)) as startup:
            await startup.run_key.obtain()
        assert startup.hub_session.left
        assert not startup.hub_session.connected


async def test_a_run_without_a_hub_starts_from_its_mirror_and_does_not_listen(tmp_path):
    async with starting(options(tmp_path, hub=None, mirror=mirror_in(tmp_path))) as startup:
        assert await startup.run_key.obtain() == KnownRunKey(KEY.public, mirror_now=True)
        assert startup.listener.address == ("", 0)
        assert not startup.hub_session.connected


async def test_a_mirror_with_another_runs_key_is_refused(tmp_path):
    other = replace(TOKEN, run=bytes(16))
    async with starting(options(tmp_path, hub=None, token=other, mirror=mirror_in(tmp_path, bytes(16)))) as startup:
        with pytest.raises(RefusedError, match="not the one that the token names"):
            await startup.run_key.obtain()


async def test_messages_for_parts_of_the_second_phase_are_kept(tmp_path):
    async with starting(options(tmp_path)) as startup:
        held = []
        startup.dispatcher.on_hub_message(messages.Hold(Version(0, 3)))
        startup.dispatcher.begin({messages.Hold: held.append})
        assert held == [messages.Hold(Version(0, 3))]


async def test_a_plain_text_peer_ignores_certificates(tmp_path):
    async with starting(options(tmp_path)) as startup:
        startup.dispatcher.begin({})
        startup.dispatcher.on_hub_message(messages.Issued(b"certificate"))
        assert startup.certificate is None
        assert startup.dialling_tls is None


# -- evictions


async def test_evicted_nodes_stay_evicted_after_a_restart(tmp_path):
    async with starting(options(tmp_path)) as startup:
        startup.dispatcher.on_hub_message(messages.Evicted([OTHER]))
        assert OTHER in startup.identity.evicted
    async with starting(options(tmp_path)) as again:
        assert OTHER in again.identity.evicted


async def test_evictions_of_an_earlier_release_count(tmp_path):
    config = options(tmp_path)
    (config.state / "peer.json").write_text(json.dumps({"evicted": [OTHER.hex()]}))
    async with starting(config) as startup:
        assert OTHER in startup.identity.evicted


# -- TLS


class Authorized:
    """A peer with a certificate in its state folder."""

    def __init__(self, folder) -> None:
        self.authority = Authority.create(RUN, time.time())
        token = replace(TOKEN, authority=fingerprint(self.authority.certificate))
        self.config = options(folder, token=token, plaintext=False)
        (self.config.state / "peer.json").write_text(json.dumps({"node": NODE.hex()}))
        self.key, now = new_key(), time.time()
        Credentials(self.key, self.issued(), self.authority.certificate, now).save(self.config.state / CERTIFICATE)

    def issued(self, key=None, life_s=900.0) -> bytes:
        public = (self.key if key is None else key).public_key()
        return self.authority.issue(public, Certified(RUN, NODE, "peer"), time.time(), life_s)


async def test_the_certificate_in_the_state_folder_is_taken(tmp_path):
    peer = Authorized(tmp_path)
    async with starting(peer.config) as startup:
        assert startup.certificate.until > time.time()
        assert startup.dialling_tls is startup.certificate.tls.client


async def test_a_renewed_certificate_is_taken(tmp_path):
    peer = Authorized(tmp_path)
    async with starting(peer.config) as startup:
        before = startup.certificate.until
        startup.dispatcher.on_hub_message(messages.Issued(peer.issued(life_s=9000.0)))
        await startup.tasks.end()
        assert startup.certificate.until > before + 900


async def test_a_wrong_certificate_of_the_hub_ends_no_peer(tmp_path, caplog):
    peer = Authorized(tmp_path)
    async with starting(peer.config) as startup:
        before = startup.certificate.until
        startup.dispatcher.on_hub_message(messages.Issued(peer.issued(new_key())))
        await startup.tasks.end()
        assert startup.certificate.until == before
        assert startup.tasks.failures == []
    assert [r.levelno for r in caplog.records if r.getMessage().startswith("certificate: ")] == [logging.WARNING]


# -- starts that fail


@contextlib.contextmanager
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()


async def test_a_taken_port_is_named_and_nothing_is_left_open(tmp_path):
    with taken_port() as address:
        async with NothingLeft(tmp_path):
            with pytest.raises(LocalError, match=f"cannot listen on 127.0.0.1:{address[1]}"):
                async with starting(options(tmp_path, listen=address)):
                    pass


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"plaintext": False}, UsageError, "was started with --plaintext"),
        ({"mirror": "http://bucket"}, UsageError, "is not a mirror"),
        ({"base": Path("no-such-folder")}, LocalError, "no-such-folder"),
    ],
)
async def test_wrong_options_are_refused_and_nothing_is_left_open(tmp_path, changes, error, why):
    async with NothingLeft(tmp_path):
        with pytest.raises(error, match=why):
            async with starting(options(tmp_path, **changes)):
                pass


async def test_a_damaged_state_file_is_named_and_nothing_is_left_open(tmp_path):
    config = options(tmp_path)
    (config.state / "peer.json").write_text("{")
    async with NothingLeft(tmp_path):
        with pytest.raises(LocalError, match="damaged"):
            async with starting(config):
                pass


STEPS = [
    "claim", "sweep", "Timeline", "StateFile", "EvictionLog", "node_id", "ShadowState", "Staging", "SavedHubState",
    "BearerFile", "Identity", "PeerLinkAcceptor", "Listener", "HubOrders", "ArtifactCatalog", "HubWelcome",
    "EvictionHandler", "Dispatcher", "HubSession", "Objects", "MirrorCatalog", "Staging.warm_up", "RunKeySource",
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
async def test_nothing_is_left_open_where_a_step_fails(tmp_path, monkeypatch, step):
    config = options(tmp_path, mirror=mirror_in(tmp_path))
    monkeypatch.setattr(f"{peer_startup.__name__}.{step}", failing)
    async with NothingLeft(tmp_path):
        with pytest.raises(StepError):
            async with starting(config):
                pass


async def test_nothing_is_left_open_after_the_end(tmp_path):
    async with NothingLeft(tmp_path), Hub() as hub, starting(options(tmp_path, hub=hub.address)) as startup:
        await startup.run_key.obtain()

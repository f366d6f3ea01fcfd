"""A peer of a plain-text run, as far as a test starts it: options, state folder, and a hub that answers JOIN."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from p2pcast.artifact import RunKey, run_id
from p2pcast.mirror.object_names import KEY as KEY_OBJECT
from p2pcast.mirror.object_names import run_folder
from p2pcast.process.background_tasks import Tasks
from p2pcast.process.events import Events
from p2pcast.transport.link import QuietOwner
from p2pcast.transport.listener import Listener
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire import messages
from p2pcast.wire.connection import Identity, Message
from rollout_node.peer_config import PeerConfig
from rollout_node.peer_startup import Startup, start_up

KEY = RunKey(bytes([5]) * 32)
RUN = run_id(KEY.public)
TOKEN = JoinToken(RUN, bytes(20))
HUB = b"h" * 16
NO_HUB = ("127.0.0.1", 1)
"""Nothing listens there."""


def options(folder: Path, **changes: Any) -> PeerConfig:
    """A peer that installs into a folder and listens on a free port."""
    state = folder / "peer"
    state.mkdir(mode=0o700, exist_ok=True)
    given: dict[str, Any] = {
        "hub": NO_HUB,
        "token": TOKEN,
        "targets": (f"safetensors:{folder / 'out'}",),
        "state": state,
        "shadow": folder / "shadow",
        "name": "a",
        "listen": ("127.0.0.1", 0),
        "plaintext": True,
    }
    return PeerConfig(**given | changes)


@contextlib.asynccontextmanager
async def starting(config: PeerConfig) -> AsyncIterator[Startup]:
    """The first phase of the start, whose parts end with the block."""
    events = Events()
    async with contextlib.AsyncExitStack() as ends:
        yield await start_up(config, events, Tasks(events), ends)


def mirror_in(folder: Path, run: bytes = RUN) -> str:
    """The URL of a mirror that holds the key of ``KEY`` and no version."""
    objects = folder / "mirror" / run_folder(run)
    objects.mkdir(parents=True)
    (objects / KEY_OBJECT).write_bytes(KEY.public)
    return f"file://{folder / 'mirror'}"


class Hub(QuietOwner):
    """Accepts control connections and answers JOIN with WELCOME."""

    def __init__(self) -> None:
        self.joined: list[messages.Join] = []
        self._listener = Listener(self, Identity(HUB, "hub", TOKEN))

    def accept_link(self, link: Any, hello: messages.Hello) -> None: ...

    def on_link_event(self, link: Any, stripe: Any, event: Any) -> None:
        if isinstance(event, Message) and isinstance(event.body, messages.Join):
            self.joined.append(event.body)
            link.send(messages.Welcome(KEY.public, (1, 1), "auto", None, "127.0.0.1", bearer="b" * 40))

    @property
    def address(self) -> tuple[str, int]:
        return self._listener.address

    async def __aenter__(self) -> Hub:
        await self._listener.start("127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listener.stop()

"""``python -m netem.stripes.ends parent|child SETTINGS``: one end of a p2pcast link, at one host.

Speaks in lines of JSON on stdin and stdout. A parent that is told to ``open`` makes a version ready, coded, signed and stored, and listens; ``publish`` lets it go at once. A child that is
told to ``open`` attaches, and for each ``wait`` says when it had verified the whole version. The clock is the machine's, the same at both ends.
Everything is what daemons use: listener, dial, node, feed and store; staging is left out.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from p2pcast import limits
from p2pcast.artifact.packer import Packer
from p2pcast.artifact.records import DELTA, Open, RunKey, run_id
from p2pcast.codec.cell import DENSE
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.daemon import keep_freed_memory
from p2pcast.errors import P2PCastError
from p2pcast.relay.downstream import Downstream
from p2pcast.relay.node import Holding, Node
from p2pcast.relay.upstream import Upstream
from p2pcast.store.log import Log
from p2pcast.store.store import Store
from p2pcast.transport.dial import dial
from p2pcast.transport.link import Link
from p2pcast.transport.listener import Listener
from p2pcast.transport.sockets import Sockets, window_bytes
from p2pcast.transport.striping import Way, stripes
from p2pcast.version import Version
from p2pcast.wire.connection import Identity
from p2pcast.wire.messages import Body
from p2pcast.wire.token import Token

CELL_BYTES = limits.MIB // 2
DIAL_S = 30.0
"""A lossy way may take several tries for one of many stripes."""


class End:
    """A node with a store and no staging."""

    def __init__(self, folder: Path, order: dict[str, Any]) -> None:
        self.key = RunKey(bytes.fromhex(order["key"]))
        self.store = Store(folder, self.key.public)
        self.node = Node(self, secrets.token_bytes(16), self.key.public)
        self.downstream = Downstream(self.node)
        self.identity = Identity(self.node.ident, "end", Token(run_id(self.key.public), bytes.fromhex(order["secret"])))
        self.sockets = Sockets(order["congestion"], order["buffer_bytes"])
        self.layout = Layout([Tensor("w", "U8", (order["bytes"],))], cell_words=CELL_BYTES)
        self.node.add_layout(self.layout)
        self.complete = asyncio.Event()

    # NodeOwner
    def make_log(self, open_: Open, layout: Layout) -> Log:
        return self.store.begin(open_, layout)

    def on_opened(self, holding: Holding) -> None: ...

    def on_complete(self, holding: Holding) -> None:
        self.complete.set()

    def on_aborted(self, holding: Holding) -> None: ...

    def on_offered(self, upstream: Upstream) -> None: ...

    def on_upstream_lost(self, upstream: Upstream, error: P2PCastError | None) -> None: ...

    # Acceptor
    def accept_link(self, link: Link, hello: Body) -> None:
        link.owner = self.downstream
        self.downstream.accept(link)

    def on_link_event(self, link: Link, stripe: Any, event: Any) -> None: ...

    def on_link_read(self, link: Link, payload_bytes: int) -> None: ...

    def on_link_writable(self, link: Link, stripe: Any) -> None: ...

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None: ...


class Parent(End):
    def __init__(self, folder: Path, order: dict[str, Any]) -> None:
        super().__init__(folder, order)
        self.listener = Listener(self, self.identity, sockets=self.sockets)
        self._payload = np.random.default_rng(1).bytes(CELL_BYTES)
        self._step = 0

    def prepare(self) -> None:
        """The next version: in its log and signed, and nobody told of it."""
        self._step += 1
        versions = Version(0, self._step - 1), Version(0, self._step)
        record = Open(
            secrets.token_bytes(16), versions[0], DELTA, self.layout.layout_id, limits.PIECE_BYTES,
            run_id(self.key.public), versions[1],
        )  # fmt: skip
        self._packer = Packer(self.key, record, self.layout)
        self._log = self.store.begin(record, self.layout)
        for cell in self.layout.cells:
            payload = self._payload[: cell.words]
            self._log.write(self._packer.log_bytes, [payload])
            self._packer.add_cell(cell.index, DENSE, payload, 0, 1)
        *self._batches, self._manifest = self._packer.seal(len(self.layout.cells))

    def publish(self) -> float:
        """When it began."""
        began = asyncio.get_running_loop().time()
        holding = self.node.open(self._packer.open_signed, None, self._log)
        for batch in self._batches:
            self.node.add_local(holding, batch)
        self.node.seal(holding, self._manifest)
        return began

    def sent(self) -> dict[str, Any]:
        infos = [
            info for c in self.downstream.children.values() for s in c.link.stripes.values() if (info := s.info()) is not None
        ]
        return {
            "stripes_in_use": max((c.link.in_use for c in self.downstream.children.values()), default=0),
            "sent_bytes": sum(i.sent_bytes for i in infos),
            "retransmitted_bytes": sum(i.retransmitted_bytes for i in infos),
            "rtt_s": max((i.rtt_s for i in infos), default=None),
        }


async def parent(folder: Path, order: dict[str, Any]) -> None:
    end = Parent(folder, order)
    await end.listener.start("0.0.0.0", 0)
    running = [asyncio.ensure_future(end.node.run()), asyncio.ensure_future(end.downstream.run())]
    say(listening=end.listener.address[1])
    while (told := await heard()) and "close" not in told:
        if "prepare" in told:
            end.prepare()
            say(prepared=True)
        else:
            say(began=end.publish())
    say(sent=end.sent())
    await _finish(end, running)
    await end.listener.stop()


async def child(folder: Path, order: dict[str, Any]) -> None:
    end = End(folder, order)
    loop = asyncio.get_running_loop()
    running = [asyncio.ensure_future(end.node.run())]
    upstream = Upstream(end.node, live=True)
    link = await dial(
        upstream, order["address"], order["port"], end.identity,
        purpose="data", role="child", stripes=order["stripes"] or partial(own_choice, order["congestion"]), sockets=end.sockets, timeout_s=DIAL_S,
    )  # fmt: skip
    upstream.start(link)
    watching = asyncio.ensure_future(upstream.run())
    await upstream.attached.wait()
    say(attached=True)
    while (told := await heard()) and "close" not in told:
        before = upstream.bytes_received if told["fresh"] else 0
        whole = asyncio.ensure_future(end.complete.wait())
        await asyncio.wait([watching, whole], timeout=told["wait"], return_when=asyncio.FIRST_COMPLETED)
        at, done = loop.time(), whole.done()
        whole.cancel()
        end.complete.clear()
        left = str(watching.result() or "the link was closed") if watching.done() else None
        say(received={"at": at, "whole": done, "bytes": upstream.bytes_received - before, "left": left})
    link.abort()
    await asyncio.wait([watching])
    await _finish(end, running)
    say(closed=True)


def own_choice(congestion: str, rtt_s: float) -> int:
    """What a peer dials by itself that has received nothing yet."""
    return stripes(Way(rtt_s, 0.0, congestion, window_bytes()))


async def _finish(end: End, running: Sequence[asyncio.Future[None]]) -> None:
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    end.downstream.close()
    end.node.close()


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


async def heard() -> dict[str, Any]:
    """The next order; empty at the end."""
    line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    told: dict[str, Any] = json.loads(line or "{}")
    return told


def main() -> None:
    role = {"parent": parent, "child": child}[sys.argv[1]]
    settings = json.loads(sys.argv[2])
    keep_freed_memory()
    say(ready=True)
    while line := sys.stdin.readline():
        # In a folder of whoever started this, who removes it also where this is killed.
        with tempfile.TemporaryDirectory(dir=settings["folder"]) as folder:
            uvloop.run(role(Path(folder), json.loads(line)))


if __name__ == "__main__":
    main()

"""``python -m netem.stripes.ends parent|child SETTINGS``: one end of a p2pcast link, at one host.

Each end reads orders and writes answers as lines of JSON on stdin and stdout. The first order of a link describes the
link; a parent then listens and a child attaches. ``prepare`` makes a parent encode, sign and store a version;
``publish`` announces it at once. For each ``wait`` a child answers when it had verified the whole version, and how many
bytes had arrived by then. ``close`` ends the link; another link may follow. Both ends share the machine's clock. The
listener, dial, node, feed and store are those of the daemons; staging is left out.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from netem.stripes.link_end import CELL_BYTES, End
from p2pcast.artifact.packer import Packer
from p2pcast.artifact.run_key import RunKey
from p2pcast.codec.cell import DENSE
from p2pcast.process import event_loop
from p2pcast.process.daemon_process import keep_freed_memory
from p2pcast.relay.upstream import Upstream
from p2pcast.transport.dial import dial
from p2pcast.transport.link import QuietOwner
from p2pcast.transport.listener import Listener
from p2pcast.transport.socket_options import Sockets, window_bytes
from p2pcast.transport.stripe_count import NetworkPath, stripes

DIAL_S = 30.0
"""A lossy path may need several attempts for one of many stripes."""


class ConfiguredEnd(End):
    """A link end with the settings of its order."""

    def __init__(self, folder: Path, order: dict[str, Any]) -> None:
        super().__init__(
            folder, RunKey(bytes.fromhex(order["key"])), bytes.fromhex(order["secret"]), "end", order["bytes"]
        )
        self.sockets = Sockets(order["congestion"], order["buffer_bytes"])


class StripesParent(ConfiguredEnd):
    def __init__(self, folder: Path, order: dict[str, Any]) -> None:
        super().__init__(folder, order)
        self.listener = Listener(self, self.identity, sockets=self.sockets)
        self._payload = np.random.default_rng(1).bytes(CELL_BYTES)
        self._step = 0

    def prepare(self) -> None:
        """Log and sign the next version without announcing it."""
        self._step += 1
        record = self.record(self._step)
        self._packer = Packer(self.key, record, self.layout)
        self._log = self.store.begin(record, self.layout)
        for cell in self.layout.cells:
            payload = self._payload[: cell.words]
            self._log.write(self._packer.log_bytes, [payload])
            self._packer.add_cell(cell.index, DENSE, payload, 0, 1)
        *self._batches, self._manifest = self._packer.seal(len(self.layout.cells))

    def publish(self) -> float:
        """Announce the version; returns the time at which that began."""
        began = asyncio.get_running_loop().time()
        holding = self.node.open(self._packer.open_signed, None, self._log)
        for batch in self._batches:
            self.node.add_local(holding, batch)
        self.node.seal(holding, self._manifest)
        return began

    def sent(self) -> dict[str, Any]:
        infos = [
            info
            for c in self.downstream.children.values()
            for s in c.link.stripes.values()
            if (info := s.info()) is not None
        ]
        return {
            "stripes_in_use": max((c.link.in_use for c in self.downstream.children.values()), default=0),
            "sent_bytes": sum(i.sent_bytes for i in infos),
            "retransmitted_bytes": sum(i.retransmitted_bytes for i in infos),
            "rtt_s": max((i.rtt_s for i in infos), default=None),
        }


async def parent(folder: Path, order: dict[str, Any]) -> None:
    end = StripesParent(folder, order)
    await end.listener.start("0.0.0.0", 0)
    running = [asyncio.ensure_future(end.node.run()), asyncio.ensure_future(end.downstream.run())]
    write_facts(listening=end.listener.address[1])
    while (order := await next_order()) and "close" not in order:
        if "prepare" in order:
            end.prepare()
            write_facts(prepared=True)
        else:
            write_facts(began=end.publish())
    write_facts(sent=end.sent())
    await _finish(end, running)
    await end.listener.stop()


async def child(folder: Path, order: dict[str, Any]) -> None:
    end = ConfiguredEnd(folder, order)
    loop = asyncio.get_running_loop()
    running = [asyncio.ensure_future(end.node.run())]
    link = await dial(
        QuietOwner(),
        order["address"],
        order["port"],
        end.identity,
        purpose="data",
        role="child",
        stripes=order["stripes"] or partial(own_choice, order["congestion"]),
        sockets=end.sockets,
        timeout_s=DIAL_S,
    )
    upstream = Upstream(end.node, link, live=True)
    upstream.start()
    watching = asyncio.ensure_future(upstream.run())
    await upstream.attached.wait()
    write_facts(attached=True)
    # All bytes since the previous version belong to this one, also those received before this order was read.
    before = 0
    while (order := await next_order()) and "close" not in order:
        whole = asyncio.ensure_future(end.complete.wait())
        await asyncio.wait([watching, whole], timeout=order["wait"], return_when=asyncio.FIRST_COMPLETED)
        at, done = loop.time(), whole.done()
        whole.cancel()
        end.complete.clear()
        came, before = upstream.bytes_received - before, upstream.bytes_received
        left = str(watching.result() or "the link was closed") if watching.done() else None
        write_facts(received={"at": at, "whole": done, "bytes": came, "left": left})
    link.abort()
    await asyncio.wait([watching])
    await _finish(end, running)
    write_facts(closed=True)


def own_choice(congestion: str, rtt_s: float) -> int:
    """The stripe count that a peer dials with before it has received anything."""
    return stripes(NetworkPath(rtt_s, 0.0, congestion, window_bytes()))


async def _finish(end: End, running: Sequence[asyncio.Future[None]]) -> None:
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    end.downstream.close()
    end.node.close()


def write_facts(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


async def next_order() -> dict[str, Any]:
    """The next order; empty at end of input."""
    line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    order: dict[str, Any] = json.loads(line or "{}")
    return order


def main() -> None:
    role = {"parent": parent, "child": child}[sys.argv[1]]
    settings = json.loads(sys.argv[2])
    keep_freed_memory()
    write_facts(ready=True)
    while line := sys.stdin.readline():
        # Work in a folder of the starting process, which removes the folder even if this process is killed.
        with tempfile.TemporaryDirectory(dir=settings["folder"]) as folder:
            event_loop.run(role(Path(folder), json.loads(line)))


if __name__ == "__main__":
    main()

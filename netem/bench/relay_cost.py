"""CPU and memory of a peer in the middle of a chain: source → middle → sink, each a separate process, over loopback
sockets.

The source produces at a fixed rate, as an encoder does, so that the processes do not starve each other of cores. The
figure is work per byte; a faster source would measure queues. The middle process does the work of a relay (receive,
verify, forward, store) and nothing else: staging is off. CPU is user + system time of its process between attaching and
the last stored byte (getrusage), over the payload. Memory is its largest anonymous resident set (RssAnon), so page
cache does not count.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import secrets
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np

from netem.bench import bare_relay
from netem.bench.measuring import Peak
from netem.stripes.link_end import CELL_BYTES, End
from p2pcast.artifact.packer import Packer
from p2pcast.artifact.piece_size import piece_bytes
from p2pcast.artifact.run_key import RunKey
from p2pcast.artifact.signed_records import run_id
from p2pcast.codec.cell import DENSE
from p2pcast.ground.errors import RetryableError
from p2pcast.process import event_loop
from p2pcast.process.daemon_process import keep_freed_memory
from p2pcast.relay.node import Parent
from p2pcast.relay.upstream import Upstream
from p2pcast.transport.dial import dial
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.transport.listener import Listener
from p2pcast.trust.certificate_authority import Authority
from p2pcast.trust.certificates import new_key
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.dial_permissions import Certified
from p2pcast.trust.tls_contexts import Tls
from p2pcast.wire.messages import Hello

DAY_S = 86400.0
UNLIMITED_BPS = 1e12
"""Of a source that produces as fast as it can."""
EMIT_S = 0.02
"""Interval of signed batches, as in the hub's publisher."""


@dataclass(frozen=True, slots=True)
class RelaySetup:
    """Settings of the three processes. ``parent``: the parent's port, None for the source."""

    role: str
    payload_bytes: int
    rate_bps: float
    stripes: int
    secret: bytes
    key: bytes
    parent: int | None
    certificate: Path | None
    """Key and certificates, for TLS."""
    folder: Path
    bare: bool = False
    """Run the least work of any relay (``netem.bench.bare_relay``) instead of p2pcast."""
    cores: int = 1
    """Number of cores of the middle process, which the other processes leave to it if there are more."""

    @property
    def piece_bytes(self) -> int:
        """As a hub chooses it for peers of this rate."""
        return piece_bytes(self.payload_bytes, slowest_bps=self.rate_bps)


class _Relay(End):
    """Accepts every offered artifact. ``attached``: set when a child attaches."""

    def __init__(self, setup: RelaySetup) -> None:
        certificates = None if setup.certificate is None else Credentials.load(setup.certificate)
        self.setup = setup
        self.tls = None if certificates is None else Tls(certificates)
        cells = max(1, setup.payload_bytes // CELL_BYTES)
        super().__init__(
            setup.folder,
            RunKey(setup.key),
            setup.secret,
            setup.role,
            cells * CELL_BYTES,
            None if certificates is None else certificates.who.node,
        )
        self.listener = Listener(self, self.identity, None if self.tls is None else self.tls.server)
        self.attached = asyncio.Event()

    def on_offered(self, upstream: Parent) -> None:
        for artifact in upstream.offers:
            upstream.want(artifact)

    def accept_link(self, link: Link, hello: Hello) -> None:
        super().accept_link(link, hello)
        self.attached.set()

    async def publish(self) -> None:
        """Random payload as one delta, cell by cell."""
        record = self.record(1, self.setup.piece_bytes)
        packer = Packer(self.key, record, self.layout)
        log = self.store.begin(record, self.layout)
        holding = self.node.open(packer.open_signed, None, log)
        random = np.random.default_rng(1)
        loop = asyncio.get_running_loop()
        began = emitted = loop.time()
        for cell in self.layout.cells:
            payload = random.bytes(cell.nbytes)
            await loop.run_in_executor(None, log.write, packer.log_bytes, [payload])
            packer.add_cell(cell.index, DENSE, payload, 0, 1)
            if loop.time() - emitted > EMIT_S:
                while (batch := packer.take_batch()) is not None:
                    self.node.add_local(holding, batch)
                emitted = loop.time()
            await asyncio.sleep(max(0.0, began + 8 * packer.log_bytes / self.setup.rate_bps - loop.time()))
        *batches, manifest = packer.seal(len(self.layout.cells))
        for batch in batches:
            self.node.add_local(holding, batch)
        self.node.seal(holding, manifest)

    async def receive(self) -> None:
        assert self.setup.parent is not None
        link = await dial(
            QuietOwner(),
            "127.0.0.1",
            self.setup.parent,
            self.identity,
            purpose="data",
            role="child",
            stripes=self.setup.stripes,
            tls=None if self.tls is None else self.tls.client,
        )
        upstream = Upstream(self.node, link, live=True)
        upstream.start()
        watching = asyncio.ensure_future(upstream.run())
        whole = asyncio.ensure_future(self.complete.wait())
        await asyncio.wait([watching, whole], return_when=asyncio.FIRST_COMPLETED)
        if not whole.done():
            whole.cancel()
            raise RetryableError(f"{self.setup.role} lost its parent: {watching.result()}")
        watching.cancel()


def _pin(setup: RelaySetup) -> None:
    """Give the middle process cores of its own, if there are enough: moves between cores add to the measured work."""
    cores = sorted(os.sched_getaffinity(0))
    own, others = cores[-setup.cores :], cores[: -setup.cores]
    os.sched_setaffinity(0, own if setup.role == "middle" else others or cores)


def _cpu_s() -> tuple[float, float]:
    """(user mode, kernel)."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime, used.ru_stime


def _process(setup: RelaySetup, pipe: Pipe) -> None:
    _pin(setup)
    keep_freed_memory()
    event_loop.run(_bare(setup, pipe) if setup.bare else _p2pcast(setup, pipe))


class _Meter:
    """CPU, time and memory of this process between construction and ``figures``."""

    def __init__(self) -> None:
        self._peak = Peak()
        self._peak.start()
        self._cpu, self._loop, self._began = _cpu_s(), time.thread_time(), time.monotonic()

    def figures(self) -> dict[str, float]:
        user_s, kernel_s = (after - before for after, before in zip(_cpu_s(), self._cpu, strict=True))
        return {
            "user_s": user_s,
            "kernel_s": kernel_s,
            "loop_s": time.thread_time() - self._loop,
            "wall_s": time.monotonic() - self._began,
            "rss": self._peak.stop(),
        }


async def _wait_order(pipe: Pipe) -> None:
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)


async def _p2pcast(setup: RelaySetup, pipe: Pipe) -> None:
    relay = _Relay(setup)
    await relay.listener.start("127.0.0.1", 0)
    running = [asyncio.ensure_future(relay.node.run()), asyncio.ensure_future(relay.downstream.run())]
    pipe.send(relay.listener.address[1])
    await _wait_order(pipe)
    meter = _Meter()
    if setup.parent is not None:
        await relay.receive()
    else:
        await relay.attached.wait()
        await relay.publish()
    pipe.send(meter.figures())
    await _wait_order(pipe)
    for task in running:
        task.cancel()
    relay.downstream.close()
    await relay.listener.stop()
    relay.node.close()


async def _bare(setup: RelaySetup, pipe: Pipe) -> None:
    loop = asyncio.get_running_loop()
    size = setup.payload_bytes
    tls = None if setup.certificate is None else Tls(Credentials.load(setup.certificate))
    dialling, listening = (None, None) if tls is None else (tls.client, tls.server)
    if setup.role == "source":
        pipe.send(setup.parent)
        await _wait_order(pipe)
        assert setup.parent is not None
        await bare_relay.send(setup.parent, size, setup.rate_bps, dialling)
        return
    node: bare_relay.Counter | bare_relay.Forwarder
    if setup.role == "sink":
        node = bare_relay.Counter(size)
    else:
        assert setup.parent is not None
        child, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", setup.parent, ssl=dialling)
        node = bare_relay.Forwarder(size, setup.piece_bytes, child, setup.folder)
    server = await loop.create_server(lambda: node, "127.0.0.1", 0, ssl=listening)
    pipe.send(server.sockets[0].getsockname()[1])
    await _wait_order(pipe)
    meter = _Meter()
    await node.done.wait()
    pipe.send(meter.figures())
    await _wait_order(pipe)


def run_once(
    payload_bytes: int, rate_bps: float, stripes: int, *, tls: bool, bare: bool = False, cores: int = 1
) -> dict[str, Any]:
    """One transfer through the chain; returns the middle process's figures."""
    context = multiprocessing.get_context("spawn")
    secret, key = secrets.token_bytes(20), secrets.token_bytes(32)
    # The dialling direction decides the order: a peer dials its parent, a bare sender its child.
    order = ("sink", "middle", "source") if bare else ("source", "middle", "sink")
    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-") as name:
        folder = Path(name)
        certificates = _certificates(folder, RunKey(key), order) if tls else {}
        pipes: dict[str, Pipe] = {}
        processes = []
        above: int | None = None
        try:
            for role in order:
                ours, theirs = context.Pipe()
                setup = RelaySetup(
                    role,
                    payload_bytes,
                    rate_bps,
                    stripes,
                    secret,
                    key,
                    above,
                    certificates.get(role),
                    folder / role,
                    bare,
                    cores,
                )
                process = context.Process(
                    target=_process, args=(setup, theirs), name=f"p2pcast-bench-{role}", daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes[role] = ours
                above = int(_answer(ours, role))
            for role in ("sink", "middle", "source"):
                pipes[role].send("go")
            figures: dict[str, Any] = _answer(pipes["middle"], "middle")
            _answer(pipes["sink"], "sink")
            for role in ("sink", "middle") if bare else pipes:
                pipes[role].send("end")
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
    return figures


def _answer(pipe: Pipe, role: str) -> Any:
    try:
        if not pipe.poll(60):
            raise RetryableError(f"the {role} process gave no answer within 60 s")
        return pipe.recv()
    except EOFError:
        raise RetryableError(f"the {role} process ended early; its error stands above") from None


def _certificates(folder: Path, key: RunKey, roles: tuple[str, ...]) -> dict[str, Path]:
    """A certificate for each process, by an authority that ends with the run."""
    now = time.time()
    run = run_id(key.public)
    authority = Authority.create(run, now)
    made: dict[str, Path] = {}
    for role in roles:
        own, who = new_key(), Certified(run, secrets.token_bytes(16), "peer")
        issued = authority.issue(own.public_key(), who, now, DAY_S)
        made[role] = folder / f"{role}.pem"
        Credentials(own, issued, authority.certificate, now).save(made[role])
    return made


def bench_relay(payload_bytes: int, rate_bps: float, stripes: int, runs: int) -> dict[str, Any]:
    """Bare and p2pcast, plaintext and TLS in turns, ``runs`` times; medians of the CPU figures (seconds a GB), the
    largest memory (bytes).
    """
    rows: list[dict[str, Any]] = []
    for number in range(runs):
        for link in ("bare", "bare tls", "plaintext", "tls"):
            figures = run_once(payload_bytes, rate_bps, stripes, tls="tls" in link, bare="bare" in link)
            gb = payload_bytes / 1e9
            rows.append(
                {
                    "run": number,
                    "link": link,
                    "cpu_s_per_gb": round((figures["user_s"] + figures["kernel_s"]) / gb, 4),
                    "kernel_s_per_gb": round(figures["kernel_s"] / gb, 4),
                    "gb_s": round(gb / figures["wall_s"], 3),
                    "peak_rss_bytes": figures["rss"],
                }
            )

    def median(link: str) -> float:
        return _median(r["cpu_s_per_gb"] for r in rows if r["link"] == link)

    bare_s, bare_tls_s = median("bare"), median("bare tls")
    return {
        "payload_bytes": payload_bytes,
        "rate_bps": rate_bps,
        "stripes": stripes,
        "cpu_s_per_gb_bare": bare_s,
        "cpu_s_per_gb_bare_tls": bare_tls_s,
        "cpu_s_per_gb_plaintext": median("plaintext"),
        "cpu_s_per_gb_tls": median("tls"),
        "plaintext_to_bare": round(median("plaintext") / bare_s, 3),
        "tls_to_bare": round(median("tls") / bare_tls_s, 3),
        "peak_rss_bytes": max(r["peak_rss_bytes"] for r in rows if "bare" not in r["link"]),
        "rows": rows,
    }


def bench_wide(payload_bytes: int, stripes: int, runs: int) -> dict[str, Any]:
    """Throughput of one node by its number of cores, without a limit of the source; behind TLS, medians of ``runs``.

    ``loop_s_per_gb``: CPU time of the event loop's thread; the loop can carry no more than its inverse. The source and
    the sink need as much CPU time together as the node, so the throughput is the node's own only where they have cores
    beside it.
    """
    gb = payload_bytes / 1e9
    rows = []
    for cores in range(1, len(os.sched_getaffinity(0)) + 1):
        taken = [run_once(payload_bytes, UNLIMITED_BPS, stripes, tls=True, cores=cores) for _ in range(runs)]
        loop_s = _median(figures["loop_s"] / gb for figures in taken)
        rows.append(
            {
                "cores": cores,
                "gb_s": _median(gb / figures["wall_s"] for figures in taken),
                "cpu_s_per_gb": _median((figures["user_s"] + figures["kernel_s"]) / gb for figures in taken),
                "loop_s_per_gb": loop_s,
                "loop_gb_s": round(1 / loop_s, 4),
            }
        )
    return {"payload_bytes": payload_bytes, "stripes": stripes, "runs": runs, "rows": rows}


def _median(values: Iterable[float]) -> float:
    return round(float(np.median(list(values))), 4)

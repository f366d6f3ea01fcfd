"""A vLLM server that an HTTP server plays: its routes, and ranks that report over the install socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.version import Version
from rollout_node.installers.install_socket import InstallSocket

LAYOUT = Layout([Tensor("w", "U8", (4,))])


def digest_of(held: str) -> int:
    """The digest of the only tensor, of a version's weights."""
    return 100 + Version.parse(held).step


class Provider:
    def layout_document(self) -> bytes:
        return LAYOUT.document

    def report(self, report: Any) -> None: ...


class Rank:
    """A worker. ``live``: the digest of its weights. ``answers``: reports that replace its own, by phase."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.held: str | None = None
        self.before: str | None = None
        self.live = 0
        self.prepared: str | None = None
        self.open = self.pausing = self.doubtful = False
        self.silent: set[str] = set()
        self.answers: dict[str, dict[str, Any]] = {}

    def prepare(self, version: str, *, whole: bool) -> dict[str, Any]:
        self.prepared = version
        found = {"install": "dense", "mark": digest_of(version)}
        if not whole and self.held is not None:
            found |= {
                "install": "sparse",
                "from": self.held,
                "expected": [[0, digest_of(self.held)]],
                "grown": [self.entry],
            }
        return found

    def commit(self, version: str) -> dict[str, Any]:
        self.before, self.held, self.live = self.held, version, digest_of(version)
        return {"held": version, "mark": digest_of(version), "took_us": 5}

    def abort(self) -> dict[str, Any]:
        if self.before is not None:
            self.held, self.live = self.before, digest_of(self.before)
        return {"held": self.held}

    @property
    def entry(self) -> list[Any]:
        return [0, 0, [4], [1], self.live]


class Engine:
    """The server and its ranks. ``calls``: the commands, in order. ``fails``: commands that are refused."""

    def __init__(self, ranks: int, socket: InstallSocket) -> None:
        self.ranks = [Rank(number) for number in range(ranks)]
        self.socket = socket
        self.incarnation = "first"
        self.core = False
        """The engine core can switch by itself."""
        self.resumes = True
        self.label = "none"
        self.paused = False
        self.clears: bool | None = None
        """Whether the last pause emptied the caches."""
        self.calls: list[str] = []
        self.fails: set[str] = set()
        self.idle = asyncio.Event()
        """No request runs."""
        self.idle.set()
        self.draining = asyncio.Event()
        self.answers_health = asyncio.Event()
        self.answers_health.set()
        self.before_commit: Callable[[], None] = lambda: None

    def restart(self) -> None:
        """The ranks hold nothing of the run."""
        self.incarnation, self.label, self.paused = "second", "none", False
        for rank in self.ranks:
            rank.held = rank.before = rank.prepared = None
            rank.open = rank.pausing = False

    def take_calls(self) -> list[str]:
        found, self.calls = self.calls, []
        return found

    async def handle(self, request: web.Request) -> web.StreamResponse:
        name = request.path[1:]
        body = await request.json() if request.can_read_body else None
        if name in ("health", "metrics"):
            await self.answers_health.wait()
            return web.Response()
        if name in self.fails:
            return web.Response(status=500, text="by a test")
        if request.method == "GET":
            found = {"weight_info": {"weight_version": self.label}, "is_paused": {"is_paused": self.paused}}
            return web.json_response(found.get(name, {"world_size": len(self.ranks)}))
        if name == "pause":
            self.clears = request.query["clear_cache"] == "true"
            name = "drain" if request.query["mode"] == "wait" else name
        return web.json_response(await getattr(self, "on_" + name)(body))

    def report(self, rank: Rank, info: dict[str, Any], phase: str, found: dict[str, Any]) -> dict[str, Any]:
        version, nonce = info.get("version"), info["nonce"]
        made = {"engine": info.get("engine", self.engine), "rank": rank.number, "ranks": len(self.ranks)}
        made |= {"phase": phase, "version": version, "nonce": nonce, "error": None, **found}
        return made | rank.answers.get(phase, {})

    def offer(self, rank: Rank, *made: Any) -> None:
        if made[1] not in rank.silent:
            self.socket.offer(self.report(rank, *made))

    async def on_init_weight_transfer_engine(self, body: Any) -> None:
        info = body["init_info"]
        self.engine = info["engine"]
        self.calls += ["note a pause"] * info["pausing"] + ["forget"] * info["forget"]
        for rank in self.ranks:
            rank.pausing |= info["pausing"]
            if info["forget"]:
                rank.held = None
            found = {"held": rank.held, "open": rank.open, "prepared": rank.prepared, "pausing": rank.pausing}
            found |= {"doubtful": rank.doubtful, "incarnation": self.incarnation, "core": self.core}
            self.offer(rank, info, "init", found)

    async def on_update_weights(self, body: Any) -> None:
        info = body["update_info"]
        phase, version = info["phase"], info["version"]
        self.calls.append(f"{phase} whole" if info["whole"] else phase)
        for rank in self.ranks:
            match phase:
                case "prepare":
                    found = rank.prepare(version, whole=info["whole"])
                case "commit":
                    self.before_commit()
                    found = rank.commit(version)
                case "abort":
                    found = rank.abort()
                case _:
                    found = {"digests": [rank.entry]}
            self.offer(rank, info, phase, found)

    async def on_collective_rpc(self, body: Any) -> Any:
        order = body["kwargs"]
        self.calls.append("switch")
        reports = [
            self.report(rank, order, "commit", rank.commit(order["version"]))
            for rank in self.ranks
            if "commit" not in rank.silent
        ]
        good = all(r["error"] is None and r["mark"] == order["marks"][str(r["rank"])] for r in reports)
        resumed = self.resumes and good and order["ours"]
        if good:
            self.label = order["version"]
        if resumed:
            self._unpause()
        elif order["ours"]:
            self.paused = True
        return {"results": [*reports, {"resumed": resumed, "pause_us": 7}]}

    async def on_start_weight_update(self, body: Any) -> None:
        for rank in self.ranks:
            rank.open = True

    async def on_finish_weight_update(self, body: Any) -> None:
        for rank in self.ranks:
            rank.open = False

    async def on_pause(self, body: Any) -> None:
        self.calls.append("pause")
        self.paused = True

    async def on_drain(self, body: Any) -> None:
        self.calls.append("drain")
        self.paused = True
        self.draining.set()
        await self.idle.wait()

    async def on_resume(self, body: Any) -> None:
        self.calls.append("resume")
        self._unpause()

    def _unpause(self) -> None:
        self.paused = False
        for rank in self.ranks:
            rank.pausing = False

    async def on_update_weight_version(self, body: Any) -> None:
        self.label = body["new_version"]

    async def on_reset_prefix_cache(self, body: Any) -> None:
        self.calls.append("clear caches")

    async def on_reset_encoder_cache(self, body: Any) -> None: ...

"""A SGLang server's HTTP routes, as an installer uses them.

Commands are sent as the ``action`` of ``/weights_checker``: among SGLang's routes to all schedulers, this one accepts
text and does not wait for running requests (``rollout_node.sglang_plugin``).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any, Final

from p2pcast.ground.errors import LocalError, RetryableError
from rollout_node.installers.engine_server import Deadlines, EngineServer
from rollout_node.installers.install_state import StillRunningError
from rollout_node.sglang_plugin import PREFIX, SOCKET_VARIABLE

DRAIN_CHECK_S: Final = 0.05
"""Seconds between a drain's checks whether running requests have finished."""


class SglangServer(EngineServer):
    target = "sglang"
    kind = "SGLang"
    hint = "is this a SGLang server of release 0.5.23 or later?"

    def __init__(self, url: str, name: str | None = None, deadlines: Deadlines | None = None) -> None:
        super().__init__(url, name, deadlines)
        self._paused_by_route = False
        """Whether SGLang's front end may be holding new requests; the one-command switch resumes only the schedulers.
        """

    async def health(self) -> None:
        """Ask the schedulers, because SGLang's own route reports a paused server as unhealthy."""
        await self._ask("state", {}, self.deadlines.request)

    async def answer(self, deadline_s: float) -> None:
        await self._request("GET", "/model_info", None, deadline_s)

    async def world_size(self) -> int:
        """Raises LocalError for a server with data parallelism, because its groups would not switch together, or with
        pipeline parallelism, because its schedulers ignore pauses.
        """
        ranks, groups, stages = await self._ask("state", {}, self.deadlines.request, "ranks", "groups", "stages")
        if groups != 1:
            raise LocalError(f"{self.name}: --dp-size {groups}: run one server for each group of ranks")
        if stages != 1:
            raise LocalError(
                f"{self.name}: --pp-size {stages}: SGLang cannot pause pipeline stages; use --tp-size alone"
            )
        return int(ranks)

    async def label(self) -> str:
        """The label, or both if the front end's differs from the schedulers' because a peer died in between."""
        [version] = await self._ask("state", {}, self.deadlines.request, "version")
        shown = (await self._get("/model_info") or {}).get("weight_version", version)
        return str(version) if shown == version else f"{version}, and {shown} at the front end"

    async def is_paused(self) -> bool:
        [paused] = await self._ask("state", {}, self.deadlines.request, "paused")
        self._paused_by_route |= bool(paused)
        return bool(paused)

    async def cached_tokens(self) -> int | None:
        return None

    async def pause(self, *, clear_cache: bool) -> None:
        self._paused_by_route = True
        await self._post("/pause_generation", {"mode": "retract" if clear_cache else "in_place"}, self.deadlines.commit)
        if clear_cache:
            await self.clear_caches()

    async def drain(self, deadline_s: float) -> None:
        until_s = time.monotonic() + deadline_s
        while not (await self._ask("hold", {}, self.deadlines.request, "over"))[0]:
            if time.monotonic() > until_s:
                raise RetryableError(f"{self.name}: running requests did not end within {deadline_s:g} s")
            await asyncio.sleep(DRAIN_CHECK_S)

    async def resume(self) -> None:
        await self._post("/continue_generation", {"torch_empty_cache": False})
        self._paused_by_route = False

    async def clear_caches(self) -> None:
        """Fails while requests are running that have not been retracted."""
        await self._post("/flush_cache", None, self.deadlines.commit)

    async def set_label(self, version: str) -> None:
        """Set the label in the schedulers, which label tokens, and in the server, which labels whole answers."""
        await self._ask("label", {"version": version}, self.deadlines.request)
        await self._post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def init(self, info: dict[str, Any]) -> None:
        await self._ask("introduce", info, self.deadlines.init)

    async def begin(self) -> None:
        await self._ask("begin", {}, self.deadlines.request)

    async def update(self, info: dict[str, Any], deadline_s: float) -> None:
        await self._ask("obey", info, deadline_s)

    async def switch(
        self, order: dict[str, Any], deadline_s: float
    ) -> tuple[list[Mapping[str, Any]], Mapping[str, Any]]:
        reports, core = await self._ask("switch", order, deadline_s, "reports", "core")
        if core.get("busy"):
            raise StillRunningError(
                f"{self.name}: SGLang cannot drop its cache now, since it compiles a grammar or moves a part of the "
                "cache; the engine keeps its weights, and the switch is tried again"
            )
        if core["resumed"] and self._paused_by_route:
            await self.resume()
        if core["switched"]:
            await self._post("/update_weight_version", {"new_version": order["version"], "abort_all_requests": False})
        return reports, core

    async def finish(self) -> None:
        await self._ask("finish", {}, self.deadlines.request)

    async def _ask(self, do: str, body: Mapping[str, Any], deadline_s: float, *names: str) -> list[Any]:
        """Send a command to every scheduler, and return the values named ``names`` from the first one's answer."""
        action = PREFIX + json.dumps({"do": do, **body})
        text = await self._request("POST", "/weights_checker", {"action": action}, deadline_s)
        try:
            # With data parallelism, the server concatenates the answers of several groups.
            found, _ = json.JSONDecoder().raw_decode(json.loads(text)["message"])
            return [found[name] for name in names]
        except (ValueError, TypeError, KeyError):
            raise LocalError(
                f"{self.name}: p2pcast's plugin does not answer ({text[:200]!r}); install p2pcast where the server "
                f"runs, and start the server with {SOCKET_VARIABLE}"
            ) from None

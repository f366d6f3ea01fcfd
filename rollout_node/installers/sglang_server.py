"""A SGLang server's HTTP routes, as an installer uses them.

Commands go as the ``action`` of ``/weights_checker``. Of SGLang's routes to all schedulers, this one takes text and
does not wait for running requests (``rollout_node.sglang_plugin``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from p2pcast.errors import LocalError
from rollout_node.installers.engine_server import EngineServer
from rollout_node.sglang_plugin import PREFIX, SOCKET_VARIABLE


class SglangServer(EngineServer):
    target = "sglang"
    kind = "SGLang"
    hint = "is this a SGLang server of release 0.5.23 or later?"

    async def health(self) -> None:
        """SGLang's own route calls a paused server unhealthy."""
        await self._ask("state", {}, self.deadlines.request)

    async def world_size(self) -> int:
        """Raises LocalError for a server with data parallelism: its groups would not switch together."""
        ranks, groups = await self._ask("state", {}, self.deadlines.request, "ranks", "groups")
        if groups != 1:
            raise LocalError(f"{self.name}: --dp-size {groups}: run one server for each group of ranks")
        return int(ranks)

    async def label(self) -> str:
        [version] = await self._ask("state", {}, self.deadlines.request, "version")
        return str(version)

    async def is_paused(self) -> bool:
        [paused] = await self._ask("state", {}, self.deadlines.request, "paused")
        return bool(paused)

    async def cached_tokens(self) -> int | None:
        return None

    async def pause(self, *, clear_cache: bool) -> None:
        await self._post("/pause_generation", {"mode": "retract" if clear_cache else "in_place"}, self.deadlines.commit)
        if clear_cache:
            await self.clear_caches()

    async def drain(self, deadline_s: float) -> None:
        raise LocalError(f"{self.name}: SGLang cannot hold new requests while running ones end (--commit-safe-point)")

    async def resume(self) -> None:
        await self._post("/continue_generation", {"torch_empty_cache": False})

    async def clear_caches(self) -> None:
        """Requests that run, and are not retracted, prevent it."""
        await self._post("/flush_cache", None, self.deadlines.commit)

    async def set_label(self, version: str) -> None:
        """In the schedulers, which name versions of tokens, and in the server, which names one for a whole answer."""
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
        if core["switched"]:
            await self._post("/update_weight_version", {"new_version": order["version"], "abort_all_requests": False})
        return reports, core

    async def finish(self) -> None:
        await self._ask("finish", {}, self.deadlines.request)

    async def _ask(self, do: str, body: Mapping[str, Any], deadline_s: float, *names: str) -> list[Any]:
        """A command to every scheduler. Values of the first one's answer, by ``names``."""
        action = PREFIX + json.dumps({"do": do, **body})
        text = await self._request("POST", "/weights_checker", {"action": action}, deadline_s)
        try:
            found = json.loads(json.loads(text)["message"])
            return [found[name] for name in names]
        except (ValueError, TypeError, KeyError):
            raise LocalError(
                f"{self.name}: p2pcast's plugin does not answer ({text[:200]!r}); install p2pcast where the server "
                f"runs, and start the server with {SOCKET_VARIABLE}"
            ) from None

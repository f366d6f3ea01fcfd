"""A vLLM server's HTTP routes, as an installer uses them.

Callers must follow two rules. vLLM's engine executes commands one after the other, so a command that hangs delays all
later ones. With several ranks, an error in one rank leaves an answer unread, and vLLM takes that answer for the next
command's. So callers must not send a command that a rank would refuse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from p2pcast.ground.errors import LocalError, RetryableError
from rollout_node.installers.engine_server import EngineServer

_KV_USAGE = re.compile(r"^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)$", re.MULTILINE)
_KV_CONFIG = re.compile(r"^vllm:cache_config_info\{.*", re.MULTILINE)


class VllmServer(EngineServer):
    target = "vllm"
    kind = "vLLM"
    hint = "start it with VLLM_SERVER_DEV_MODE=1"

    # -- queries

    async def world_size(self) -> int:
        """Number of tensor-, pipeline- and data-parallel ranks."""
        return int((await self._get("/get_world_size"))["world_size"])

    async def label(self) -> str:
        return str((await self._get("/weight_info"))["weight_version"])

    async def is_paused(self) -> bool:
        return bool((await self._get("/is_paused"))["is_paused"])

    async def cached_tokens(self) -> int | None:
        """Tokens in the blocks held by running requests, rounded up to whole blocks, from the server's metrics."""
        try:
            text = await self._request("GET", "/metrics", None, self.deadlines.request)
        except (RetryableError, LocalError):
            return None
        usage, config = _KV_USAGE.findall(text), _KV_CONFIG.search(text)
        sizes = dict(re.findall(r'[{,](block_size|num_gpu_blocks)="(\d+)"', config[0])) if config else {}
        if not usage or len(sizes) != 2:
            return None
        return round(sum(float(u) for u in usage) * int(sizes["block_size"]) * int(sizes["num_gpu_blocks"]))

    # -- commands

    async def pause(self, *, clear_cache: bool) -> None:
        await self._post(
            f"/pause?mode=keep&clear_cache={'true' if clear_cache else 'false'}", None, self.deadlines.commit
        )

    async def drain(self, deadline_s: float) -> None:
        await self._post("/pause?mode=wait&clear_cache=false", None, deadline_s)

    async def resume(self) -> None:
        await self._post("/resume")

    async def clear_caches(self) -> None:
        await self._post(
            "/reset_prefix_cache?reset_running_requests=true&reset_external=true", None, self.deadlines.commit
        )
        await self._post("/reset_encoder_cache", None, self.deadlines.commit)

    async def set_label(self, version: str) -> None:
        await self._post("/update_weight_version", {"new_version": version})

    async def init(self, info: dict[str, Any]) -> None:
        await self._post("/init_weight_transfer_engine", {"init_info": info}, self.deadlines.init)

    async def begin(self) -> None:
        await self._post("/start_weight_update")

    async def update(self, info: dict[str, Any], deadline_s: float) -> None:
        await self._post("/update_weights", {"update_info": info}, deadline_s)

    async def switch(
        self, order: dict[str, Any], deadline_s: float
    ) -> tuple[list[Mapping[str, Any]], Mapping[str, Any]]:
        """Pause, commit and resume in the engine core (``vllm_plugin.engine_core``). Returns the ranks' reports and the
        core's own.
        """
        text = await self._request("POST", "/collective_rpc", {"method": "p2pcast_switch", "kwargs": order}, deadline_s)
        try:
            *reports, core = json.loads(text)["results"]
        except (ValueError, TypeError, KeyError):
            raise LocalError(f"{self.name}: POST /collective_rpc: no reports in the answer {text[:300]!r}") from None
        return reports, core

    async def finish(self) -> None:
        await self._post("/finish_weight_update", {})

"""A vLLM server's HTTP routes, as an installer uses them.

Promise: every request has a deadline, and its failure is one of our errors, with what to do. A RetryableError is for a
server that is away, dying or too slow. A LocalError is for a server that was not started for p2pcast. This module makes
no decisions.

Callers have to keep two rules of vLLM. Its engine executes commands one after the other, so a command that hangs delays
all later commands. With several workers, an error inside one worker leaves an answer unread, and vLLM takes that answer
for the next command's. So callers send no command that a worker would refuse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from p2pcast.errors import LocalError, RetryableError

_KV_USAGE = re.compile(r"^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)$", re.MULTILINE)
_KV_CONFIG = re.compile(r"^vllm:cache_config_info\{.*", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds. The keys:

    - ``init``: learning the mapping.
    - ``prepare``: staging.
    - ``dense``: a whole model under the pause.
    - ``undo``: restoring the previous version.
    - ``report``: reports that ranks sent before the server answered.
    - ``drain``: the end of running requests, with the safe point ``drain``.
    """

    request: float = 30.0
    init: float = 300.0
    prepare: float = 300.0
    commit: float = 60.0
    dense: float = 1800.0
    undo: float = 30.0
    report: float = 10.0
    drain: float = 600.0


class VllmServer:
    """``name`` begins its error messages."""

    def __init__(self, url: str, name: str, deadlines: Deadlines) -> None:
        self.url, self.name, self.deadlines = url.rstrip("/"), name, deadlines
        self._http: aiohttp.ClientSession | None = None

    def open(self) -> None:
        if self._http is None:
            # One connection per command: the server closes idle connections, and a command sent then would be lost.
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    # -- queries

    async def health(self) -> None:
        await self._get("/health")

    async def world_size(self) -> int:
        """Workers, over all tensor, pipeline and data parallel ranks."""
        return int((await self._get("/get_world_size"))["world_size"])

    async def label(self) -> str:
        """The version that the server names in its answers; ``default`` after a start. Asks the engine, not the
        workers.
        """
        return str((await self._get("/weight_info"))["weight_version"])

    async def is_paused(self) -> bool:
        return bool((await self._get("/is_paused"))["is_paused"])

    async def cached_tokens(self) -> int | None:
        """Tokens in the blocks that running requests hold, rounded up to whole blocks; from the server's metrics."""
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
        """Stop scheduling. Running requests stay; with ``clear_cache`` they are recomputed later."""
        await self._post(
            f"/pause?mode=keep&clear_cache={'true' if clear_cache else 'false'}", None, self.deadlines.commit
        )

    async def drain(self, deadline_s: float) -> None:
        """Hold new requests, and return when the running ones have ended. Caches stay. A drain whose caller has gone
        goes on at the server until ``resume``.
        """
        await self._post("/pause?mode=wait&clear_cache=false", None, deadline_s)

    async def resume(self) -> None:
        await self._post("/resume")

    async def clear_caches(self) -> None:
        """Clear the caches that ``pause`` clears, under another process's pause."""
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
        """Pause, commit and resume in the engine core (``vllm_plugin.engine_core``). The ranks' reports, and the core's
        own.
        """
        text = await self._request("POST", "/collective_rpc", {"method": "p2pcast_switch", "kwargs": order}, deadline_s)
        try:
            *reports, core = json.loads(text)["results"]
        except (ValueError, TypeError, KeyError):
            raise LocalError(f"{self.name}: POST /collective_rpc: no reports in the answer {text[:300]!r}") from None
        return reports, core

    async def finish(self) -> None:
        await self._post("/finish_weight_update", {})

    # -- HTTP

    async def _get(self, path: str) -> Any:
        text = await self._request("GET", path, None, self.deadlines.request)
        try:
            return json.loads(text) if text else None
        except ValueError:
            raise LocalError(f"{self.name}: GET {path}: not JSON; is this a vLLM server?") from None

    async def _post(self, path: str, body: dict[str, Any] | None = None, deadline_s: float | None = None) -> None:
        await self._request("POST", path, body, deadline_s or self.deadlines.request)

    async def _request(self, method: str, path: str, body: dict[str, Any] | None, deadline_s: float) -> str:
        if self._http is None:
            raise LocalError(f"{self.name}: not started")
        where = f"{self.name}: {method} {path.split('?')[0]}"
        try:
            timeout = aiohttp.ClientTimeout(total=deadline_s)
            async with self._http.request(method, self.url + path, json=body, timeout=timeout) as response:
                text = await response.text()
                if response.status == 200:
                    return text
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
            reason = str(error) or f"no answer within {deadline_s:g} s"
            raise RetryableError(f"{where}: {reason}; is the server up?") from None
        if response.status >= 500:
            raise RetryableError(f"{where}: status {response.status}: {text[:300]}; see the server's log")
        hint = "; start it with VLLM_SERVER_DEV_MODE=1" if response.status == 404 else ""
        raise LocalError(f"{where}: status {response.status}: {text[:300]}{hint}")

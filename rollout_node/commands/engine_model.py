"""The model that an engine serves, as the engine names it."""

from __future__ import annotations

import json

import aiohttp

from p2pcast.ground.errors import LocalError, RetryableError

MAX_BODY = 1 << 20
TIMEOUT_S = 30.0


async def model_of(http: aiohttp.ClientSession, engine: str) -> str:
    """The model's folder, or its name at Hugging Face."""
    try:
        async with http.get(f"{engine}/v1/models", timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as response:
            body = await response.content.read(MAX_BODY)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise RetryableError(f"the engine at {engine} does not answer: {error or type(error).__name__}") from None
    try:
        model = json.loads(body)["data"][0]
        root = model.get("root") or model["id"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        root = None
    if type(root) is not str or "," in root:
        raise LocalError(f"the engine at {engine} names no model: write the model's folder as tokenizer=DIR")
    return root

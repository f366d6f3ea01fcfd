"""The body of an HTTP request: bounded in bytes and time while it is received."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from p2pcast.ground.errors import UsageError


class BodyTooLargeError(UsageError):
    """The body is larger than its route ever accepts."""


async def read_body(request: web.Request, most_bytes: int, limit_s: float) -> bytes:
    """The body of up to ``most_bytes``. Raises UsageError, and ConnectionError for a caller that has gone. A body that
    states a larger size is refused before it is read.
    """
    if (request.content_length or 0) > most_bytes:
        raise BodyTooLargeError(f"the body has {request.content_length} bytes, and {most_bytes} are allowed")
    parts, size = [], 0
    try:
        async with asyncio.timeout(limit_s):
            async for part in request.content.iter_any():
                size += len(part)
                if size > most_bytes:
                    raise BodyTooLargeError(f"the body is larger than {most_bytes} bytes")
                parts.append(part)
    except TimeoutError:
        raise UsageError(f"the request's body did not arrive within {limit_s:g} s") from None
    except web.RequestPayloadError as error:
        raise UsageError(f"the request's body is malformed: {error}") from None
    return b"".join(parts)


async def read_json(request: web.Request, most_bytes: int, limit_s: float) -> Any:
    """Return the JSON document in the body. Raises the same errors as ``read_body``."""
    try:
        return json.loads(await read_body(request, most_bytes, limit_s))
    except (ValueError, RecursionError):
        raise UsageError("the request's body is not JSON, or nested too deeply") from None

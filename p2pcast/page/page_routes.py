"""Routes of a run's page: its files, its pictures, and the entry from another machine.

Guarantees: files hold nothing of the run, so any caller may load them. Pictures need a caller on loopback, the bearer,
or the cookie of a one-time link. No script or style but these files runs in the page, and no other page may frame it.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from aiohttp import web

from p2pcast.daemon.command_body import check_keys
from p2pcast.daemon.http_connections import hold
from p2pcast.daemon.request_body import read_json
from p2pcast.ground.errors import RefusedError, UsageError
from p2pcast.ground.limits import KIB
from p2pcast.page.picture_feed import PictureFeed
from p2pcast.page.reading_rights import COOKIE_S, ReadingRights

COOKIE: Final = "p2pcast-page"
MOST_VIEWERS: Final = 64
SLOW_S: Final = 10.0
"""Time limit in seconds for a viewer to accept a write."""
HEARTBEAT_S: Final = 15.0
MAX_LINK: Final = 200
MAX_ENTER_BYTES: Final = KIB
"""Largest body of a request to enter, which any caller may send."""
ENTER_S: Final = 10.0
"""Time limit for this body, in seconds."""
KINDS: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    body: bytes
    kind: str
    tag: str

    @classmethod
    def read(cls, name: str, data: bytes) -> PageFile:
        kind = KINDS[name[name.rindex(".") :]]
        return cls(gzip.compress(data, 9, mtime=0), kind, f'"{hashlib.sha256(data).hexdigest()[:16]}"')


def page_files() -> dict[str, PageFile]:
    """Return the page's files by name, with compressed contents."""
    folder = resources.files("p2pcast.page") / "static"
    return {one.name: PageFile.read(one.name, one.read_bytes()) for one in folder.iterdir() if one.is_file()}


class PageRoutes:
    """The page's routes. ``rights``: the rights of viewers on other machines."""

    def __init__(self, feed: PictureFeed, rights: ReadingRights) -> None:
        self._feed, self._rights = feed, rights
        self._files = page_files()
        self.routes = [
            web.get("/", self._get_index),
            web.get("/page/picture", self._get_picture),
            web.get("/page/changes", self._get_changes, allow_head=False),
            web.post("/page/enter", self._enter),
            web.get("/page/{name}", self._get_file),
        ]

    def admits(self, request: web.Request) -> bool:
        """Whether a caller without the bearer, on any machine, may send this request."""
        path = request.path
        if path == "/page/enter":
            return True
        if path in ("/page/picture", "/page/changes"):
            return self._rights.admits(request.cookies.get(COOKIE, ""))
        reads = request.method in ("GET", "HEAD")
        return reads and (path == "/" or path.removeprefix("/page/") in self._files)

    async def link(self, body: dict[str, Any]) -> dict[str, Any]:
        """POST /page/link, a command: the path of a page that may be opened once, from any machine."""
        check_keys(body)
        return {"path": f"/#{self._rights.new_link()}"}

    async def _get_index(self, request: web.Request) -> web.Response:
        return self._file(request, "index.html")

    async def _get_file(self, request: web.Request) -> web.Response:
        return self._file(request, request.match_info["name"])

    def _file(self, request: web.Request, name: str) -> web.Response:
        found = self._files.get(name)
        if found is None:
            raise web.HTTPNotFound
        headers = HEADERS | {"ETag": found.tag, "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == found.tag:
            return web.Response(status=304, headers=headers)
        return _answer(request, found.body, found.kind, headers)

    async def _get_picture(self, request: web.Request) -> web.Response:
        return _answer(request, self._feed.whole(), "application/json", {"Cache-Control": "no-store"})

    async def _get_changes(self, request: web.Request) -> web.StreamResponse:
        feed, text = self._feed, request.query.get("after", "")
        if not (text.isascii() and text.isdigit() and len(text) < 16):
            raise UsageError(f"after={text[:40]!r} is not the number of a picture")
        if feed.viewers >= MOST_VIEWERS:
            return web.json_response({"error": f"{MOST_VIEWERS} viewers are connected already"}, status=503)
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        hold(request, proven=False)
        feed.viewers += 1
        try:
            feed.look()
            await self._send(request, response, int(text))
        except ConnectionResetError:
            pass  # the viewer has gone
        finally:
            feed.viewers -= 1
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse, at: int) -> None:
        """Send changes until the viewer disconnects or stalls for SLOW_S. One that missed changes must start again."""
        await response.prepare(request)
        while request.transport is not None and not request.transport.is_closing():
            found = self._feed.after(at)
            at = self._feed.number
            text = b"event: again\ndata: {}\n\n" if found is None else b"".join(found) or b": still here\n\n"
            try:
                async with asyncio.timeout(SLOW_S):
                    await response.write(text)
            except TimeoutError:
                request.transport.abort()
                return
            if found is None:
                return
            await self._feed.wakeup.wait(HEARTBEAT_S)

    async def _enter(self, request: web.Request) -> web.Response:
        """Exchange the secret of a one-time link for a cookie."""
        body = await read_json(request, MAX_ENTER_BYTES, ENTER_S)
        try:
            link = body["link"]
        except (TypeError, KeyError):
            raise UsageError('the request\'s body is not {"link": TEXT}') from None
        cookie = self._rights.enter(link) if isinstance(link, str) and len(link) <= MAX_LINK else None
        if cookie is None:
            raise RefusedError("this link was used, or is too old: make another one with `p2pcast page --link`")
        response = web.json_response({})
        response.set_cookie(COOKIE, cookie, max_age=int(COOKIE_S), httponly=True, samesite="Strict", path="/page")
        return response


def _answer(request: web.Request, body: bytes, kind: str, headers: dict[str, str]) -> web.Response:
    """``body``: compressed by gzip, as most callers take it."""
    headers = headers | {"Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        headers["Content-Encoding"] = "gzip"
    else:
        body = gzip.decompress(body)
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)

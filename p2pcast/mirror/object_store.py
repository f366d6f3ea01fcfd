"""The object store behind a mirror's URL (s3:// or file://), accessed through obstore.

Guarantees: every request has a deadline and is made once, so the caller sees and counts each failure. Errors are
one-line P2PCastErrors without credentials. A body that is shorter or longer than requested is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import stat
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, TypeVar

from p2pcast.ground.errors import RetryableError, UsageError
from p2pcast.mirror import requests
from p2pcast.mirror.object_names import ListedObject

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

CONNECT_S = 5.0
REQUEST_S = 120.0
"""Time limit in seconds for one request with its body: 8 MiB at 0.6 Mbit/s."""
LIST_CHUNK = 1000
MAX_LISTED = 1 << 20
"""Limit on the names in one listing, enough for ten anchors of 800 GB. A longer listing counts as endless."""
_EXTRA = "a mirror needs the package obstore: pip install 'p2pcast[mirror]'"
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_STATUS = re.compile(r"status code: (\d{3}) ([A-Za-z ]+)")
_BEYOND = re.compile(r"status code: 416 |Requested range was invalid")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")


class ObjectMissingError(RetryableError):
    """The object does not exist yet, or no longer exists."""


class ShortError(RetryableError):
    """The object, or the received body, ends before the requested range."""


class TooLargeError(RetryableError):
    """The object is larger than its limit."""


def checked_url(url: str) -> str:
    """Return ``s3://BUCKET[/PREFIX]`` or ``file:///FOLDER`` without a trailing slash. Raises UsageError."""
    scheme, colon, rest = url.partition("://")
    if colon and scheme == "s3" and "@" in rest.split("/")[0]:
        raise UsageError(
            "a mirror's URL holds no credentials: they go by environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
        )
    good = (scheme == "s3" and rest.split("/")[0]) or (scheme == "file" and rest.startswith("/"))
    if not colon or not good or any(c in rest for c in "?#\\") or any(p in (".", "..") for p in rest.split("/")):
        raise UsageError(f"{url!r} is not a mirror: write s3://BUCKET/PREFIX or file:///FOLDER")
    return url.rstrip("/")


class Objects:
    """Objects of a mirror below ``folder`` (which ends with a slash). Safe to use from several tasks of one loop."""

    def __init__(self, url: str, folder: str) -> None:
        """Does not send a request yet. Raises UsageError."""
        self.url = checked_url(url)
        self._folder = folder
        self._store = _opened(self.url)

    async def put(self, name: str, data: bytes | memoryview) -> str | None:
        """Write or replace an object atomically. Returns the store's tag of it, if any. Raises RetryableError."""
        import obstore

        async def do() -> str | None:
            # In one request, because the parts of an unfinished multipart upload would stay in the store, unlisted.
            result = await obstore.put_async(self._store, self._folder + name, data, use_multipart=False)
            if self.url.startswith("file://"):
                await asyncio.to_thread(self._share, name)
            return _tag(result["e_tag"])

        return await self._ask("write", name, do, data)

    def _share(self, name: str) -> None:
        """Give an object of a file:// mirror the read permissions of the mirror's folder, whatever this process's
        umask. Blocks.
        """
        path = top = Path(self.url.removeprefix("file://") or "/")
        mode = top.stat().st_mode & 0o755 | stat.S_IRWXU
        *folders, file = PurePath(self._folder + name).parts
        for part in folders:
            path /= part
            if path.stat().st_mode & 0o777 != mode:
                path.chmod(mode)
        (path / file).chmod(mode & 0o666)

    async def get(self, name: str, most_bytes: int) -> bytes:
        """Return an object's contents, at most ``most_bytes``. Raises ObjectMissingError, TooLargeError,
        RetryableError.
        """
        import obstore

        async def do() -> bytes:
            answer = await obstore.get_async(self._store, self._folder + name)
            size = answer.meta["size"]
            if size > most_bytes:
                raise TooLargeError(f"the object has {size} bytes, above its limit of {most_bytes}")
            contents = bytes(await answer.bytes_async())
            if len(contents) != size:
                raise RetryableError(f"the answer was cut short: {len(contents)} of {size} bytes")
            return contents

        return await self._ask("read", name, do)

    async def get_range(self, name: str, start: int, size: int) -> memoryview:
        """Return exactly ``size`` bytes from ``start`` on. Raises ObjectMissingError, ShortError, RetryableError."""
        import obstore

        async def do() -> memoryview:
            contents = memoryview(
                await obstore.get_range_async(self._store, self._folder + name, start=start, length=size)
            )
            if len(contents) != size:
                raise ShortError(f"the answer was cut short: {len(contents)} of {size} bytes at offset {start}")
            return contents

        return await self._ask("read", name, do)

    async def list(self, prefix: str = "", most: int = MAX_LISTED) -> list[ListedObject]:
        """List all objects whose names start with ``prefix``, which is empty or ends with a slash. Raises
        RetryableError, also if there are more than ``most``.
        """
        import obstore

        whole = self._folder + prefix

        async def do() -> list[ListedObject]:
            out: list[ListedObject] = []
            async for chunk in obstore.list(self._store, whole, chunk_size=LIST_CHUNK):
                for meta in chunk:
                    if meta["path"].startswith(whole):
                        name = meta["path"][len(self._folder) :]
                        out.append(
                            ListedObject(name, meta["size"], meta["last_modified"].timestamp(), _tag(meta["e_tag"]))
                        )
                if len(out) > most:
                    raise RetryableError(f"more than {most} objects")
            return out

        return await self._ask("list", prefix, do)

    async def remove(self, names: Sequence[str]) -> None:
        """Remove objects, ignoring missing ones. Raises RetryableError."""
        import obstore

        for name in names:
            with contextlib.suppress(ObjectMissingError):
                await self._ask("remove", name, partial(obstore.delete_async, self._store, self._folder + name))

    async def _ask(self, what: str, name: str, do: Callable[[], Awaitable[T]], data: bytes | memoryview = b"") -> T:
        with _explained(what, f"{self.url}/{self._folder}{name}"):
            async with asyncio.timeout(REQUEST_S + 2 * CONNECT_S):
                return await requests.ask(requests.ObjectRequest(what, self.url, self._folder + name, data), do)


def _tag(said: str | None) -> str | None:
    """Return a tag without quotes, which stores use in some answers and not in others."""
    return None if said is None else said.strip('"')


def _opened(url: str) -> ObjectStore:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, S3Store
    except ImportError:
        raise UsageError(_EXTRA) from None
    try:
        if url.startswith("file://"):
            return LocalStore(url.removeprefix("file://") or "/", mkdir=True)
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        plain = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)
        return S3Store(
            bucket,
            prefix=prefix or None,
            client_options={
                "allow_http": plain,
                "connect_timeout": timedelta(seconds=CONNECT_S),
                "timeout": timedelta(seconds=REQUEST_S),
            },
            retry_config={"max_retries": 0},
        )
    except (BaseError, OSError, ValueError) as error:
        raise UsageError(f"mirror {url}: {_line(error)}") from None


@contextlib.contextmanager
def _explained(what: str, name: str) -> Iterator[None]:
    """Turn the store's errors into P2PCastErrors: ``mirror: cannot <what> <name>: <reason>``."""
    from obstore import exceptions

    try:
        yield
    except RetryableError as error:
        raise type(error)(f"mirror: cannot {what} {name}: {error}") from None
    except (exceptions.NotFoundError, FileNotFoundError):
        gone = "object" if what in ("read", "remove") else "bucket"
        raise ObjectMissingError(f"mirror: cannot {what} {name}: there is no such {gone}") from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
        raise RetryableError(
            f"mirror: cannot {what} {name}: access denied; check the credentials and the bucket's policy"
        ) from None
    except TimeoutError:
        raise RetryableError(f"mirror: cannot {what} {name}: no answer in {REQUEST_S:.0f} s") from None
    except (exceptions.BaseError, OSError, ValueError) as error:
        kind = ShortError if _BEYOND.search(str(error)) else RetryableError
        raise kind(f"mirror: cannot {what} {name}: {_line(error)}") from None


def _line(error: BaseException) -> str:
    """Return a store's multi-line error as one line."""
    text = str(error)
    said = next((next(g for g in m.groups() if g) for m in _MESSAGE.finditer(text) if any(m.groups())), "")
    status = _STATUS.search(text)
    if status is not None:
        return f"{status[1]} {status[2]}" + (f": {said}"[:200] if said else "")
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return " ".join(first.rpartition(" - ")[2].split())[:300]

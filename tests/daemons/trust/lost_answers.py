"""A proxy that withholds the answers of a hub or a ledger, though what was asked has been done."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

Address = tuple[str, int]


@dataclass
class Withholding:
    """``address``: of the proxy. ``withheld`` is set when an answer was dropped; then its connection is cut."""

    address: Address
    withheld: asyncio.Event = field(default_factory=asyncio.Event)


@contextlib.asynccontextmanager
async def withholding(
    hub: Address, done: Callable[[], bool], *, once: bool, asked: Callable[[bytes], None] = lambda chunk: None
) -> AsyncIterator[Withholding]:
    """A proxy before ``hub`` that drops what the hub sends once ``done``. ``once``: it cuts that connection, and passes
    all that comes later. ``asked``: called with what the proxy passes on to the hub.
    """
    pumps: set[asyncio.Task[None]] = set()
    found: Withholding

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        with contextlib.closing(writer):
            while chunk := await reader.read(65536):
                if answers and done() and not (once and found.withheld.is_set()):
                    found.withheld.set()
                    if once:
                        return
                elif not writer.is_closing():
                    if not answers:
                        asked(chunk)
                    writer.write(chunk)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(*hub)
        for one in (pump(reader, there_writer, answers=False), pump(there_reader, writer, answers=True)):
            pumps.add(asyncio.create_task(one))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as proxy:
        found = Withholding(proxy.sockets[0].getsockname())
        yield found
    for task in pumps:
        task.cancel()
    await asyncio.gather(*pumps, return_exceptions=True)

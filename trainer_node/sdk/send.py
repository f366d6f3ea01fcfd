"""Sends this rank's parts of a version to the hub.

Guarantee: parts are sent in order, each as soon as it is encoded, while later ones are still being compared. While
nothing changes, the hub is informed how far this rank is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from p2pcast.codec.cell import RAW, Encoded, digest
from p2pcast.codec.codec_prediction import Choice
from p2pcast.codec.encode_cell import encode_as_chosen
from p2pcast.codec.layout import Layout
from p2pcast.ground.ordered_map import ordered_map
from p2pcast.wire import messages
from trainer_node.sdk.encode import ComparedRooms, codec_of
from trainer_node.sdk.hub_connection import HubConnection
from trainer_node.sdk.shards import LocalShard, ShardPart
from trainer_node.sdk.snapshot import Rooms

PASSED_S = 0.02
PASSED_CELLS = 64
"""Most cells between two PASSED messages; the hub publishes a cell once all ranks have passed it."""


@dataclass(frozen=True, slots=True)
class SendPlan:
    """Everything that depends only on names, shapes, dtypes and placements (the ``key``); rebuilt only if one of them
    changes.
    """

    key: Any
    layout: Layout
    holdings: list[LocalShard]
    parts: list[ShardPart]
    rooms: Rooms


def send_parts(
    uplink: HubConnection, serial: int, plan: SendPlan, codec: str | None, before: Sequence[int], workers: int
) -> tuple[list[int], int]:
    """Send every changed part, in order, for a version with codec ``codec``; if it is None, send all parts, uncoded.
    ``before``: digests of all parts in the previous state. Returns the new digests and the number of parts sent.
    """
    parts, cells = plan.parts, len(plan.layout.cells)
    marks = list(before) if codec is not None else [0] * len(parts)
    sent = told = 0
    told_at = time.monotonic()

    rooms, compared = plan.rooms, None
    if codec is not None and rooms.device is not None:
        assert rooms.previous is not None
        compared = ComparedRooms(rooms.slots, rooms.previous, rooms.next)

    def cell_of(number: int) -> messages.Cell | None:
        if codec is None:
            return _whole(plan, serial, number)
        return _coded(plan, serial, number, codec, before[number], compared)

    encoded = ordered_map(
        cell_of, range(len(parts)), workers=workers, name="p2pcast encode", nbytes=lambda n: parts[n].cell.nbytes
    )
    for number, cell in enumerate(encoded):
        now = time.monotonic()
        if serial in uplink.received.aborted:
            break  # the next wait for the hub raises
        if cell is not None:
            uplink.send(cell, len(cell.payload))
            marks[number] = cell.after
            sent += 1
            told, told_at = parts[number].cell.index, now
            continue
        reached = parts[number + 1].cell.index if number + 1 < len(parts) else cells
        if reached > told and (now - told_at > PASSED_S or reached - told >= PASSED_CELLS):
            uplink.send(messages.Passed(serial, reached))
            told, told_at = reached, now
    return marks, sent


def _coded(
    plan: SendPlan, serial: int, number: int, told: str, before: int, compared: ComparedRooms | None
) -> messages.Cell | None:
    """Encode a part against the previous state, for a version with codec ``told``. Returns None if nothing changed.
    ``compared``: the comparison of two rooms on a device, if they are on one.
    """
    part, rooms, slot = plan.parts[number], plan.rooms, plan.rooms.slots[number]
    assert rooms.previous is not None
    codec = codec_of(told, part.cell, plan.layout.cells[part.cell.index])
    found: Encoded | None
    if compared is None:
        found = encode_as_chosen(part.cell, rooms.previous.words(slot), rooms.next.words(slot), before, Choice(codec))
    else:
        with rooms.on_stream():
            found = compared.encode(part.cell, number, before, codec)
    if found is None:
        return None
    return _cell(serial, part, found.codec, found.before, found.after, found.changed, found.payload)


def _whole(plan: SendPlan, serial: int, number: int) -> messages.Cell:
    """Return a part uncoded."""
    part, rooms = plan.parts[number], plan.rooms
    with rooms.on_stream():
        words = rooms.next.words(rooms.slots[number])
    return _cell(serial, part, RAW, None, digest(words, part.cell), part.cell.words, words.data.cast("B"))


def _cell(
    serial: int, part: ShardPart, codec: int, before: int | None, after: int, changed: int, payload: bytes | memoryview
) -> messages.Cell:
    cell = part.cell
    return messages.Cell(
        serial=serial,
        cell=cell.index,
        start=part.at,
        words=cell.words,
        codec=codec,
        before=before,
        after=after,
        changed=changed,
        payload=cast(bytes, payload),  # msgpack takes any buffer
    )

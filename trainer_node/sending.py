"""This rank's parts of a version on their way to the hub.

Promise: parts leave in order, each as soon as it is coded, while later ones are still being compared; of a stretch without changes the hub learns as it is passed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from p2pcast.codec.cell import RAW, Encoded, digest
from p2pcast.codec.choice import Choice
from p2pcast.codec.layout import Layout
from p2pcast.parallel import ordered_map
from p2pcast.wire.messages import Body, Type
from trainer_node.coding import Compared, codec_of
from trainer_node.packing import code
from trainer_node.shards import Holding, Part
from trainer_node.snapshot import Rooms
from trainer_node.uplink import Uplink

PASSED_S = 0.02
PASSED_CELLS = 64
"""In a stretch without changes the hub is told this often how far this rank is: a cell goes out once all ranks have passed it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows from names, shapes, dtypes and placements (the ``key``); made anew only when one of them changes."""

    key: Any
    layout: Layout
    holdings: list[Holding]
    parts: list[Part]
    rooms: Rooms


def send_parts(
    uplink: Uplink, serial: int, plan: Plan, codec: str | None, before: Sequence[int], workers: int
) -> tuple[list[int], int]:
    """Every part that changed, in order, for a version that goes out in ``codec``; with None all parts, as they are. ``before``: digests of all parts in the
    previous state. Returns (the same of this one, how many were sent)."""
    parts, cells = plan.parts, len(plan.layout.cells)
    marks = list(before) if codec is not None else [0] * len(parts)
    sent = told = 0
    told_at = time.monotonic()

    rooms, compared = plan.rooms, None
    if codec is not None and rooms.device is not None:
        assert rooms.previous is not None
        compared = Compared(rooms.slots, rooms.previous, rooms.next)

    def body_of(number: int) -> Body | None:
        return _whole(plan, number) if codec is None else _coded(plan, number, codec, before[number], compared)

    for number, body in enumerate(ordered_map(body_of, range(len(parts)), workers=workers, name="p2pcast encode")):
        now = time.monotonic()
        if serial in uplink.heard.aborted:
            break  # the next question to the hub raises
        if body is not None:
            uplink.send(Type.CELL, {"serial": serial, **body}, len(body["payload"]))
            marks[number] = body["after"]
            sent += 1
            told, told_at = parts[number].cell.index, now
            continue
        reached = parts[number + 1].cell.index if number + 1 < len(parts) else cells
        if reached > told and (now - told_at > PASSED_S or reached - told >= PASSED_CELLS):
            uplink.send(Type.PASSED, {"serial": serial, "cell": reached})
            told, told_at = reached, now
    return marks, sent


def _coded(plan: Plan, number: int, told: str, before: int, compared: Compared | None) -> Body | None:
    """A part against the previous state, for a version in codec ``told``; None where nothing changed. ``compared``: for rooms on a device."""
    part, rooms, slot = plan.parts[number], plan.rooms, plan.rooms.slots[number]
    assert rooms.previous is not None
    codec = codec_of(told, part.cell, plan.layout.cells[part.cell.index])
    found: Encoded | None
    if compared is None:
        found = code(part.cell, rooms.previous.words(slot), rooms.next.words(slot), before, Choice(codec))
    else:
        with rooms.on_stream():
            found = compared.encode(part.cell, number, before, codec)
    if found is None:
        return None
    return _cell(part, found.codec, found.before, found.after, found.changed, found.payload)


def _whole(plan: Plan, number: int) -> Body:
    """A part as it is."""
    part, rooms = plan.parts[number], plan.rooms
    with rooms.on_stream():
        words = rooms.next.words(rooms.slots[number])
    return _cell(part, RAW, None, digest(words, part.cell), part.cell.words, words.data.cast("B"))


def _cell(part: Part, codec: int, before: int | None, after: int, changed: int, payload: bytes | memoryview) -> Body:
    cell = part.cell
    return {
        "cell": cell.index, "start": part.at, "words": cell.words, "codec": codec, "before": before, "after": after, "changed": changed, "payload": payload
    }  # fmt: skip

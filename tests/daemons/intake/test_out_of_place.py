"""Ranks that violate the protocol: wrong parts, unexpected messages, garbage, silence, floods."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scripted_ranks import (
    FILES,
    Rank,
    Said,
    T,
    layout_of,
    miscounted,
    nothing_is_left,
    part,
)

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground import limits
from p2pcast.wire.messages import Type
from trainer_node.ranks import rank_session

Spoil = Callable[[list[Said]], None]


def cells(said: list[Said]) -> list[tuple[Said, int]]:
    return [(row, k) for row in said for k, (kind, _) in enumerate(row) if kind is T.CELL]


def overlap(said: list[Said]) -> None:
    row, at = cells(said)[3]
    other = next(r for r in said if r is not row)
    body = row[at][1]
    where = next(k for k, (_, b) in enumerate(other) if b.get("cell", 1 << 40) >= body["cell"])
    other.insert(where, (T.CELL, body))
    other[-1] = (T.DONE, other[-1][1] | {"parts": other[-1][1]["parts"] + 1})


def altered(**changes: Callable[[Any], Any]) -> Spoil:
    def spoil(said: list[Said]) -> None:
        row, at = cells(said)[2]
        body = row[at][1]
        row[at] = (T.CELL, body | {key: change(body[key]) for key, change in changes.items()})

    return spoil


def left_out(said: list[Said]) -> None:
    row, at = cells(said)[2]
    del row[at]
    row[-1] = (T.DONE, row[-1][1] | {"parts": row[-1][1]["parts"] - 1})


def late(said: list[Said]) -> None:
    row, at = cells(said)[0]
    row.insert(len(row) - 2, row.pop(at))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (overlap, "already"),
        (altered(before=lambda b: b ^ 1), "wrong base"),
        (altered(after=lambda a: a ^ 1), "leads to digest"),
        (altered(payload=lambda p: p[:-1]), "rank . of 2: cell"),
        (altered(codec=lambda c: 99), "codec 99"),
        (altered(start=lambda s: 1 << 20), "the cell has"),
        (altered(cell=lambda c: 1 << 30), "is not one of the layout's"),
        (miscounted, "says that it sent 999 parts"),
        (late, "comes late|PASSED"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)  # fmt: skip
async def test_a_part_that_is_not_right_undoes_the_version(swarm, states, trainers, spoil, why):
    await swarm.hub_up()
    await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first()
    await trainer.publish(1, state, files=FILES)
    await swarm.live("0.1")
    new = states.trained(state, 2)
    said = trainer.script(await trainer.begin(2, new), new)
    spoil(said)
    trainer.say(said)
    reason = await trainer.aborted()
    assert re.search(why, reason), reason
    await swarm.until(lambda: nothing_is_left(swarm), "nothing of it is left")
    assert swarm.hub.publishing.pipeline.head == (0, 1)
    await trainer.publish(2, new)
    await swarm.live("1.2")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (left_out, "came from all ranks together"),
        (altered(before=lambda b: 1), "nothing that it could change"),
        (altered(after=lambda a: a ^ 1), "the words have digest"),
    ],
    ids=["missing", "change", "digest"],
)
async def test_a_first_state_that_is_not_right(swarm, states, trainers, spoil, why):
    await swarm.hub_up()
    await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first()
    said = trainer.script(await trainer.begin(1, state), state, files=FILES)
    spoil(said)
    trainer.say(said)
    assert why in await trainer.aborted()
    assert swarm.hub.publishing.pipeline.head is None
    await trainer.publish(1, state, files=FILES)
    await swarm.live("0.1")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([(T.BEGIN, {"serial": 0, "step": 1, "layout": bytes(32), "resume": False})], "BEGIN before RANK"),
        ([(T.RANK, {"group": bytes(16), "rank": 2, "ranks": 2})], "does not fit a group of 2"),
        ([(T.RANK, {"group": bytes(16), "rank": 0, "ranks": 2})] * 2, "RANK came twice"),
        (
            [(T.RANK, {"group": bytes(16), "rank": 0, "ranks": 1}), (T.PASSED, {"serial": 0, "cell": 0})],
            "which was not BEGUN",
        ),
        (
            [
                (T.RANK, {"group": bytes(16), "rank": 0, "ranks": 1}),
                (T.ABORTED, {"serial": 0, "reason": ""}),
                *[(T.BEGIN, {"serial": 1, "step": 1, "layout": bytes(32), "resume": False})] * 2,
            ],
            "while the one before is not over",
        ),
        (
            [(T.RANK, {"group": bytes(16), "rank": 1, "ranks": 2}), (T.LAYOUT, {"layout": bytes(32), "document": b""})],
            "LAYOUT is for rank 0",
        ),
    ],
    ids=["begin", "rank", "twice", "passed", "begins", "layout"],
)
async def test_an_unexpected_message_ends_the_connection(swarm, said, why):
    await swarm.hub_up()
    rank = Rank(0, 1)
    await rank.dial(swarm)
    for kind, body in said:
        rank.say(kind, **body)
    assert why in await rank.ended()


async def test_a_layout_of_too_many_cells(swarm, states, trainers):
    await swarm.hub_up()
    trainer = await trainers(1)
    trainer.serial = 0
    layout = Layout([Tensor("w", "U8", (1 << 45,))], cell_words=1)
    trainer.ranks[0].say(T.LAYOUT, layout=layout.layout_id, document=layout.document)
    trainer.ranks[0].say(T.BEGIN, serial=0, step=1, layout=layout.layout_id, resume=False)
    assert "cells, more than" in await trainer.aborted()
    await trainer.publish(1, states.first(), files=FILES)


def nonsense(draw: random.Random, layout: Layout) -> tuple[Type, dict[str, Any]]:
    """A message that the schema takes."""
    serial, index = draw.randrange(3), draw.randrange(len(layout.cells) + 1)
    cell = layout.cells[min(index, len(layout.cells) - 1)]
    start = draw.randrange(cell.words)
    words = draw.randint(1, cell.words)
    size = draw.choice([0, 1, 7, 40, words * cell.word_bytes])
    payload = draw.choice(
        [bytes, draw.randbytes, lambda n: b"\1\1" + bytes([cell.word_bytes, 3 + cell.word_bytes]) + draw.randbytes(n)]
    )(size)
    return draw.choice(
        [
            (
                T.BEGIN,
                {
                    "serial": serial,
                    "step": draw.randrange(9),
                    "layout": draw.choice([layout.layout_id, bytes(32)]),
                    "resume": draw.random() < 0.2,
                },
            ),
            (
                T.CELL,
                {
                    "serial": serial,
                    "cell": index,
                    "start": start,
                    "words": words,
                    "codec": draw.randint(1, 5),
                    "before": draw.choice([None, 0]),
                    "after": 0,
                    "changed": 1,
                    "payload": payload,
                },
            ),
            (T.CELL, {"serial": serial} | part(cell, 0, np.zeros(cell.words, f"<u{cell.word_bytes}"))),
            (T.PASSED, {"serial": serial, "cell": index}),
            (T.FILE, {"serial": serial, "path": draw.choice(["a", "b", "../c", ""]), "contents": payload}),
            (T.DONE, {"serial": serial, "parts": draw.randrange(3)}),
            (T.ABORTED, {"serial": serial, "reason": "no reason"}),
            (T.LAYOUT, {"layout": layout.layout_id, "document": draw.choice([layout.document, payload])}),
            (T.PING, {"t": 1}),
            (T.RANK, {"group": bytes(16), "rank": 0, "ranks": 1}),
        ]
    )


@pytest.mark.parametrize("seed", range(3))
async def test_ranks_that_send_invalid_messages_end_alone(swarm, states, trainers, caplog, seed):
    """The hub survives, and then publishes."""
    await swarm.hub_up()
    draw = random.Random(seed)
    state = states.first()
    layout = layout_of(state)
    if draw.random() < 0.5:
        await (await trainers(1)).publish(1, state, files=FILES)
    for _ in range(40):
        ranks = [Rank(rank, 2) for rank in range(draw.choice([1, 2]))]
        group = secrets.token_bytes(16)
        for rank in ranks:
            await rank.dial(swarm)
            rank.say(T.RANK, group=group, rank=rank.rank, ranks=len(ranks))
            await asyncio.sleep(0)
        if draw.random() < 0.8:
            ranks[0].say(T.LAYOUT, layout=layout.layout_id, document=layout.document)
            for rank in ranks:
                rank.say(T.BEGIN, serial=0, step=2, layout=layout.layout_id, resume=False)
                if draw.random() < 0.7 and len(ranks) == 1:
                    await rank.hear(T.BEGUN)
        for _ in range(draw.randrange(30)):
            kind, body = nonsense(draw, layout)
            draw.choice(ranks).say(kind, **body)
        for rank in ranks:
            rank.link.close()
    trainer = await trainers(2)
    await trainer.publish(50, states.trained(state, 3), files=FILES)
    await swarm.peer_up("a")
    await swarm.live(str(swarm.hub.publishing.pipeline.head))
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


async def test_a_silent_rank_is_dead(swarm, states, trainers, monkeypatch):
    monkeypatch.setattr(rank_session, "SILENCE_S", 3.0)
    monkeypatch.setattr(rank_session, "PING_S", 0.0)
    await swarm.hub_up()
    trainer = await trainers(2)
    await trainer.begin(1, states.first())
    trainer.ranks[0].deaf = True
    assert "rank 0 of 2 is gone" in (await trainer.ranks[1].hear(T.ABORTED))["reason"]


async def test_ranks_that_are_ahead_are_not_read_from(swarm, states, trainers, monkeypatch):
    monkeypatch.setattr(limits, "PARTS_HIGH_BYTES", 200_000)
    monkeypatch.setattr(limits, "PARTS_LOW_BYTES", 100_000)
    await swarm.hub_up()
    await swarm.peer_up("a")
    trainer = await trainers(2)
    state = states.first(0, {"a": ("bfloat16", (2000, 1000))})
    said = trainer.script(await trainer.begin(1, state), state, files=FILES)
    ahead, slow = trainer.ranks
    for kind, body in said[0]:
        ahead.say(kind, **body)
    pending = swarm.hub.publishing.rank_intake._pending
    session = pending.sessions[0]
    await swarm.until(lambda: session._paused, "the hub has enough of the one that is ahead")
    assert not pending.sessions[1]._paused
    # Bytes of one socket read may still arrive; the other 3 MB stay with the rank.
    assert pending.parts.waiting_bytes < 200_000 + 2 * limits.MIB
    sent = sum(len(b.get("payload", b"")) for _, b in said[0])
    assert pending.parts.waiting_bytes < sent
    for kind, body in said[1]:
        slow.say(kind, **body)
    await trainer.durable(1, state, FILES)
    assert not session._paused
    await swarm.live("0.1")

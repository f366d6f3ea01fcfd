"""A few thousand messages of insiders to live daemons, made from the schema: nobody dies, and honest peers install what the trainer wrote. ``make fuzz`` says 200 000."""

from __future__ import annotations

import random

import pytest

from netem.insiders.campaign import Infiltrated, Outcome, infiltrate
from netem.insiders.insider import FIRST, allowed
from netem.insiders.values import Nonsense, World
from p2pcast.errors import RemoteError
from p2pcast.limits import MIB
from p2pcast.wire.messages import SCHEMA, SIGNED, SINCE, Type, decode, encode
from p2pcast.wire.state import Side, State

MESSAGES = 1500
MORE_BYTES = 128 * MIB
"""Of memory, between a few hundred messages and the end: what kernels and caches take that are filled for the first time."""


@pytest.mark.parametrize("kind", sorted(SCHEMA), ids=lambda kind: kind.name)
def test_what_is_right_in_form_is_taken_whatever_its_sense(kind):
    """So the fuzzing goes past the schema; and each key that may be there is tried."""
    world = World()
    world.learn([bytes([1]) * 16, bytes([2]) * 32, [0, 7], {"x": [bytes([3]) * 16]}])
    nonsense, seen = Nonsense(random.Random(1), world), set()
    for _ in range(200):
        body = nonsense.body(kind, right=True)
        seen |= body.keys()
        decode(kind, encode(kind, body))
    assert seen >= SCHEMA[kind].keys() | SINCE.get(kind, {}).keys()


def test_now_and_then_the_form_is_wrong_too():
    nonsense, refused = Nonsense(random.Random(1), World()), 0
    for _ in range(2000):
        try:
            decode(Type.PLAN, nonsense.encoded(Type.PLAN))
        except RemoteError:
            refused += 1
    assert 0 < refused < 400


def test_whatever_the_table_of_states_allows_is_said():
    """A message that is added there is fuzzed without a word being written."""
    said = {kind for state in FIRST for kind in allowed(state, Side.DIALER)} | set(allowed(State.DATA, Side.LISTENER))
    asked = {
        Type.JOIN,
        Type.REPORT,
        Type.CALL,
        Type.ENROL,
        Type.ATTACH,
        Type.ASK,
        Type.RANK,
        Type.CELL,
        Type.MEMBER,
        Type.REPORTED,
        Type.OPEN,
    }
    assert asked | SIGNED | {Type.PIECE} <= said


@pytest.mark.timeout(400)
async def test_insiders_are_borne(tmp_path):
    outcome = Outcome()
    async with Infiltrated(tmp_path, deadline_s=200.0) as fleet:
        await infiltrate(fleet, MESSAGES, 1, outcome)
    assert outcome.wrong == []
    assert outcome.unexpected == []
    assert outcome.tally["given up"] == 0
    assert outcome.tally["heard"] >= MESSAGES
    assert outcome.versions > 3
    for name, (before, after) in outcome.memory.items():
        assert after - before < MORE_BYTES, name

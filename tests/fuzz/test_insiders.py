"""A few hundred messages of insiders to live daemons, made from the schema: no daemon ends, and honest peers install
the trainer's weights. ``make fuzz`` sends 200 000.
"""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys

import pytest
from aiohttp.test_utils import make_mocked_request
from insiders.campaign import Infiltrated, Outcome, infiltrate
from insiders.insider import FIRST, allowed
from insiders.values import Nonsense, World

from p2pcast.ground.errors import RemoteError
from p2pcast.ground.limits import MIB
from p2pcast.page.replay import RunReplay
from p2pcast.process.background_tasks import Tasks, report_bug
from p2pcast.process.events import Events
from p2pcast.wire.connection_state import ConnectionState, Side
from p2pcast.wire.messages import RECORDS, SIGNED, Type, decode, encode_map
from tests.chaos.daemon_logs import UNEXPECTED

MESSAGES = 250
MORE_BYTES = 128 * MIB
"""Of memory, between a few hundred messages and the end: the share of kernels and caches that are filled for the first
time.
"""


@pytest.mark.parametrize("kind", sorted(RECORDS), ids=lambda kind: kind.name)
def test_well_formed_nonsense_is_decoded(kind):
    """Fuzzing passes the schema, and each optional key is tried."""
    world = World()
    world.learn([bytes([1]) * 16, bytes([2]) * 32, [0, 7], {"x": [bytes([3]) * 16]}])
    nonsense, seen = Nonsense(random.Random(1), world), set()
    for _ in range(200):
        body = nonsense.body(kind, right=True)
        seen |= body.keys()
        decode(kind, encode_map(body))
    assert seen >= {field.key for field in RECORDS[kind].fields if not field.lenient}


def test_now_and_then_the_form_is_wrong_too():
    nonsense, refused = Nonsense(random.Random(1), World()), 0
    for _ in range(2000):
        try:
            decode(Type.PLAN, nonsense.encoded(Type.PLAN))
        except RemoteError:
            refused += 1
    assert 0 < refused < 400


def test_every_message_in_the_state_table_is_fuzzed():
    """A message that is added there is fuzzed without a word being written."""
    said = {kind for state in FIRST for kind in allowed(state, Side.DIALER)} | set(
        allowed(ConnectionState.DATA, Side.LISTENER)
    )
    asked = {
        Type.JOIN,
        Type.REPORT,
        Type.CALL,
        Type.ENROL,
        Type.ATTACH,
        Type.REQUEST,
        Type.RANK,
        Type.CELL,
        Type.MEMBER,
        Type.WORKER_REPORT,
        Type.OPEN,
    }
    assert asked | SIGNED | {Type.PIECE} <= said


async def bug(*_: object) -> None:
    raise ZeroDivisionError


async def reported_bug() -> None:
    with Tasks(Events()).watching():
        report_bug("planning", ZeroDivisionError())


async def bug_in_http_handler() -> None:
    server = RunReplay([], 1.0, "run").http
    request = make_mocked_request("GET", "/status", headers={"Authorization": f"Bearer {server.access.bearer}"})
    await server._guard(request, bug)


async def lost_task() -> None:
    await asyncio.wait([asyncio.create_task(bug())])
    gc.collect()


@pytest.mark.parametrize("fails", [reported_bug, bug_in_http_handler, lost_task])
def test_log_message_of_unexpected_error_is_recognised(fails, caplog):
    """The pattern matches the message alone, without a traceback."""
    asyncio.run(fails())
    assert any(UNEXPECTED.search(record.getMessage()) for record in caplog.records)


def test_report_of_fatal_signal_is_recognised():
    code = "import faulthandler, os; faulthandler.enable(); os.abort()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    first, *_ = done.stderr.splitlines()
    assert UNEXPECTED.search(first)


async def test_insiders_are_borne(tmp_path):
    outcome = Outcome()
    async with Infiltrated(tmp_path, deadline_s=600.0) as fleet:
        await infiltrate(fleet, MESSAGES, 1, outcome)
    assert outcome.wrong == []
    assert outcome.unexpected == []
    assert outcome.tally["given up"] == 0
    assert outcome.tally["heard"] >= MESSAGES
    assert outcome.versions > 3
    for name, (before, after) in outcome.memory.items():
        assert after - before < MORE_BYTES, name

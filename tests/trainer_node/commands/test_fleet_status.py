"""``p2pcast fleet status``: rates, prices and the learner's need, from a ledger's /status."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.cli import cli
from p2pcast.cli.status_document import StatusObject
from p2pcast.ground.errors import RefusedError, UsageError
from trainer_node.commands.fleet_status import fleet_document

TIMES = {"steps": 9, "train_s": 8.0, "wait_s": 2.0, "rollouts": 32, "bubble": 0.2, "broadcast_s": 1.0}
WORKER = {"name": "a", "served": "0.9", "leases": 4, "silent_s": 0.1, "tokens_per_s": 300.0, "price_usd_h": 1.8}
LEDGER = {
    "role": "ledger",
    "staleness": 3,
    "mean_tokens": 100.0,
    "groups": {"open": 7, "complete": 1, "short": 1, "trained": 6, "dropped": 2},
    "times": TIMES,
    "workers": [WORKER, WORKER | {"name": "b", "price_usd_h": 0.5}, WORKER | {"name": "new", "tokens_per_s": None}],
}


def document(**more: Any) -> dict[str, Any]:
    return fleet_document(StatusObject(LEDGER | more), 1)


def test_workers_are_ordered_by_price_per_rollout() -> None:
    found = document()
    assert [one["name"] for one in found["workers"]] == ["b", "a", "new"]
    assert [one["rollouts_per_s"] for one in found["workers"]] == [3.0, 3.0, None]
    assert found["workers"][1]["usd_per_1000_rollouts"] == pytest.approx(1.8 / 3.6 / 3)
    assert (found["rollouts_per_s"], found["usd_per_h"]) == (6.0, pytest.approx(4.1))


def test_the_need_counts_groups_that_are_never_trained() -> None:
    found = document()
    assert found["trained_share"] == 0.8
    assert found["least_rollouts_per_s"] == pytest.approx(32 / 0.8 / 8)
    assert found["predicted_bubble"] == 0.0
    assert document(workers=LEDGER["workers"][:1])["predicted_bubble"] == pytest.approx(0.4)


@pytest.mark.parametrize("missing", ["train_s", "rollouts", "broadcast_s"])
def test_without_measurements_nothing_is_predicted(missing: str) -> None:
    found = document(times={name: value for name, value in TIMES.items() if name != missing})
    assert found["least_rollouts_per_s"] is None
    assert found["predicted_bubble"] is None


def test_broadcasts_that_no_fleet_can_hide_are_named() -> None:
    found = document(staleness=0, times=TIMES | {"broadcast_s": 9.0})
    assert found["least_rollouts_per_s"] is None
    assert "no number of workers keeps the learner busy" in found["why"]


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*LEDGER, *TIMES, *WORKER]), inner),
    max_leaves=10,
)


@given(ANY, st.sampled_from(sorted(LEDGER)), st.sampled_from(sorted(TIMES)), st.sampled_from(sorted(WORKER)))
def test_any_status_document_is_borne(value: Any, key: str, time: str, column: str) -> None:
    document(**{key: value})
    document(times=TIMES | {time: value})
    document(workers=[WORKER | {column: value}, value])


@contextmanager
def served(answer: dict[str, Any]) -> Iterator[str]:
    class Ledger(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ledger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_the_table_shows_need_and_bubble() -> None:
    with served(LEDGER) as url:
        done = CliRunner().invoke(cli, ["fleet", "status", "--ledger", url])
    assert done.exit_code == 0, done.output
    assert "6 rollouts/s for 4.1 USD/h" in done.output
    assert "learner: trains 8 s and waits 2 s a step of 32 rollouts" in done.output
    assert "needed: 5 rollouts/s; predicted bubble 0.0%, measured 20.0%" in done.output


def test_another_daemon_is_named() -> None:
    with served({"role": "hub"}) as url:
        done = CliRunner().invoke(cli, ["fleet", "status", "--ledger", url])
    assert isinstance(done.exception, UsageError | RefusedError)
    assert "is a hub, not a ledger" in str(done.exception)

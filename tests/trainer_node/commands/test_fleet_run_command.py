"""``p2pcast fleet run``: its options, the capacity that it asks for, and its dry run."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from p2pcast.cli import cli
from p2pcast.ground.errors import EXIT_USAGE, RefusedError, RetryableError, UsageError
from trainer_node.commands.fleet_run import FIRST_STEPS, LedgerWorkers, Target

TIMES = {"steps": 9, "train_s": 8.0, "wait_s": 2.0, "rollouts": 32, "bubble": 0.2, "broadcast_s": 1.0}
WORKER = {"name": "own", "served": "0.9", "leases": 4, "silent_s": 0.1, "tokens_per_s": 300.0, "price_usd_h": 1.8}
LEDGER = {
    "role": "ledger",
    "staleness": 3,
    "mean_tokens": 100.0,
    "groups": {"complete": 1, "trained": 3},
    "times": TIMES,
    "workers": [WORKER, WORKER | {"name": "silent", "silent_s": 61.0}],
}
OFFER = ("--price", "gpu=1.5:0.5:4", "--provider", "gpu=exec:true -- true -- true")
HAND = ("--price", "hand=2:1:1", "--provider", "hand=static:own")


class Ledger(http.server.BaseHTTPRequestHandler):
    """Answers with the server's documents by path, and notes each body."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.orders.append((self.path, body))  # type: ignore[attr-defined]
        self._answer()

    def _answer(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(self.server.documents[self.path]).encode())  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def ledger() -> Iterator[Any]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ledger) as server:
        server.documents = {"/status": LEDGER, "/v1/workers/drain": {"leases": 3}}  # type: ignore[attr-defined]
        server.orders = []  # type: ignore[attr-defined]
        server.url = f"http://127.0.0.1:{server.server_address[1]}"  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def run(*words: str) -> Any:
    return CliRunner().invoke(cli, ["fleet", "run", *words])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--price", "gpu=1:1:1", "--provider", "cpu=static:a"), "once for each KIND of --price"),
        (("--price", "gpu=1:1:1", "--provider", "static:a"), "once for each KIND of --price"),
        ((*OFFER, "--provider", "gpu=static:a"), "once for each KIND of --price"),
        ((*OFFER, "--price", "gpu=1:1:1"), "names the kind 'gpu' twice"),
        ((*OFFER, "--price", "cpu=1:1:1"), "the kind 'cpu' has a --price and no --provider"),
        (("--price", "gpu", "--provider", "gpu=static:a"), "--price 'gpu': write KIND=USD_H:RATE"),
        (("--price", "gpu=1:1:1", "--provider", "gpu=cloud:a"), "write one of static:"),
    ],
)
def test_offers_and_providers_that_do_not_match_are_refused(words: tuple[str, ...], why: str) -> None:
    done = run(*words)
    assert isinstance(done.exception, UsageError)
    assert why in str(done.exception)


def test_an_offer_and_a_provider_are_needed() -> None:
    assert run("--provider", "gpu=static:a").exit_code == EXIT_USAGE
    assert run("--price", "gpu=1:1:1").exit_code == EXIT_USAGE


def test_a_dry_run_prints_the_change_and_orders_nothing(ledger: Any) -> None:
    done = run(*OFFER, *HAND, "--ledger", ledger.url, "--dry-run")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        "needed: 4 rollouts/s; asked for: 4.4 rollouts/s; present: 3 rollouts/s",
        "runs own: 3 rollouts/s for 2 USD/h",
        "would start gpu-0",
        "would start gpu-1",
        "would start gpu-2",
    ]
    assert ledger.orders == []


def test_a_dry_run_names_workers_that_are_too_many(ledger: Any) -> None:
    ledger.documents["/status"] = LEDGER | {"workers": [WORKER | {"name": f"gpu-{n}"} for n in range(3)]}
    listed = ("--price", "gpu=1.5:0.5:4", "--provider", "gpu=exec:false -- false -- printf 'gpu-0\\ngpu-1\\ngpu-2\\n'")
    done = run(*listed, "--ledger", ledger.url, "--dry-run")
    assert done.output.splitlines()[-1:] == ["would drain gpu-2"]


def test_another_daemon_or_none_is_named(ledger: Any) -> None:
    ledger.documents["/status"] = {"role": "hub"}
    done = run(*OFFER, "--ledger", ledger.url)
    assert isinstance(done.exception, UsageError | RefusedError)
    assert "is no ledger" in str(done.exception)
    done = run(*OFFER, "--ledger", "http://127.0.0.1:1", "--dry-run")
    assert isinstance(done.exception, RetryableError)


def found(steps: int, least: float | None, why: str | None = None) -> dict[str, Any]:
    return {"steps": steps, "least_rollouts_per_s": least, "why": why}


def test_the_first_capacity_stays_until_five_steps_are_measured() -> None:
    target = Target(2.0, 1.1)
    assert target.per_s(found(0, None)) == 2.0
    assert target.per_s(found(FIRST_STEPS - 1, 10.0)) == 2.0
    assert target.per_s(found(FIRST_STEPS, 10.0)) == pytest.approx(11.0)
    assert target.per_s(found(16, 20.0)) == pytest.approx(22.0)


def test_a_ledger_that_begins_anew_keeps_the_last_capacity() -> None:
    target = Target(2.0, 1.0)
    target.per_s(found(9, 10.0))
    assert target.per_s(found(0, None)) == 10.0
    assert target.per_s(found(3, 90.0)) == 10.0


def test_broadcasts_that_no_fleet_can_hide_are_said_once_and_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    target = Target(2.0, 1.0)
    target.per_s(found(9, 10.0))
    for number in range(3):
        assert target.per_s(found(9, None, f"no number of workers keeps the learner busy: {number} s")) == 10.0
    assert caplog.text.count("no number of workers keeps the learner busy") == 1


async def test_orders_name_worker_and_time(ledger: Any) -> None:
    workers = LedgerWorkers(ledger.url, None, None, 1, 900.0)
    await workers.refresh()
    assert await workers.rates() == {"own": 3.0}, "a silent worker has no rate"
    assert not await workers.drain("own")
    ledger.documents["/v1/workers/drain"] = {"leases": 0}
    assert await workers.drain("own")
    await workers.admit("own")
    path = "/v1/workers/drain"
    assert ledger.orders == [(path, {"name": "own", "for_s": for_s}) for for_s in (900.0, 900.0, 0.0)]

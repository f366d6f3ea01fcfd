"""atropos: its trainer routes, answered from a ledger. A trainer that polls atropos's trajectory API for batches polls
this server, and trains on accepted results. Tried with the data types of atroposlib 0.4.0.

    python -m trainer_node.frameworks.atropos http://127.0.0.1:7079 run/ledger.json --bearer-file ledger/http.token

Routes of a trainer: ``POST /register``, ``GET /batch``, ``/status``, ``/info``, ``/wandb_info``, ``/latest_example``.
``POST /checkpoint {"step": N}`` is ours: a checkpoint of N steps is whole. Environments cannot register: rollouts come
from the ledger's workers.

A trainer does not say when a batch is trained, so the polls say it. atropos's own trainer polls until the answer is
null, trains, and polls again. So the first poll after a batch is answered with null, and the next poll means that the
batch is trained. A trainer that trains before it polls again gets one null more.

Guarantee: each batch is trained at most once on the way to any checkpoint that the trainer names. ``/register`` with
``starting_step`` N trains on from a checkpoint of N steps: the ledger opens all batches again that it does not contain.
An error of the ledger is the answer to the next poll.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from aiohttp import web

from p2pcast.cli import exit_code
from p2pcast.daemon.application_server import serving
from p2pcast.daemon.daemon_requests import DEFAULT_URL
from p2pcast.daemon.request_body import read_json
from p2pcast.ground.addresses import parse_address
from p2pcast.ground.errors import P2PCastError, RefusedError, UsageError
from p2pcast.ground.limits import KIB
from p2pcast.process import event_loop
from p2pcast.process.daemon_process import run_until_signal
from trainer_node.frameworks.ledger_steps import LedgerSteps, filled, newest_version

if TYPE_CHECKING:
    from p2pcast.ledger_api.batch_client import RolloutBatch
    from trainer_node.learning.objective.training_rows import TrainingRow

TRIED: Final = ("0.4.0",)
"""Versions of atroposlib."""
NOT_LEARNT: Final = -100
"""In place of the token in ``masks``."""
NO_LOGPROB: Final = 1.0
"""In ``inference_logprobs``, for tokens that are not learnt from."""
MOST_BODY_BYTES: Final = 64 * KIB
BODY_S: Final = 10.0
"""Time limit for a request's body, in seconds."""
MOST_STEPS: Final = 1 << 40
ANSWER_S: Final = 2.0
"""Time in seconds that a poll waits for a batch. atropos's trainer gives an answer 10 s."""
GIVE_UP_S: Final = 60.0
"""Time in seconds for one request to a ledger that does not answer."""
END_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class TrainerRegistration:
    """``batch_size``: sequences of a batch. ``max_token_len``: tokens of a sequence. ``starting_step``: steps that the
    trainer's weights have.
    """

    batch_size: int
    max_token_len: int
    starting_step: int
    wandb_group: str
    wandb_project: str

    @classmethod
    def of(cls, body: Any) -> TrainerRegistration:
        """Raises UsageError."""
        try:
            numbers = [int(body[name]) for name in ("batch_size", "max_token_len", "starting_step")]
        except (KeyError, TypeError, ValueError):
            raise UsageError("a trainer registers with batch_size, max_token_len and starting_step") from None
        if numbers[0] < 2 or numbers[1] < 2 or not 0 <= numbers[2] < MOST_STEPS:
            raise UsageError("batch_size and max_token_len are at least 2, and starting_step is at least 0")
        words = [str(body.get(name) or "") for name in ("wandb_group", "wandb_project")]
        return cls(numbers[0], numbers[1], numbers[2], words[0], words[1])


class TrainerRoutes:
    """``branch`` None: the hub at ``hub`` says which branch has the trainer's weights."""

    def __init__(self, steps: LedgerSteps, hub: str, branch: int | None = None) -> None:
        self._steps, self._hub, self._branch = steps, hub, branch
        self._ledger = asyncio.Lock()
        """Held while a request to the ledger is under way."""
        self._wanted, self._found = asyncio.Event(), asyncio.Event()
        self._trainer: TrainerRegistration | None = None
        self._step = 0
        """Of the batch that was handed out last, or is handed out next."""
        self._handed = self._ended = False
        """Whether the batch was handed out, and whether a null has followed it."""
        self._ready: list[dict[str, Any]] | None = None
        self._latest: dict[str, Any] = {}
        self._error: str | None = None

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/", self._root),
                web.post("/register", self._register),
                web.get("/batch", self._batch),
                web.get("/status", self._status),
                web.get("/info", self._info),
                web.get("/wandb_info", self._wandb_info),
                web.get("/latest_example", self._example),
                web.post("/checkpoint", self._checkpoint),
                *(web.post(f"/{name}", self._no_environment) for name in ("register-env", "scored_data")),
                web.post("/scored_data_list", self._no_environment),
            ]
        )
        return app

    async def follow(self) -> None:
        """Fetches the batch that a poll has asked for."""
        while True:
            await self._wanted.wait()
            async with self._ledger:
                try:
                    wait_s = await self._fetch()
                except P2PCastError as error:
                    self._fail(str(error))
                    wait_s = 0.0
            await asyncio.sleep(wait_s)

    async def _fetch(self) -> float:
        """Time in seconds until the next request."""
        from p2pcast.ledger_api.batch_client import Finished, Wait

        if not self._wanted.is_set() or self._trainer is None:
            return 0.0
        found = await asyncio.to_thread(self._steps.poll, self._step)
        if isinstance(found, Wait):
            return found.wait_s
        if isinstance(found, Finished):
            self._fail(f"the ledger's run has ended at step {self._step}: the trainer needs no more steps")
            return 0.0
        self._ready = await asyncio.to_thread(self._items, found, self._trainer)
        self._wanted.clear()
        self._found.set()
        return 0.0

    def _fail(self, text: str) -> None:
        print(f"p2pcast: {text}", file=sys.stderr, flush=True)
        self._error = text
        self._wanted.clear()
        self._found.set()

    def _items(self, batch: RolloutBatch, trainer: TrainerRegistration) -> list[dict[str, Any]]:
        """Raises UsageError, IntegrityError."""
        rows = self._steps.rows(batch, temperature=None)
        longest = max(row.tokens for row in rows)
        if longest > trainer.max_token_len:
            raise UsageError(
                f"a sample of step {batch.step} has {longest} tokens, and the trainer takes {trainer.max_token_len}:"
                " lower the ledger's limit of tokens, or raise the trainer's"
            )
        return scored_data(rows, trainer.batch_size, batch.step)

    # -- requests

    async def _root(self, request: web.Request) -> web.Response:
        return web.json_response({"message": "p2pcast: a ledger's batches for a trainer of atropos"})

    async def _register(self, request: web.Request) -> web.Response:
        try:
            trainer = TrainerRegistration.of(await _body(request))
            async with self._ledger:
                self._wanted.clear()
                await asyncio.to_thread(self._begin, trainer)
                self._trainer, self._step, self._error = trainer, trainer.starting_step, None
                self._handed = self._ended = False
                self._ready = None
        except P2PCastError as error:
            print(f"p2pcast: {error}", file=sys.stderr, flush=True)
            return _refused(error)
        return web.json_response({"uuid": secrets.randbits(63)})

    def _begin(self, trainer: TrainerRegistration) -> None:
        """Raises P2PCastError."""
        step, branch = trainer.starting_step, self._branch
        if branch is None:
            newest = newest_version(self._hub)
            if newest.step != step:
                raise RefusedError(
                    f"the hub's newest version is {newest}, and the trainer begins at step {step}: publish the weights"
                    f" as step {step} before the trainer registers"
                )
            branch = newest.branch
        facts = self._steps.begin_by_journal(branch, step, checkpoint=step > 0)
        if trainer.batch_size < 2 * facts.batch_groups:
            raise UsageError(
                f"the ledger's batches have {facts.batch_groups} groups of 2 samples or more, and the trainer takes"
                f" {trainer.batch_size} sequences: raise batch_size to --batch-groups x --group-size of p2pcast ledger"
            )

    async def _batch(self, request: web.Request) -> web.Response:
        if (failure := self._failure()) is not None:
            return failure
        if self._trainer is None:
            return _status_error("no trainer is registered: call /register first, also after a restart of this server")
        if self._handed:
            if not self._ended:
                self._ended = True
                return web.json_response({"batch": None})
            self._step += 1
            self._handed = self._ended = False
        if self._ready is None:
            self._found.clear()
            self._wanted.set()
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._found.wait()
            except TimeoutError:
                return web.json_response({"batch": None})
        if (failure := self._failure()) is not None:
            return failure
        items, self._ready = self._ready, None
        if items is None:
            return web.json_response({"batch": None})
        self._handed, self._latest = True, items[0]
        return web.json_response({"batch": items})

    def _failure(self) -> web.Response | None:
        return None if self._error is None else _status_error(self._error)

    async def _checkpoint(self, request: web.Request) -> web.Response:
        try:
            body = await _body(request)
            step = body.get("step") if isinstance(body, Mapping) else None
            if not isinstance(step, int) or not 0 < step < MOST_STEPS:
                raise UsageError('a checkpoint is {"step": N}, with the number of steps that it has')
            async with self._ledger:
                await asyncio.to_thread(self._steps.acknowledge, step)
        except P2PCastError as error:
            return _refused(error)
        return web.json_response({"status": "received"})

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"current_step": self._step + self._handed, "queue_size": int(self._ready is not None)}
        )

    async def _info(self, request: web.Request) -> web.Response:
        sizes = (-1, -1) if self._trainer is None else (self._trainer.batch_size, self._trainer.max_token_len)
        return web.json_response(dict(zip(("batch_size", "max_token_len"), sizes, strict=True)))

    async def _wandb_info(self, request: web.Request) -> web.Response:
        words = (None, None) if self._trainer is None else (self._trainer.wandb_group, self._trainer.wandb_project)
        return web.json_response(dict(zip(("group", "project"), words, strict=True)))

    async def _example(self, request: web.Request) -> web.Response:
        return web.json_response(self._latest or _scored([]))

    async def _no_environment(self, request: web.Request) -> web.Response:
        text = "environments cannot register here: the ledger's workers make the rollouts, `p2pcast work` starts one"
        return web.json_response({"status": "failure", "error": text}, status=404)


def scored_data(rows: Sequence[TrainingRow], count: int, step: int) -> list[dict[str, Any]]:
    """A batch of ``count`` sequences in the form of atropos's ``ScoredData``, one for each group, and one for fillers.
    Raises UsageError for more rows than ``count``.
    """
    whole = filled(rows, count, "the trainer", step)
    groups = [list(group) for _, group in groupby(whole[: len(rows)], key=lambda row: row.group)]
    items = [_scored(group) for group in groups]
    if fillers := whole[len(rows) :]:
        without = {"scores": [0.0] * len(fillers), "overrides": [{"set_advantage_to_zero": True} for _ in fillers]}
        items.append(_scored(fillers) | without)
    return items


def _scored(rows: Sequence[TrainingRow]) -> dict[str, Any]:
    """``advantages``: of each token. Trainers that compute advantages themselves take ``scores``: the rewards."""
    import numpy as np

    return {
        "tokens": [row.token_ids.tolist() for row in rows],
        "masks": [np.where(row.learnt, row.token_ids, NOT_LEARNT).tolist() for row in rows],
        "scores": [row.reward for row in rows],
        "advantages": [row.advantages.tolist() for row in rows],
        "ref_logprobs": None,
        "messages": None,
        "generation_params": {"temperature": rows[0].temperature} if rows else None,
        "inference_logprobs": [np.where(row.learnt, row.logprobs, NO_LOGPROB).tolist() for row in rows],
        "overrides": None,
        "group_overrides": None,
        "images": None,
        "env_id": None,
        "distill_token_ids": None,
        "distill_logprobs": None,
    }


async def _body(request: web.Request) -> Any:
    """Raises UsageError."""
    return await read_json(request, MOST_BODY_BYTES, BODY_S)


def _refused(error: P2PCastError) -> web.Response:
    return web.json_response({"error": str(error)}, status=400 if isinstance(error, UsageError) else 409)


def _status_error(text: str) -> web.Response:
    """In the form that makes a trainer of atropos raise."""
    return web.json_response({"status": "error", "message": text, "batch": []})


@click.command()
@click.argument("ledger")
@click.argument("journal", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--bearer-file", type=click.Path(path_type=Path), help="http.token of a ledger on this machine.")
@click.option("--hub", metavar="HOST:PORT", help="Hub that issues the certificate for a ledger over https.")
@click.option("--token-file", type=click.Path(path_type=Path), help="Join token of the role trainer, with --hub.")
@click.option("--hub-http", default=DEFAULT_URL, help="URL of the hub's HTTP server, which knows the newest version.")
@click.option("--branch", type=click.IntRange(0), help="Branch of the trainer's weights, for a ledger without a hub.")
@click.option("--listen", default="127.0.0.1:8000", metavar="HOST:PORT", help="Address for the trainer's requests.")
def main(
    ledger: str,
    journal: Path,
    bearer_file: Path | None,
    hub: str | None,
    token_file: Path | None,
    hub_http: str,
    branch: int | None,
    listen: str,
) -> None:
    """Hand the batches of the ledger at URL LEDGER to a trainer of atropos. JOURNAL: file with the batches since the
    last checkpoint, of one run alone.
    """
    from p2pcast.ledger_api.batch_client import BatchClient

    async def work() -> None:
        client = BatchClient(ledger, bearer_file=bearer_file, hub=hub, token_file=token_file, give_up_s=GIVE_UP_S)
        routes = TrainerRoutes(LedgerSteps(client, journal), hub_http, branch)
        async with serving(routes.app(), parse_address(listen, default_host="127.0.0.1"), END_S) as (host, port):
            print(f"batches of {ledger} at http://{host}:{port}", flush=True)
            await routes.follow()

    sys.exit(exit_code(lambda: event_loop.run(run_until_signal(work))))


if __name__ == "__main__":
    main()

"""atropos's trainer routes on a real ledger. The trainer is played: it polls as atropos's own example trainer does.
atropos's own data types check each batch, in an environment of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from p2pcast.daemon.application_server import serving
from p2pcast.ledger_api.batch_client import BatchClient
from tests.environments import ROOT
from tests.trainer_node.frameworks.bridge_stage import (
    GROUPS,
    SIZE,
    Ledger,
    batch_states,
    filled_ledger,
    played_hub,
    run_in,
)
from trainer_node.frameworks.atropos import END_S, MOST_STEPS, NO_LOGPROB, NOT_LEARNT, TrainerRoutes
from trainer_node.frameworks.ledger_steps import LedgerSteps

HERE = Path(__file__).parent
SEQUENCES = GROUPS * SIZE


class Trainer:
    """As the trainer in atropos's repository: polls until null, then trains."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url = http, url

    async def get(self, path: str) -> Any:
        async with self._http.get(self._url + path) as answer:
            return await answer.json()

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self._http.post(self._url + path, json=body) as answer:
            return answer.status, await answer.json()

    async def register(self, step: int, size: int = SEQUENCES, tokens: int = 64) -> tuple[int, Any]:
        about = {"wandb_group": "", "wandb_project": "", "checkpoint_dir": "out", "save_checkpoint_interval": 2}
        sizes = {"batch_size": size, "max_token_len": tokens, "starting_step": step, "num_steps": 4}
        return await self.post("/register", about | sizes)

    async def batches(self) -> list[Any]:
        found: list[Any] = []
        while True:
            answer = await self.get("/batch")
            if answer.get("status") == "error":
                raise RuntimeError(answer["message"])
            if answer["batch"] is not None:
                found.append(answer["batch"])
            elif found:
                return found


@contextlib.asynccontextmanager
async def trainer_of(ledger: Ledger, journal: Path, hub: str = "", **more: Any) -> AsyncIterator[Trainer]:
    client = BatchClient(ledger.url, bearer_file=ledger.bearer, give_up_s=more.pop("give_up_s", 60.0))
    routes = TrainerRoutes(LedgerSteps(client, journal), hub, None if hub else 0)
    async with (
        serving(routes.app(), ("127.0.0.1", 0), END_S) as (host, port),
        aiohttp.ClientSession() as http,
        asyncio.TaskGroup() as tasks,
    ):
        following = tasks.create_task(routes.follow(), name="fetches batches")
        yield Trainer(http, f"http://{host}:{port}")
        following.cancel()


def assert_item(item: Any) -> None:
    for tokens, mask, scores, logprobs in zip(
        item["tokens"], item["masks"], item["advantages"], item["inference_logprobs"], strict=True
    ):
        assert mask == [NOT_LEARNT, NOT_LEARNT, *tokens[2:]]
        assert logprobs == [NO_LOGPROB, NO_LOGPROB, -1.0, -1.0]
        assert scores[:2] == [0.0, 0.0]
        assert (scores[2] > 0) == (tokens[2] == 3)
    assert item["generation_params"] == {"temperature": 1.0}


async def test_each_batch_is_trained_once_though_the_trainer_begins_again(tmp_path: Path) -> None:
    state, journal, lines = tmp_path / "ledger", tmp_path / "journal.json", tmp_path / "lines.jsonl"
    state.mkdir()
    said = []
    async with filled_ledger(state) as ledger:
        await ledger.publish()
        async with trainer_of(ledger, journal) as trainer:
            with pytest.raises(RuntimeError, match="no trainer is registered: call /register first"):
                await trainer.batches()
            assert (await trainer.register(0))[0] == 200
            for step in range(4):
                (batch,) = await trainer.batches()
                status, info = await trainer.get("/status"), await trainer.get("/info")
                assert status["current_step"] == step + 1
                said.append({"batch": batch, "status": status, "info": info})
                if step == 1:
                    assert await trainer.post("/checkpoint", {"step": 2}) == (200, {"status": "received"})
        # The server and the trainer end; the trainer's newest checkpoint has two steps.
        async with trainer_of(ledger, journal) as trainer:
            assert (await trainer.register(2))[0] == 200
            for _ in range(2):
                (batch,) = await trainer.batches()
                said.append(
                    {"batch": batch, "status": await trainer.get("/status"), "info": await trainer.get("/info")}
                )
            assert (await trainer.post("/checkpoint", {"step": 4}))[0] == 200
            assert await trainer.get("/latest_example") == said[-1]["batch"][0]
    trained = [(step, "trained") for step in range(4)]
    assert batch_states(state) == sorted([*trained, (2, "reopened"), (3, "reopened")])
    for line in said:
        assert [len(item["tokens"]) for item in line["batch"]] == [SIZE] * GROUPS
        for item in line["batch"]:
            assert_item(item)
    # Batches that are short of sequences are filled, by one item without advantage.
    async with filled_ledger(state, last_step=5) as ledger, trainer_of(ledger, journal) as trainer:
        assert (await trainer.register(4, SEQUENCES + 2))[0] == 200
        (batch,) = await trainer.batches()
        fillers = batch[-1]
        assert len(fillers["tokens"]) == 2
        assert [sum(token != NOT_LEARNT for token in mask) for mask in fillers["masks"]] == [1, 1]
        assert fillers["scores"] == [0.0, 0.0]
        assert not any(map(any, fillers["advantages"]))
        said.append({"batch": batch, "status": await trainer.get("/status"), "info": await trainer.get("/info")})
        with pytest.raises(RuntimeError, match="the ledger's run has ended at step 5"):
            await trainer.batches()
    lines.write_text("".join(json.dumps(line) + "\n" for line in said))
    assert (await run_in("bridges", HERE / "atropos_types.py", lines)).split() == [str(len(said))]


async def test_batches_that_do_not_fit_are_refused_with_a_sentence(tmp_path: Path) -> None:
    async with filled_ledger(tmp_path) as ledger:
        await ledger.publish()
        async with trainer_of(ledger, tmp_path / "journal.json", give_up_s=0.5) as trainer:
            assert await trainer.post("/register", {"batch_size": 8}) == (
                400, {"error": "a trainer registers with batch_size, max_token_len and starting_step"},
            )  # fmt: skip
            status, answer = await trainer.register(0, GROUPS * 2 - 1)
            assert status == 400
            assert "raise batch_size to --batch-groups x --group-size" in answer["error"]
            assert (await trainer.register(0, SEQUENCES - 1))[0] == 200
            with pytest.raises(RuntimeError, match="has 8 samples, and the trainer trains 7 a step"):
                await trainer.batches()
            assert (await trainer.register(0, tokens=3))[0] == 200
            with pytest.raises(RuntimeError, match="has 4 tokens, and the trainer takes 3"):
                await trainer.batches()
            assert (await trainer.post("/scored_data", {}))[0] == 404
            for wrong in ({"step": 0}, {"step": "1"}, {"step": MOST_STEPS}, [1]):
                assert (await trainer.post("/checkpoint", wrong))[0] == 400
            assert (await trainer.register(0))[0] == 200
            await ledger.stop()
            with pytest.raises(RuntimeError, match="does not answer"):
                await trainer.batches()


async def test_the_hub_names_the_branch_of_the_trainers_weights(tmp_path: Path) -> None:
    async with (
        played_hub("0.0", "0.3") as hub,
        filled_ledger(tmp_path) as ledger,
        trainer_of(ledger, tmp_path / "journal.json", hub) as trainer,
    ):
        status, answer = await trainer.register(2)
        assert status == 409
        assert "the hub's newest version is 0.3, and the trainer begins at step 2" in answer["error"]
        assert (await trainer.register(3))[0] == 200


async def test_the_command_names_its_address(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "trainer_node.frameworks.atropos", "http://127.0.0.1:9", tmp_path / "journal", "--listen",
        "127.0.0.1:0", cwd=ROOT, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
    finally:
        process.terminate()
        code = await process.wait()
    assert line.startswith("batches of http://127.0.0.1:9 at http://127.0.0.1:")
    assert code == 0

"""``p2pcast task try`` with tasks in text: the engine names the tokenizer."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from p2pcast.ground.errors import LocalError, RetryableError
from p2pcast.tasks.task_loader import load_task
from rollout_node.commands.task_try import model_of
from tests.support.fake_engine import FakeEngine


@pytest.fixture
async def naming() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that names its model as the list says."""
    said = [b""]

    async def models(request: web.Request) -> web.Response:
        return web.Response(body=said[0], content_type="application/json")

    app = web.Application()
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}", said
    await runner.cleanup()


async def test_the_engines_model_is_its_folder_or_its_name(naming: tuple[str, list[bytes]]) -> None:
    url, said = naming
    said[0] = b'{"data": [{"id": "m", "root": "/models/m"}]}'
    assert await model_of(url) == "/models/m"
    said[0] = b'{"data": [{"id": "org/m", "root": null}]}'
    assert await model_of(url) == "org/m"


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b'{"data": []}', b'{"data": [{"id": 3}]}', b'{"data": [{"id": "a,b"}]}']
)
async def test_an_engine_that_names_no_model_is_told_apart(naming: tuple[str, list[bytes]], answer: bytes) -> None:
    url, said = naming
    said[0] = answer
    with pytest.raises(LocalError, match="tokenizer=DIR"):
        await model_of(url)
    with pytest.raises(RetryableError, match="does not answer"):
        await model_of("http://127.0.0.1:9")


@pytest.mark.parametrize("name", ["math,tokenizer=bytes,max_tokens=9", "holdem,tokenizer=bytes,turn_tokens=9"])
async def test_a_task_in_text_is_tried_with_its_settings(engine: FakeEngine, name: str) -> None:
    pytest.importorskip("math_verify", reason="needs the extra math")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "p2pcast.cli", "task", "try", name, "--engine", engine.url, "--jobs", "2", "--json"),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    document = json.loads(out)
    assert document["hash"] == load_task(name).hash.hex()
    for play in document["plays"]:
        assert play["reward"] <= 0.0
        assert 1 <= sum(play["mask"]) <= 9  # no answer of the engine is a legal action


async def test_a_task_whose_prompts_fail_is_named_with_file_and_line(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(__file__).parents[2] / "p2pcast" / "tasks"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    for name, why in (
        ("RaisesAtOnce", "prompt 0: LookupError: no data (hostile_prompts.py, line "),
        ("Poisoned", "prompt 1 of task sums: not a Prompt, but of type dict"),
    ):
        words = ("task", "try", f"hostile_prompts:{name}", "--engine", engine.url)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "p2pcast.cli", *words), stderr=asyncio.subprocess.PIPE
        )
        _, said = await process.communicate()
        assert process.returncode in (1, 2)
        assert why in said.decode()
        assert "Traceback" not in said.decode()
    assert not engine.asked

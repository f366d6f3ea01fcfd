"""Kinds of models in real vLLM engines (CPU build): three versions of each, bit for bit what vLLM's own loader makes of them,
and every word the same as a fresh engine's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from real_server import ENVIRONMENT, PROMPTS, TWO_RANKS, Server, complete, fresh

from rollout_node.install_socket import InstallSocket
from rollout_node.installers.vllm import VllmInstaller

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PLAIN, RELOADED, DERIVED = "plain", "some of its tensors go through the loader", "always loaded as a whole"
REFUSED = "its kernels keep weights of their own, which nobody can reach"
CASES = {
    "moe=bfloat16": PLAIN,
    "shared_expert=bfloat16": PLAIN,
    "qwen3=float32": PLAIN,
    "qwen3=bfloat16": RELOADED,
    "tied=bfloat16": PLAIN,
    "qwen2=bfloat16": PLAIN,
    "gpt2=bfloat16": PLAIN,
    "falcon=bfloat16": RELOADED,
    "tied=bfloat16:fp8_per_channel": DERIVED,
}
if "amx_tile" not in Path("/proc/cpuinfo").read_text():  # else vLLM packs these two in yet other ways
    CASES |= {"mla=bfloat16": DERIVED, "int8=bfloat16": REFUSED}
TAKEN = [case for case, kind in CASES.items() if kind != REFUSED]
ZOO = ["moe", "shared_expert", "mla", "qwen3:float32", "tied", "qwen2", "gpt2", "falcon", "int8", "moe_one_kv_head"]


def script(name: str, *arguments: str) -> str:
    command = [sys.executable, str(Path(__file__).with_name(name)), *arguments]
    environment = {**os.environ, **ENVIRONMENT, "P2PCAST_SOCK": "/nonexistent"}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm", reason="needs vLLM", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("zoo")
    script("model_zoo.py", str(folder), *ZOO)
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def seen(zoo: Path, work: Path) -> dict[str, Any]:
    output = script("real_models.py", "install", str(work), *(f"{zoo}/{case}" for case in CASES))
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def fresh_engines_say(seen: Any, work: Path) -> dict[str, Any]:
    """Each case's last version, loaded by an engine of its own."""
    output = script("real_models.py", "say", *(f"{work / case / 'v2'}={case.rpartition('=')[2]}" for case in TAKEN))
    return dict(zip(TAKEN, json.loads(output.strip().splitlines()[-1]), strict=True))


@pytest.mark.parametrize("case", TAKEN)
def test_every_bit_and_every_word(seen: dict[str, Any], fresh_engines_say: dict[str, Any], case: str) -> None:
    found, kind = seen[case], CASES[case]
    assert found["packed"] == []
    tensors = found["tensors"]
    assert bool(found["derived"]) == (kind == DERIVED)
    assert (found["reload"] > 0) == (kind != PLAIN)
    assert found["installs"] == (["dense"] * 3 if kind == DERIVED else ["dense", "sparse", "sparse"])
    assert found["equal"] == [True] * 3
    assert found["audits"] == [[0, tensors if kind == DERIVED else 0]] * 3  # nothing is claimed of what can't be read
    assert found["noticed"]
    assert found["in_place"]
    assert found["reload_equal"]
    assert found["refuses_less"] == [True, True]
    assert found["said"][2] == fresh_engines_say[case]
    assert found["said"][0] != found["said"][2]


@pytest.mark.parametrize("case", [case for case, kind in CASES.items() if kind == REFUSED])
def test_models_that_neither_edits_nor_reloads_reach_are_refused(seen: dict[str, Any], case: str) -> None:
    """vLLM's own reload leaves such a model with the right parameters and the wrong answers."""
    assert seen[case]["packed"]


def test_experts_that_compute_in_place_do_as_the_packed_kernel_does(seen: dict[str, Any]) -> None:
    assert seen["experts"] < 0.02  # both round to bfloat16, at other places


async def test_experts_and_shared_heads_at_tensor_parallel_2(
    zoo: Path, tmp_path: Path, make_run: Callable[..., Any], read_state: Callable[..., Any]
) -> None:
    """Experts are cut in width, one head of keys and values is held by both ranks."""
    model = zoo / "moe_one_kv_head"
    run = make_run(*read_state(model))
    server = Server(model, tmp_path, "--tensor-parallel-size", "2", environment=TWO_RANKS)
    socket = InstallSocket(server.install, run)
    installer = VllmInstaller(server.url, socket, run=str(run.folder))
    said, folders = [], []
    try:
        server.wait()
        await socket.start()
        await installer.start()
        async with aiohttp.ClientSession() as http:
            for _ in range(2):
                run.step(run.version.step + 1, share=0.05, bits=0x0180)
                await installer.stage(run.version, run.shadow.path)
                await installer.commit(run.version)
                found = await installer.audit(run.layout, run.digests)
                assert (found.wrong, found.unknown) == ([], [])
                folders.append(run.save(model, tmp_path / str(run.version)))
                said.append([await complete(http, server.url, p) for p in PROMPTS])
    finally:
        await installer.close()
        await socket.close()
        server.stop()
    assert {r["rank"]: r["install"] for r in run.reports if r["phase"] == "prepare"} == {0: "sparse", 1: "sparse"}
    assert fresh(folders, PROMPTS, tensor_parallel=2) == said
    assert said[0] != said[1]

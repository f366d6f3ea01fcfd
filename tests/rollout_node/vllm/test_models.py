"""Kinds of models in real vLLM engines (CPU build): three versions of each equal vLLM's own loader bit for bit.

Every answer equals that of a fresh engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_server import ENVIRONMENT, PROMPTS, TWO_RANKS, Server, complete, fresh, one_off_connections

from rollout_node.installers.engine_installer import EngineInstaller
from rollout_node.installers.install_socket import InstallSocket
from rollout_node.installers.vllm_server import VllmServer

pytestmark = pytest.mark.vllm

PLAIN, RELOADED, DERIVED = "plain", "some of its tensors go through the loader", "always loaded as a whole"
REFUSED = "its kernels keep their own copies of the weights, which can't be edited"
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
    "int8=bfloat16": PLAIN,
    "fp8=bfloat16": PLAIN,
}
TWINS = {
    "tied": ["lm_head.weight", "model.embed_tokens.weight"],
    "gpt2": ["lm_head.weight", "transformer.wte.weight"],
}
"""Tensors that one parameter serves, in a version with an output head of its own."""
AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()
if not AMX:  # with AMX, vLLM packs these in other ways
    CASES |= {"mla=bfloat16": DERIVED, "int8_packed=bfloat16": REFUSED}
SAMPLE = {"moe=bfloat16", "tied=bfloat16:fp8_per_channel", "fp8=bfloat16", "int8_packed=bfloat16"}
"""A case for each kind that test_vllm_server.py does not have; the others are whole proofs."""


def cases(*, refused: bool) -> list[Any]:
    chosen = [case for case, kind in CASES.items() if (kind == REFUSED) is refused]
    return [case if case in SAMPLE else pytest.param(case, marks=pytest.mark.prove) for case in chosen]


ZOO = [
    "moe",
    "shared_expert",
    "mla",
    "qwen3:float32",
    "tied",
    "qwen2",
    "gpt2",
    "falcon",
    "int8",
    "int8_packed",
    "fp8",
    "moe_one_kv_head",
]


def script(name: str, *arguments: str) -> str:
    command = [sys.executable, str(Path(__file__).with_name(name)), *arguments]
    environment = {**os.environ, **ENVIRONMENT, "P2PCAST_SOCK": "/nonexistent"}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=900)
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
def asked(request: pytest.FixtureRequest) -> list[str]:
    """Cases of the tests that run."""
    specs = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    wanted = {spec.params["case"] for spec in specs if spec is not None and "case" in spec.params}
    return [case for case in CASES if case in wanted]


@pytest.fixture(scope="module")
def seen(zoo: Path, work: Path, asked: list[str]) -> dict[str, Any]:
    output = script("real_models.py", "install", str(work), *(f"{zoo}/{case}" for case in asked))
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def fresh_engines_say(seen: Any, work: Path, asked: list[str]) -> dict[str, Any]:
    """Completions of each case's last version, loaded by an engine of its own."""
    taken = [case for case in asked if CASES[case] != REFUSED]
    output = script("real_models.py", "say", *(f"{work / case / 'v2'}={case.rpartition('=')[2]}" for case in taken))
    return dict(zip(taken, json.loads(output.strip().splitlines()[-1]), strict=True))


@pytest.mark.parametrize("case", cases(refused=False))
def test_installed_models_equal_fresh_engines(
    seen: dict[str, Any], fresh_engines_say: dict[str, Any], case: str
) -> None:
    found, kind = seen[case], CASES[case]
    assert found["packed"] == []
    tensors = found["tensors"]
    assert bool(found["derived"]) == (kind == DERIVED)
    assert (found["reload"] > 0) == (kind != PLAIN)
    assert found["installs"] == (["dense"] * 3 if kind == DERIVED else ["dense", "sparse", "sparse"])
    assert found["equal"] == [True] * 3
    assert found["audits"] == [[0, tensors if kind == DERIVED else 0]] * 3  # no claim about unreadable values
    assert found["accounts"] == ["COVERED"]
    assert found["twins"] == TWINS.get(case.partition("=")[0], [])
    assert found["noticed"]
    assert found["in_place"]
    assert found["reload_equal"]
    assert found["refuses_less"] == [True, True]
    assert found["said"][2] == fresh_engines_say[case]
    assert found["said"][0] != found["said"][2]


if not AMX:

    @pytest.mark.parametrize("case", cases(refused=True))
    def test_models_with_unreachable_weights_are_refused(seen: dict[str, Any], case: str) -> None:
        """vLLM's own reload leaves such a model with the right parameters and wrong answers."""
        assert seen[case]["packed"]


def test_experts_in_place_match_the_packed_kernel(seen: dict[str, Any]) -> None:
    assert seen["experts"] < 0.02  # both round to bfloat16, at different steps


@pytest.mark.prove
async def test_experts_and_shared_heads_at_tensor_parallel_2(
    zoo: Path, tmp_path: Path, make_run: Callable[..., Any], read_state: Callable[..., Any]
) -> None:
    """Experts are cut in width; both ranks hold the one head of keys and values."""
    model = zoo / "moe_one_kv_head"
    run = make_run(*read_state(model))
    server = Server(model, tmp_path, "--tensor-parallel-size", "2", environment=TWO_RANKS)
    socket = InstallSocket(server.install, run)
    installer = EngineInstaller(VllmServer(server.url), socket, run=str(run.folder))
    said, folders = [], []
    try:
        server.wait()
        await socket.start()
        await installer.start()
        async with one_off_connections() as http:
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

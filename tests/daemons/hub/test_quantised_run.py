"""A hub that publishes checkpoint folders in a quantised form."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from p2pcast.ground.errors import RefusedError, UsageError
from p2pcast.quantised.live_tensors import quantised
from tests.daemons.conftest import Swarm
from tests.p2pcast.quantised.vllm_quantisers import QUANTISERS, bits
from trainer_node.sdk.publisher import Publisher

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
VERSIONS = 20
LINEARS = {"model.layers.0.self_attn.q_proj": (256, 384), "model.layers.0.mlp.down_proj": (130, 260)}
KEPT = {"model.embed_tokens.weight": (50, 64), "model.norm.weight": (64,), "lm_head.weight": (50, 64)}
SCALES = {"fp8-block": "weight_scale_inv"}
SAMPLED = [kind if kind == "fp8-channel" else pytest.param(kind, marks=pytest.mark.prove) for kind in QUANTISERS]


def first(seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    shapes = {f"{name}.weight": shape for name, shape in LINEARS.items()} | KEPT
    return {name: (0.02 * torch.randn(shape, generator=made)).bfloat16() for name, shape in shapes.items()}


def stepped(state: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """About 1 % of the words are one step up or down."""
    draw = np.random.default_rng(seed)
    out = {}
    for name, tensor in state.items():
        words = tensor.view(torch.int16).numpy().copy()
        words[draw.random(words.shape) < 0.01] += draw.choice([-1, 1])
        out[name] = torch.from_numpy(words).view(torch.bfloat16)
    return out


def save(folder: Path, state: dict[str, torch.Tensor]) -> None:
    part = folder.with_name(f".{folder.name}")
    part.mkdir(parents=True)
    save_file(state, part / "model.safetensors")
    (part / "config.json").write_text('{"model_type": "qwen3"}')
    (part / "STABLE").touch()
    part.rename(folder)


@pytest.mark.vllm
@pytest.mark.parametrize("kind", SAMPLED)
async def test_every_version_has_the_codes_and_scales_of_vllms_quantiser(swarm: Swarm, kind: str) -> None:
    await swarm.hub_up(quantise=kind)
    await swarm.peers_up("a", "b")
    state = first()
    for number in range(VERSIONS):
        state = stepped(state, number)
        save(swarm.checkpoints / f"step_{number}", state)
        await swarm.until(
            lambda number=number: all(str(p.committed) == f"0.{number}" for p in swarm.peers.values()), f"0.{number}"
        )
        expected = {name: bits(state[name]) for name in KEPT}
        packed = "_packed" if kind == "int8-weight-only" else ""
        for name in LINEARS:
            codes, scales = QUANTISERS[kind](state[f"{name}.weight"])
            expected |= {f"{name}.weight{packed}": codes, f"{name}.{SCALES.get(kind, 'weight_scale')}": scales}
            if packed:
                expected[f"{name}.weight_shape"] = bits(torch.tensor(LINEARS[name]))
        for peer in ("a", "b"):
            found = load_file(swarm.out(peer) / f"step_{number}" / "model.safetensors")
            assert found.keys() == expected.keys()
            assert [n for n in found if not np.array_equal(bits(found[n]), expected[n])] == []
    config = json.loads((swarm.out("a") / "latest" / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert config["quantization_config"]["quant_method"] == ("fp8" if kind == "fp8-block" else "compressed-tensors")
    assert swarm.versions("anchor") == ["0.0"]


async def test_values_without_a_code_cost_their_version_alone(swarm: Swarm) -> None:
    await swarm.hub_up(quantise="fp8-channel")
    await swarm.peer_up("a")
    state = first()
    save(swarm.checkpoints / "step_0", state)
    await swarm.published("0.0")
    bad = stepped(state, 1)
    bad["model.layers.0.mlp.down_proj.weight"][3, 5] = float("inf")
    save(swarm.checkpoints / "step_1", bad)
    await swarm.until(lambda: "step_1" in swarm.hub.publishing.lifecycle.skipped, "step_1 is skipped")
    assert (
        "tensor 'model.layers.0.mlp.down_proj.weight': row 3 holds" in swarm.hub.publishing.lifecycle.skipped["step_1"]
    )
    save(swarm.checkpoints / "step_2", stepped(state, 2))
    await swarm.until(lambda: all(p.committed.step == 2 for p in swarm.peers.values() if p.committed), "step 2 is live")


async def test_a_state_without_linears_is_skipped_with_the_reason(swarm: Swarm) -> None:
    await swarm.hub_up(quantise="int8-channel")
    save(swarm.checkpoints / "step_0", {name: tensor for name, tensor in first().items() if name in KEPT})
    await swarm.until(lambda: "step_0" in swarm.hub.publishing.lifecycle.skipped, "step_0 is skipped")
    assert "no tensor can be quantised" in swarm.hub.publishing.lifecycle.skipped["step_0"]


@pytest.mark.parametrize(
    ("was", "now", "remedy"),
    [
        ("fp8-channel", None, "give --quantise fp8-channel"),
        ("fp8-channel", "fp8-block", "give --quantise fp8-channel"),
        (None, "int8-channel", "leave out --quantise"),
    ],
)
async def test_a_run_keeps_its_form(swarm: Swarm, was: str | None, now: str | None, remedy: str) -> None:
    await swarm.down(await swarm.hub_up(quantise=was))
    with pytest.raises(UsageError, match=remedy):
        await swarm.hub_up(quantise=now)
    await swarm.hub_up(quantise=was)


async def test_tensors_of_ranks_are_refused(swarm: Swarm) -> None:
    await swarm.hub_up(quantise="fp8-channel")
    host, port = swarm.address
    with pytest.raises(RefusedError, match="this hub quantises checkpoint folders"):
        await asyncio.to_thread(Publisher, f"{host}:{port}", token_file=swarm.folder / "token", plaintext=True)


def differing(folder: Path, expected: dict[str, torch.Tensor]) -> list[str]:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    return [name for name in found if not np.array_equal(bits(found[name]), bits(expected[name]))]


@pytest.mark.parametrize("kind", SAMPLED)
async def test_engines_of_each_kind_take_the_same_run(swarm: Swarm, kind: str) -> None:
    """One peer quantises, another does not; the quantised folder is the one that a training loop would make."""
    await swarm.hub_up()
    await swarm.peer_up("plain")
    quantising = await swarm.peer_up("quantised", quantise=kind)
    state = first()
    for number in range(4):
        state = stepped(state, number)
        save(swarm.checkpoints / f"step_{number}", state)
        await swarm.until(
            lambda number=number: all(str(p.committed) == f"0.{number}" for p in swarm.peers.values()), f"0.{number}"
        )
        assert differing(swarm.out("plain") / f"step_{number}", state) == []
        assert differing(swarm.out("quantised") / f"step_{number}", dict(quantised(state.items(), kind))) == []
        if number == 1:
            await swarm.down(quantising)
            quantising = await swarm.peer_up("quantised", quantise=kind)
    assert "quantization_config" not in (swarm.out("plain") / "latest" / "config.json").read_text()
    assert "quantization_config" in (swarm.out("quantised") / "latest" / "config.json").read_text()
    code, answer = await swarm.post(quantising, "/verify", {})
    assert (code, json.loads(answer)["engines"][0]["wrong"]) == (200, [])
    # A trainer that has gone back: another branch, whose delta starts at an older version.
    save_again = stepped(first(), 99)
    save(swarm.checkpoints / "step_9", save_again)
    await swarm.until(lambda: all(str(p.committed) == "0.9" for p in swarm.peers.values()), "0.9")
    assert differing(swarm.out("quantised") / "step_9", dict(quantised(save_again.items(), kind))) == []


async def test_an_engine_skips_a_version_that_has_no_codes(swarm: Swarm) -> None:
    await swarm.hub_up()
    peer = await swarm.peer_up("a", quantise="int8-channel")
    state = first()
    save(swarm.checkpoints / "step_0", state)
    await swarm.until(lambda: str(peer.committed) == "0.0", "0.0")
    bad = stepped(state, 1)
    bad["model.layers.0.mlp.down_proj.weight"][3, 5] = float("nan")
    save(swarm.checkpoints / "step_1", bad)
    await swarm.until(lambda: "down_proj.weight': row 3" in (peer.runners[0].error or ""), "the refusal is shown")
    assert str(peer.committed) == "0.0"
    state = stepped(state, 2)
    save(swarm.checkpoints / "step_2", state)
    await swarm.until(lambda: str(peer.committed) == "0.2", "0.2")
    assert differing(swarm.out("a") / "step_2", dict(quantised(state.items(), "int8-channel"))) == []

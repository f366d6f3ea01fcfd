"""``p2pcast doctor --hub`` at a real hub over loopback, with TLS and over plain text."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from p2pcast.doctor.hub_measurements import measure_hub
from p2pcast.doctor.remote_verdicts import judge_hub
from p2pcast.trust.join_token import JoinToken


def http_of(swarm):
    return json.loads((swarm.folder / "hub" / "daemon.json").read_text())["http"]


async def found(swarm, token, *, plaintext):
    """(facts, outcome by check)."""
    url = http_of(swarm)
    url = url if str(url).startswith("http") else f"http://{url}"
    facts = await asyncio.to_thread(measure_hub, swarm.address, token, url, plaintext=plaintext)
    return facts, {each.check: each.outcome for each in judge_hub(facts, ("peer",), 3e6)}


async def test_a_hub_with_tls_is_known_by_its_certificate(tls):
    await tls.hub_up()
    token = JoinToken.parse((tls.folder / "token").read_text())
    facts, outcomes = await found(tls, token, plaintext=False)
    assert (facts.role, facts.run, facts.in_force) == ("hub", token.run.hex(), True)
    assert abs(facts.clock_offset_s) <= facts.clock_error_s + 1
    assert outcomes["hub"] == outcomes["hub identity"] == outcomes["hub clock"] == "ok"
    assert outcomes["way back"] == outcomes["throughput"] == "unknown"
    facts, outcomes = await found(tls, replace(token, run=bytes(16)), plaintext=False)
    assert outcomes["hub identity"] == "unfit"


async def test_a_hub_over_plain_text_is_not_mistaken_for_one_with_tls(swarm):
    await swarm.hub_up()
    token = JoinToken.parse((swarm.folder / "token").read_text())
    _, outcomes = await found(swarm, token, plaintext=True)
    assert outcomes["hub"] == "ok"
    assert outcomes["hub identity"] == "unknown"
    facts, outcomes = await found(swarm, token, plaintext=False)
    assert facts.tls is False
    assert (outcomes["hub identity"], outcomes["token"]) == ("unfit", "unfit")


@pytest.mark.parametrize("plaintext", [True, False])
async def test_a_peer_joins_after_the_examination(swarm, states, plaintext):
    """Connections without a handshake leave no trace at the hub."""
    swarm.plaintext = plaintext
    await swarm.hub_up()
    await found(swarm, None, plaintext=plaintext)
    swarm.publish(0, states.first())
    await swarm.peer_up("a")
    await swarm.live("0.0")

"""Requests that took effect at the hub and whose first answers are lost: no node loses its identity by that."""

from __future__ import annotations

import asyncio
import signal
import sys

import pytest
from lost_answers import withholding
from unknown_nodes import token_of

from p2pcast.ground.errors import RetryableError
from p2pcast.ledger_api.trainer_certificate import TrainerCertificate

TRAINER = """
import asyncio, pathlib, sys
from p2pcast.ledger_api.trainer_certificate import TrainerCertificate, hub_address, join_token
certificate = TrainerCertificate(join_token(sys.argv[2]))
asyncio.run(certificate.show(hub_address(sys.argv[1]), "host rank 0"))
print(certificate.node.hex())
"""


async def trainer(address: tuple[str, int], token_file: object) -> asyncio.subprocess.Process:
    where = f"{address[0]}:{address[1]}"
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", TRAINER, where, str(token_file), stdout=asyncio.subprocess.PIPE
    )


async def test_a_trainer_that_is_killed_before_its_answer_comes_back_as_a_new_node(tls):
    """The process has no state folder: its id is as new as its key, so the hub never refuses it."""
    hub = await tls.hub_up()
    holders = hub.state.admission.trust.ledger.holders
    async with withholding(tls.address, lambda: bool(holders), once=False) as proxy:
        first = await trainer(proxy.address, tls.folder / "token")
        await asyncio.wait_for(proxy.withheld.wait(), 600)
        first.send_signal(signal.SIGKILL)
        await first.communicate()
    [lost] = holders
    again = await trainer(tls.address, tls.folder / "token")
    said, _ = await again.communicate()
    assert again.returncode == 0
    node = said.decode().strip()
    assert node != lost
    assert holders.keys() == {lost, node}


async def test_a_trainer_whose_answer_is_lost_asks_again_as_the_same_node(tls):
    hub = await tls.hub_up()
    records, certificate = hub.state.admission.trust.ledger, TrainerCertificate(token_of(tls))
    async with withholding(tls.address, lambda: bool(records.holders), once=True) as proxy:
        with pytest.raises(RetryableError):
            await certificate.show(proxy.address, "host rank 0")
        assert await certificate.show(proxy.address, "host rank 0") is not None
    assert records.holders.keys() == {certificate.node.hex()}
    assert records.tokens[token_of(tls).ident.hex()].used == 1


async def test_a_renewal_whose_answer_is_lost_is_asked_for_again(tls):
    """The hub has recorded the next certificate; the peer keeps its key, its name and its one admission."""
    hub = await tls.hub_up(certificate_s=10.0)
    records, first = hub.state.admission.trust.ledger, 0.0

    def renewed() -> bool:
        return bool(first) and any(holder.until > first for holder in records.holders.values())

    async with withholding(tls.address, renewed, once=True) as proxy:
        peer = await tls.peer_up("a", hub=proxy.address)
        await tls.until(lambda: peer.startup.hub_session.connected, "it has joined")
        [known] = records.holders.values()
        key, first = known.key, known.until
        await tls.until(proxy.withheld.is_set, "the answer to a renewal is lost")
        await tls.until(lambda: peer.startup.certificate.until > first, "it has the next certificate")
        await tls.until(lambda: peer.startup.hub_session.connected, "it is connected")
        assert [(holder.key, holder.name) for holder in records.holders.values()] == [(key, "a")]
        assert records.tokens[token_of(tls).ident.hex()].used == 1
        await tls.down(peer)

"""Connections of one certificate are bounded; those of bearer tokens are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainer_node.ledger.ledger_rows import BEARER
from trainer_node.ledger_server.callers import Caller, CallerConnections, ManyConnectionsError


class Protocol:
    transport: object | None = object()


def request(protocol: Protocol) -> Any:
    return SimpleNamespace(protocol=protocol)


def test_further_connections_are_refused_until_one_is_closed() -> None:
    connections, caller = CallerConnections(3), Caller("aa", "worker")
    protocols = [Protocol() for _ in range(4)]
    for _ in range(2):
        for protocol in protocols[:3]:
            connections.check(caller, request(protocol))
    with pytest.raises(ManyConnectionsError):
        connections.check(caller, request(protocols[3]))
    connections.check(Caller("bb", "worker"), request(protocols[3]))
    protocols[0].transport = None
    connections.check(caller, request(protocols[3]))


def test_holders_of_a_bearer_token_are_not_counted() -> None:
    connections = CallerConnections(1)
    for _ in range(9):
        connections.check(Caller(BEARER, "worker"), request(Protocol()))


def test_callers_without_a_connection_are_forgotten() -> None:
    connections = CallerConnections(4)
    for number in range(1000):
        protocol = Protocol()
        connections.check(Caller(str(number), "worker"), request(protocol))
        protocol.transport = None
    assert len(connections._open) <= 9

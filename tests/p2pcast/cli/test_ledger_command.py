"""Addresses that ``p2pcast ledger`` takes."""

from __future__ import annotations

import pytest

from p2pcast.cli.rollout_commands.ledger_command import hub_url
from p2pcast.errors import UsageError


@pytest.mark.parametrize("host", ["10.1.2.3", "hub.example", "2001:db8::1", "0.0.0.0"])
def test_the_hubs_bearer_does_not_leave_the_machine_in_plain_text(host: str) -> None:
    with pytest.raises(UsageError, match="not encrypted"):
        hub_url((host, 7078))


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:7078"),
        ("::1", "http://[::1]:7078"),
        ("localhost", "http://localhost:7078"),
    ],
)
def test_a_ledger_reads_versions_of_a_hub_on_its_machine(host: str, url: str) -> None:
    assert hub_url((host, 7078)) == url


def test_a_ledger_without_a_hub_asks_none() -> None:
    assert hub_url(None) is None

"""Addresses that ``p2pcast ledger`` takes, and its trust in workers."""

from __future__ import annotations

import click
import pytest

from p2pcast.cli.settings import made
from p2pcast.ground.errors import UsageError
from p2pcast.tasks.sums import Sums
from trainer_node.commands.ledger_command import REPLAY_SHARE, LedgerOptions, hub_url, ledger, trust_of
from trainer_node.ledger.ledger_rows import Trust


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


class Costly(Sums):
    trusted_reward = "costly"


class Unrepeatable(Sums):
    trusted_reward = "unrepeatable"


class Unknown(Sums):
    trusted_reward = "yes"


def test_a_ledger_trusts_no_worker_without_the_option() -> None:
    assert trust_of(Sums(), False, None) is None
    with pytest.raises(UsageError, match="--trust-workers allows that"):
        trust_of(Costly(), False, None)


def test_a_ledger_computes_the_rewards_of_other_tasks() -> None:
    with pytest.raises(UsageError, match="computes the rewards of task sums itself"):
        trust_of(Sums(), True, None)


def test_a_share_of_trusted_rewards_is_replayed() -> None:
    assert trust_of(Costly(), True, None) == Trust(REPLAY_SHARE, replays=True)
    assert trust_of(Costly(), True, 0.5) == Trust(0.5, replays=True)
    assert trust_of(Unrepeatable(), True, None) == Trust(REPLAY_SHARE, replays=False)


def test_options_of_trust_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="needs --trust-workers"):
        trust_of(Sums(), False, 0.5)
    with pytest.raises(UsageError, match="unrepeatable"):
        trust_of(Unrepeatable(), True, 0.5)
    with pytest.raises(UsageError, match="neither 'costly' nor 'unrepeatable'"):
        trust_of(Unknown(), True, None)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--hub-bearer-file", "f"], "--hub-bearer-file needs --hub-http"),
        (["--hooks", "a:B", "--no-prompts"], "leave --no-prompts out"),
        (["--listen", ":7080"], "--listen and --hub belong together"),
        (["--hub", "127.0.0.1:7077"], "--listen and --hub belong together"),
        (["--name", "a"], "--listen and --hub belong together"),
    ],
)
def test_options_of_a_ledger_that_make_no_sense(words: list[str], why: str) -> None:
    given = ledger.make_context("ledger", ["--task", "sums", *words]).params
    with pytest.raises(UsageError, match=why):
        made(LedgerOptions, given).checked()


def test_a_wrong_shape_of_experts_is_refused_with_its_option() -> None:
    with pytest.raises(click.BadParameter, match="is no shape of experts") as refusal:
        ledger.make_context("ledger", ["--task", "sums", "--expert-shape", "4,2"])
    assert "'--expert-shape'" in refusal.value.format_message()

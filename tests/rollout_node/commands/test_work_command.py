from __future__ import annotations

import pytest

from p2pcast.cli.settings import made
from p2pcast.ground.errors import UsageError
from rollout_node.commands.work_command import WorkOptions, ledger_url, work


@pytest.mark.parametrize("text", ["http://10.1.2.3:7079", "10.1.2.3:7079", "http://ledger.example", "ledger.example:1"])
def test_a_bearer_does_not_leave_the_machine_in_plain_text(text: str) -> None:
    with pytest.raises(UsageError, match="not encrypted"):
        ledger_url(text, certified=False)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:7079", "http://127.0.0.1:7079"),
        ("[::1]:7079", "http://[::1]:7079"),
        ("http://localhost:7079/", "http://localhost:7079"),
    ],
)
def test_a_worker_without_a_certificate_reaches_a_ledger_on_its_machine(text: str, url: str) -> None:
    assert ledger_url(text, certified=False) == url


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:7079", "https://127.0.0.1:7079"),
        ("ledger.example:1", "https://ledger.example:1"),
        ("https://ledger.example/", "https://ledger.example"),
    ],
)
def test_a_worker_with_a_certificate_reaches_a_ledger_over_https(text: str, url: str) -> None:
    assert ledger_url(text, certified=True) == url


@pytest.mark.parametrize(("text", "certified"), [("http://127.0.0.1:7079", True), ("https://ledger.example", False)])
def test_https_and_certificates_come_together(text: str, certified: bool) -> None:
    with pytest.raises(UsageError, match="certificate"):
        ledger_url(text, certified=certified)


@pytest.mark.parametrize("text", ["http://", "ftp://a", "http://a..b"])
def test_a_text_without_scheme_and_host_is_no_url(text: str) -> None:
    with pytest.raises(UsageError, match="is not a URL"):
        ledger_url(text, certified=False)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--token-file", "f"], "give --hub HOST:PORT too"),
        (["--state", "s"], "give --hub HOST:PORT too"),
        (["--hub", "127.0.0.1:7077", "--bearer-file", "f"], "--bearer-file is for a ledger over http"),
    ],
)
def test_a_certificate_comes_with_a_hub(words: list[str], why: str) -> None:
    needed = ["127.0.0.1:7079", "--engine", "http://e", "--peer", ":1", "--task", "sums"]
    with pytest.raises(UsageError, match=why):
        made(WorkOptions, work.make_context("work", [*needed, *words]).params).checked()

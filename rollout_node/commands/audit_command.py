"""``p2pcast audit``: rescore results of other engines with an engine of your own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from p2pcast.cli.settings import options, setting
from p2pcast.ground.addresses import http_url, show_address
from p2pcast.ground.errors import UsageError
from p2pcast.process import event_loop
from rollout_node.commands.work_command import (
    SamplerName,
    adapter_name,
    checked_adapter,
    ledger_url,
    peer_address,
    sampler_name,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    ledger: str = setting(argument=True)
    engine: str = setting(
        text="Base URL of a vLLM or SGLang server that no worker under audit controls.", metavar="URL"
    )
    peer: tuple[str, int] = peer_address()
    sampler: SamplerName = sampler_name()
    adapter: str | None = adapter_name()
    bearer_file: Path | None = setting(
        None, "File with the bearer of a ledger on this machine: http.token in its state folder."
    )
    hub: str | None = setting(
        None,
        "Address of the run's hub, which issues the certificate; required for a ledger over https.",
        metavar="HOST:PORT",
    )
    token_file: Path | None = setting(
        None, "File with a join token of the role trainer, with --hub; or set P2PCAST_TOKEN."
    )
    tolerance: float = setting(
        0.05,
        "Largest mean difference between two log-probabilities of a token that numerics may cause.",
        0.0,
        10.0,
        metavar="NATS",
    )
    count: int | None = setting(None, "Number of results to score.  [default: without end]", 1)
    interval_s: float = setting(
        1.0, "Time in seconds between two audits. Each reads one result as a prompt.", 0.0, 3600.0
    )


@click.command()
@options(AuditOptions, "audit")
def audit(given: AuditOptions) -> None:
    """Score random accepted results of LEDGER again, with the engine at --engine.

    The engine scores a result while it serves the version that made the result. The ledger counts what was found for
    each worker (`p2pcast status`). Exit code 1 if any result disagreed.

    \b
    Example:
      p2pcast audit 127.0.0.1:7079 --bearer-file ledger/http.token \\
        --engine http://127.0.0.1:8000 --peer 127.0.0.1:7080
    """
    import aiohttp

    from p2pcast.ledger_api.ledger_connection import LedgerConnection
    from p2pcast.process.daemon_process import run_until_signal
    from rollout_node.worker.auditor import Auditor
    from rollout_node.worker.engine_versions import EngineVersions
    from rollout_node.worker.worker_daemon import SAMPLERS

    adapter = checked_adapter(given.adapter, given.sampler)
    if given.hub is None and given.bearer_file is None:
        raise UsageError(
            "give --bearer-file for a ledger on this machine, or --hub and --token-file for one over https"
        )
    url = ledger_url(given.ledger, certified=given.hub is not None)
    engine_url = http_url(given.engine, "--engine")
    client = LedgerConnection(
        url, bearer_file=given.bearer_file, hub=given.hub, token_file=given.token_file, give_up_s=0.0
    )

    async def run() -> int:
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        async with aiohttp.ClientSession() as http, aiohttp.ClientSession(connector=connector) as engine_http:
            versions = EngineVersions(http, f"http://{show_address(*given.peer)}", engine_url)
            scorer = SAMPLERS[given.sampler](engine_http, engine_url, versions, adapter=adapter)
            auditor = Auditor(client, scorer, versions, tolerance=given.tolerance, interval_s=given.interval_s)
            await run_until_signal(lambda: auditor.run(given.count), None)
        found = ", ".join(f"{number} {what}" for what, number in sorted(auditor.found.items()))
        click.echo(f"results: {found or 'none'}")
        return auditor.found["disagrees"]

    if event_loop.run(run()):
        raise SystemExit(1)

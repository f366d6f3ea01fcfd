"""``p2pcast audit``: score results of other engines with an engine of one's own."""

from __future__ import annotations

from pathlib import Path

import click

from p2pcast.cli.options import PATH, Address, seconds
from p2pcast.ground.addresses import show_address
from p2pcast.ground.errors import UsageError
from p2pcast.process import event_loop
from rollout_node.commands.work_command import (
    SamplerName,
    adapter_option,
    checked_adapter,
    http_url,
    ledger_url,
    sampler_option,
)


@click.command()
@click.argument("ledger", envvar="P2PCAST_AUDIT_LEDGER")
@click.option(
    "--engine",
    required=True,
    metavar="URL",
    help="Base URL of a vLLM or SGLang server that no worker under audit controls.",
)
@click.option(
    "--peer",
    type=Address("127.0.0.1"),
    required=True,
    help="HTTP address of the peer (`p2pcast join --http`) that installs weights into the engine.",
)
@sampler_option
@adapter_option
@click.option(
    "--bearer-file", type=PATH, help="File with the bearer of a ledger on this machine: http.token in its state folder."
)
@click.option(
    "--hub",
    metavar="HOST:PORT",
    help="Address of the run's hub, which issues the certificate; required for a ledger over https.",
)
@click.option(
    "--token-file", type=PATH, help="File with a join token of the role trainer, with --hub; or set P2PCAST_TOKEN."
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0.0, 10.0),
    default=0.05,
    metavar="NATS",
    help="Largest mean difference between two log-probabilities of a token that numerics may cause.",
)
@click.option("--count", type=click.IntRange(1), help="Number of results to score.  [default: without end]")
@seconds(
    "audit", "interval", click.FloatRange(0.0, 3600.0), 1.0,
    "Time in seconds between two audits. Each reads one result as a prompt.",
)  # fmt: skip
def audit(
    ledger: str,
    engine: str,
    peer: tuple[str, int],
    sampler: SamplerName,
    adapter: str | None,
    bearer_file: Path | None,
    hub: str | None,
    token_file: Path | None,
    tolerance: float,
    count: int | None,
    interval_s: float,
) -> None:
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

    adapter = checked_adapter(adapter, sampler)
    if hub is None and bearer_file is None:
        raise UsageError(
            "give --bearer-file for a ledger on this machine, or --hub and --token-file for one over https"
        )
    url = ledger_url(ledger, certified=hub is not None)
    engine_url = http_url(engine, "--engine")
    client = LedgerConnection(url, bearer_file=bearer_file, hub=hub, token_file=token_file, give_up_s=0.0)

    async def run() -> int:
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        async with aiohttp.ClientSession() as http, aiohttp.ClientSession(connector=connector) as engine_http:
            versions = EngineVersions(http, f"http://{show_address(*peer)}", engine_url)
            scorer = SAMPLERS[sampler](engine_http, engine_url, versions, adapter=adapter)
            auditor = Auditor(client, scorer, versions, tolerance=tolerance, interval_s=interval_s)
            await run_until_signal(lambda: auditor.run(count), None)
        found = ", ".join(f"{number} {what}" for what, number in sorted(auditor.found.items()))
        click.echo(f"results: {found or 'none'}")
        return auditor.found["disagrees"]

    if event_loop.run(run()):
        raise SystemExit(1)

"""``p2pcast work``: play jobs of the ledger with an engine beside this process."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import click

from p2pcast.cli.options import PATH, TOKEN_VARIABLE, Address, check_options, read_token, seconds, task_option
from p2pcast.ground.addresses import is_loopback, parse_address, show_address
from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import MAX_SLOTS, MIB
from p2pcast.ground.plain_text import written_text
from p2pcast.process import event_loop
from p2pcast.rollouts.top_logprobs import MAX_TOP_K, TOP_K
from p2pcast.trust.node_names import default_name, name_fault

BEARER_VARIABLE = "P2PCAST_LEDGER_TOKEN"
SamplerName = Literal["generate", "completions", "sglang"]

sampler_option = click.option(
    "--sampler",
    type=click.Choice(["generate", "completions", "sglang"]),
    default="generate",
    help=(
        "Route of the engine. generate: vLLM's /inference/v1/generate, which names the version of each token; "
        "sglang: SGLang's /generate, which does so too; "
        "completions: /v1/completions, with a peer that was started with --commit-safe-point drain."
    ),
)

adapter_option = click.option(
    "--adapter",
    metavar="NAME",
    help="LoRA adapter of the vLLM server that answers, as named by --lora-modules.  [default: the model alone]",
)


def checked_adapter(adapter: str | None, sampler: SamplerName) -> str | None:
    """Raises UsageError."""
    from p2pcast.checkpoint.adapter_form import checked_name

    if adapter is not None and sampler == "sglang":
        raise UsageError("--adapter is for vLLM: p2pcast installs adapters into no SGLang server")
    return None if adapter is None else checked_name(adapter)


@click.command()
@click.argument("ledger", envvar="P2PCAST_WORK_LEDGER")
@click.option(
    "--engine",
    required=True,
    metavar="URL",
    help="Base URL of the vLLM server, started with --enable-scale-out, or of the SGLang server.",
)
@click.option(
    "--peer",
    type=Address("127.0.0.1"),
    required=True,
    help="HTTP address of the peer (`p2pcast join --http`) that installs weights into the engine.",
)
@task_option
@sampler_option
@adapter_option
@click.option("--slots", type=click.IntRange(1, MAX_SLOTS), default=8, help="Number of plays at the same time.")
@click.option(
    "--price",
    type=click.FloatRange(0.0),
    default=0.0,
    metavar="USD_H",
    help="Price of this machine in US dollars per hour.",
)
@click.option(
    "--gpu", default="", show_default=False, help="Class of the accelerator; leases of one class share their time."
)
@click.option(
    "--guard-share",
    type=click.FloatRange(0.0, 1.0),
    default=0.05,
    metavar="SHARE",
    help=(
        "Share of the rollouts of sparse attention whose most probable tokens at each position go to the learner, for "
        "its guard; with --sampler generate."
    ),
)
@click.option(
    "--guard-tokens",
    type=click.IntRange(1, MAX_TOP_K),
    default=TOP_K,
    help="Most probable tokens of a position for the guard; at most vLLM's --max-logprobs.",
)
@click.option("--name", help="Unique name of this worker at the ledger.  [default: the host's name]")
@click.option(
    "--bearer-file",
    type=PATH,
    help=f"File with the bearer token of a ledger on this machine, reached over http; or set {BEARER_VARIABLE}.",
)
@click.option(
    "--hub",
    type=Address(None, 7077),
    help="Address of the run's hub, which issues this worker's certificate; required for a ledger over https.",
)
@click.option(
    "--token-file",
    type=PATH,
    help=(
        "File with a join token of the role worker, from `p2pcast token create --role worker`; or set P2PCAST_TOKEN. "
        "Needed with --hub at the first start."
    ),
)
@click.option("--state", type=PATH, help="Folder for this worker's key and certificate, with --hub.")
@seconds(
    "work", "drain", click.FloatRange(0.0, 3600.0), 30.0,
    "Time in seconds for running plays to end after SIGTERM; the others return to the ledger.",
)  # fmt: skip
@seconds(
    "work", "play-step", click.FloatRange(0.1, 3600.0), 30.0,
    "Time limit in seconds of one step of a play: of what the task does without waiting.",
)  # fmt: skip
@click.option("--play-processes", type=click.IntRange(1, 64), default=1, help="Number of processes that plays share.")
@click.option(
    "--play-memory",
    type=click.IntRange(64),
    default=4096,
    metavar="MIB",
    help="Memory limit of one process of plays in MiB.",
)
@check_options("work")
def work(
    ledger: str,
    engine: str,
    peer: tuple[str, int],
    task: str,
    sampler: SamplerName,
    adapter: str | None,
    slots: int,
    price: float,
    gpu: str,
    guard_share: float,
    guard_tokens: int,
    name: str | None,
    bearer_file: Path | None,
    hub: tuple[str, int] | None,
    token_file: Path | None,
    state: Path | None,
    drain_s: float,
    play_step_s: float,
    play_processes: int,
    play_memory: int,
    check_s: float,
    checks: int,
    check_memory: int,
) -> None:
    """Lease jobs from LEDGER, play them with the engine at --engine, and hand in the results.

    LEDGER is HOST:PORT. Without --hub the ledger is on this machine and answers over http. With --hub it answers over
    https, and ledger and worker show certificates of the run.

    \b
    Examples:
      p2pcast work 127.0.0.1:7079 --engine http://127.0.0.1:8000 --peer 127.0.0.1:7080 --task sums
      p2pcast work ledger.example:7079 --hub hub.example:7077 --token-file worker.join \\
        --engine http://127.0.0.1:8000 --peer 127.0.0.1:7080 --task sums
    """
    from p2pcast.process.daemon_process import raise_descriptor_limit, restrict_umask, run_until_signal, state_home
    from p2pcast.store.state_format import state_lock
    from p2pcast.tasks.child_processes.play_pool import PlayPool
    from p2pcast.tasks.task_loader import load_task
    from p2pcast.tasks.task_process import TaskProcesses
    from p2pcast.transport.node_certificate import NodeCertificate
    from p2pcast.trust.join_token import JoinToken
    from rollout_node.worker.play_loop import WorkerConfig
    from rollout_node.worker.worker_daemon import Addresses, WorkerDaemon

    adapter = checked_adapter(adapter, sampler)
    if name is not None and (fault := name_fault(name)) is not None:
        raise UsageError(fault)
    if hub is None and (token_file is not None or state is not None):
        raise UsageError("--token-file and --state are for a worker with a certificate: give --hub HOST:PORT too")
    if hub is not None and bearer_file is not None:
        raise UsageError("--bearer-file is for a ledger over http; with --hub this worker shows a certificate")
    token = None
    if hub is not None and (token_file is not None or TOKEN_VARIABLE in os.environ):
        token = JoinToken.parse(read_token(token_file))
    host = socket.gethostname()
    named = default_name(host) if name is None else name
    addresses = Addresses(
        ledger=ledger_url(ledger, certified=hub is not None),
        engine=http_url(engine, "--engine"),
        peer=f"http://{show_address(*peer)}",
        bearer=None if hub is not None else _bearer(bearer_file),
    )
    loaded = load_task(task, Path.cwd())
    config = WorkerConfig(
        name=named,
        slots=slots,
        price_usd_h=price,
        device_class=gpu,
        drain_s=drain_s,
        guard_share=guard_share,
        guard_tokens=guard_tokens,
    )
    restrict_umask()
    raise_descriptor_limit()

    async def run(certificate: NodeCertificate | None) -> None:
        processes = TaskProcesses(task, loaded.hash, processes=checks, check_s=check_s, memory_bytes=check_memory * MIB)
        pool = PlayPool(task, loaded.hash, processes=play_processes, step_s=play_step_s, memory_bytes=play_memory * MIB)
        daemon = WorkerDaemon(addresses, config, loaded, processes, pool, certificate, sampler, adapter)
        await run_until_signal(daemon.run, daemon.drain)

    folder = state or state_home() / f"worker-{name or host}"
    with nullcontext() if hub is None else state_lock(folder):
        certificate = None if hub is None else NodeCertificate(folder, "worker", named, hub, token)
        event_loop.run(run(certificate))


def http_url(text: str, option: str) -> str:
    """A base URL with scheme and host. Raises UsageError."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{option}: {text!r} is not a URL: write http://HOST:PORT")
    return text.rstrip("/")


def ledger_url(text: str, *, certified: bool) -> str:
    """The ledger's base URL. ``certified``: the caller has a certificate of the run. Raises UsageError for plain HTTP
    to another machine, which would show the bearer.
    """
    if "://" not in text:
        text = f"{'https' if certified else 'http'}://{show_address(*parse_address(text))}"
    url = http_url(text, "LEDGER")
    parts = urlsplit(url)
    assert parts.hostname is not None
    if certified and parts.scheme == "http":
        raise UsageError(f"{url} takes no certificate: write https://HOST:PORT, or leave --hub out")
    if parts.scheme == "http" and not (parts.hostname == "localhost" or is_loopback(parts.hostname)):
        raise UsageError(f"{url} is not encrypted and not on this machine: give --hub HOST:PORT and --token-file FILE")
    if parts.scheme == "https" and not certified:
        raise UsageError(f"{url} needs a certificate of the run: give --hub HOST:PORT and --token-file FILE")
    return url


def _bearer(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get(BEARER_VARIABLE) or None
    try:
        return written_text(file.read_bytes()).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the bearer file {file}: {error}") from None

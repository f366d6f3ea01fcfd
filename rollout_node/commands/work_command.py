"""``p2pcast work``: play jobs from the ledger with the engine next to this process."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import click

from p2pcast.cli import shared_settings as shared
from p2pcast.cli.options import Address
from p2pcast.cli.settings import options, setting
from p2pcast.ground.addresses import http_url, is_loopback, parse_address, show_address
from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import MAX_SLOTS, MIB
from p2pcast.ground.plain_text import written_text
from p2pcast.process import event_loop
from p2pcast.rollouts.top_logprobs import MAX_TOP_K, TOP_K
from p2pcast.trust.node_names import default_name

BEARER_VARIABLE = "P2PCAST_LEDGER_TOKEN"
SamplerName = Literal["generate", "completions", "sglang"]


def peer_address() -> Any:
    """``--peer``."""
    return setting(
        text="HTTP address of the peer (`p2pcast join --http`) that installs weights into the engine.",
        type=Address("127.0.0.1"),
    )


def sampler_name() -> Any:
    """``--sampler``."""
    return setting(
        "generate",
        "Route of the engine. generate: vLLM's /inference/v1/generate, which names the version of each token; "
        "sglang: SGLang's /generate, which does so too; "
        "completions: /v1/completions, with a peer that was started with --commit-safe-point drain.",
    )


def adapter_name() -> Any:
    """``--adapter``."""
    return setting(
        None,
        "LoRA adapter of the vLLM server that answers, as named by --lora-modules.  [default: the model alone]",
        metavar="NAME",
    )


def checked_adapter(adapter: str | None, sampler: SamplerName) -> str | None:
    """Return the adapter's name if it can be used with this sampler. Raises UsageError."""
    from p2pcast.checkpoint.adapter_form import checked_name

    if adapter is not None and sampler == "sglang":
        raise UsageError("--adapter is for vLLM: p2pcast installs adapters into no SGLang server")
    return None if adapter is None else checked_name(adapter)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOptions:
    ledger: str = setting(argument=True)
    engine: str = setting(
        text="Base URL of the vLLM server, started with --enable-scale-out, or of the SGLang server.", metavar="URL"
    )
    peer: tuple[str, int] = peer_address()
    task: str = shared.task_name()
    sampler: SamplerName = sampler_name()
    adapter: str | None = adapter_name()
    slots: int = setting(8, "Number of plays at the same time.", 1, MAX_SLOTS)
    price_usd_h: float = setting(
        0.0, "Price of this machine in US dollars per hour.", 0.0, name="price", metavar="USD_H"
    )
    gpu: str = setting("", "Class of the accelerator; leases of one class share their time.", show=False)
    guard_share: float = setting(
        0.05,
        "Share of the rollouts of sparse attention whose most probable tokens at each position go to the learner, for "
        "its guard; with --sampler generate.",
        0.0,
        1.0,
        metavar="SHARE",
    )
    guard_tokens: int = setting(
        TOP_K, "Most probable tokens of a position for the guard; at most vLLM's --max-logprobs.", 1, MAX_TOP_K
    )
    name: str | None = setting(
        None, "Unique name of this worker at the ledger.  [default: the host's name]", reads=shared.valid_name
    )
    bearer_file: Path | None = setting(
        None,
        f"File with the bearer token of a ledger on this machine, reached over http; or set {BEARER_VARIABLE}.",
    )
    hub: tuple[str, int] | None = setting(
        None,
        "Address of the run's hub, which issues this worker's certificate; required for a ledger over https.",
        type=Address(None, 7077),
    )
    token_file: Path | None = setting(
        None,
        "File with a join token of the role worker, from `p2pcast token create --role worker`; or set P2PCAST_TOKEN. "
        "Needed with --hub at the first start.",
    )
    state: Path | None = setting(None, "Folder for this worker's key and certificate, with --hub.")
    drain_s: float = setting(
        30.0,
        "Time in seconds for running plays to end after SIGTERM; the others return to the ledger.",
        0.0,
        3600.0,
    )
    play_step_s: float = setting(
        30.0,
        "Time limit in seconds of one step of a play: of what the task does without waiting.",
        0.1,
        3600.0,
    )
    play_processes: int = setting(1, "Number of processes that plays share.", 1, 64)
    play_memory_bytes: int = setting(
        4096, "Memory limit of one process of plays in MiB.", 64, name="play_memory", metavar="MIB", unit=MIB
    )
    checks: shared.Checks = shared.reward_checks()

    def checked(self) -> WorkOptions:
        """Return the options unchanged. Raises UsageError if they contradict each other."""
        if self.hub is None and (self.token_file is not None or self.state is not None):
            raise UsageError("--token-file and --state are for a worker with a certificate: give --hub HOST:PORT too")
        if self.hub is not None and self.bearer_file is not None:
            raise UsageError("--bearer-file is for a ledger over http; with --hub this worker shows a certificate")
        return self


@click.command()
@options(WorkOptions, "work")
def work(given: WorkOptions) -> None:
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
    from rollout_node.worker.play_loop import WorkerConfig
    from rollout_node.worker.worker_daemon import WorkerAddresses, WorkerDaemon

    adapter = checked_adapter(given.adapter, given.sampler)
    given, hub, checks = given.checked(), given.hub, given.checks
    token = shared.token_of_node(hub, given.token_file)
    host = socket.gethostname()
    name = given.name or default_name(host)
    addresses = WorkerAddresses(
        ledger=ledger_url(given.ledger, certified=hub is not None),
        engine=http_url(given.engine, "--engine"),
        peer=f"http://{show_address(*given.peer)}",
        bearer=None if hub is not None else _bearer(given.bearer_file),
    )
    task = load_task(given.task, Path.cwd())
    config = WorkerConfig(
        name=name,
        slots=given.slots,
        price_usd_h=given.price_usd_h,
        device_class=given.gpu,
        drain_s=given.drain_s,
        guard_share=given.guard_share,
        guard_tokens=given.guard_tokens,
    )
    restrict_umask()
    raise_descriptor_limit()

    async def run(certificate: NodeCertificate | None) -> None:
        processes = TaskProcesses(
            given.task, task.hash, processes=checks.processes, check_s=checks.check_s, memory_bytes=checks.memory_bytes
        )
        pool = PlayPool(
            given.task,
            task.hash,
            processes=given.play_processes,
            step_s=given.play_step_s,
            memory_bytes=given.play_memory_bytes,
        )
        daemon = WorkerDaemon(addresses, config, task, processes, pool, certificate, given.sampler, adapter)
        await run_until_signal(daemon.run, daemon.drain)

    folder = given.state or state_home() / f"worker-{given.name or host}"
    with nullcontext() if hub is None else state_lock(folder):
        certificate = None if hub is None else NodeCertificate(folder, "worker", name, hub, token)
        event_loop.run(run(certificate))


def ledger_url(text: str, *, certified: bool) -> str:
    """Return the ledger's base URL. ``certified``: whether the caller has a certificate of the run. Raises UsageError
    for plain HTTP to a different machine, which would expose the bearer.
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

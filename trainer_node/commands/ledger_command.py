"""``p2pcast ledger``: own the jobs, leases, results and batches of a run."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from p2pcast.cli import shared_settings as shared
from p2pcast.cli.options import Address
from p2pcast.cli.settings import options, setting
from p2pcast.ground.addresses import is_loopback, show_address
from p2pcast.ground.errors import UsageError
from p2pcast.process import event_loop
from p2pcast.rollouts.routed_experts import ExpertShape
from p2pcast.trust.node_names import default_name

if TYPE_CHECKING:
    from p2pcast.tasks.task import Task
    from trainer_node.ledger.ledger_rows import Trust

REPLAY_SHARE = 0.05
"""Default of --replay-share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerOptions:
    task: str = shared.task_name()
    http: tuple[str, int] = setting(
        "127.0.0.1:7079",
        "Address of the HTTP server for workers, trainers, status and metrics.",
        type=Address("127.0.0.1"),
    )
    http_per_address: int | None = shared.http_per_address()
    listen: tuple[str, int] | None = setting(
        None,
        "Address for workers and trainers of other machines, over https with certificates of the run; needs --hub.",
        type=Address("", 7080),
    )
    hub: tuple[str, int] | None = setting(
        None, "Address of the run's hub, which issues this ledger's certificate.", type=Address(None, 7077)
    )
    token_file: Path | None = setting(
        None,
        "File with a join token of the role ledger, from `p2pcast token create --role ledger`; or set P2PCAST_TOKEN. "
        "Needed with --hub at the first start.",
    )
    name: str | None = setting(
        None, "Name of this ledger at the hub.  [default: the host's name]", reads=shared.valid_name
    )
    state: Path = setting(
        text="Folder for the database, the results, and the bearer tokens.", absent=shared.state_of("ledger")
    )
    database: str | None = setting(
        None, "Database, as in postgresql://USER@HOST/NAME.  [default: SQLite in the state folder]", metavar="URL"
    )
    hub_http: tuple[str, int] | None = setting(
        None,
        "HTTP address of the hub, for its versions.  [default: trainers state versions]",
        type=Address("127.0.0.1"),
    )
    hub_bearer_file: Path | None = setting(
        None, "File with the hub's bearer token.  [default: of a hub that this user runs on this machine]"
    )
    rule: Literal["bounded", "strict"] = setting(
        "bounded",
        "Acceptance of results. bounded: every version is at most --staleness steps old; strict: within the lease, by "
        "the job's own version alone.",
    )
    staleness: int = setting(3, "Greatest age of a result's versions, in learner steps.", 0, 1000)
    batch_groups: int = setting(32, "Number of groups of one batch.", 1, 65536)
    group_size: int = setting(8, "Number of samples of one prompt.", 2, 1024)
    temperature: float = setting(1.0, "Sampling temperature of the task's prompts.", 0.0, 2.0)
    last_step: int | None = setting(None, "Learner step at which the run ends.  [default: no end]", 1)
    seed: int = setting(0, "Seed of the task's prompts.", 0, (1 << 63) - 1)
    hooks: str | None = setting(
        None,
        "Class that leaves prompts of the task out, or repeats them, by their rewards.",
        metavar="PKG.MODULE:CLASS",
    )
    trust_workers: bool = setting(
        False, "Rewards that workers state, instead of the ledger's own. For tasks with trusted_reward alone."
    )
    replay_share: float | None = setting(
        None,
        "Share of results whose trusted rewards the ledger computes all the same, for tasks that can be replayed.  "
        f"[default: {REPLAY_SHARE}]",
        0.0,
        1.0,
    )
    experts: ExpertShape | None = setting(
        None,
        "Shape of the model's experts: layers, experts of a token, experts of a layer. Routed experts of another shape "
        "count as malformed.  [default: not compared]",
        name="expert_shape",
        type=click.STRING,
        metavar="LAYERS,TOP_K,EXPERTS",
        reads=ExpertShape.parse,
    )
    no_prompts: bool = setting(False, "No groups from the task's prompts: trainers add all groups.")
    lease_guess_s: float = setting(
        120.0, "Time in seconds of the first leases, before completions are measured.", 1.0, 86400.0
    )
    checks: shared.Checks = shared.reward_checks()

    def checked(self) -> LedgerOptions:
        """Raises UsageError for options that are incompatible."""
        if self.hub_bearer_file is not None and self.hub_http is None:
            raise UsageError("--hub-bearer-file needs --hub-http")
        if self.hooks is not None and self.no_prompts:
            raise UsageError("--hooks choose among the task's prompts: leave --no-prompts out")
        alone = self.hub is None and (self.token_file is not None or self.name is not None)
        if alone or (self.listen is None) != (self.hub is None):
            raise UsageError("--listen and --hub belong together: workers of other machines show certificates")
        return self


@click.command()
@options(LedgerOptions, "ledger")
def ledger(given: LedgerOptions) -> None:
    """Lease jobs to workers, judge their results, and cut batches for the learner.

    \b
    Examples:
      p2pcast ledger --task sums --hub-http 127.0.0.1:7078
      p2pcast ledger --task sums --hub-http 127.0.0.1:7078 \\
        --listen :7080 --hub 127.0.0.1:7077 --token-file ledger.join
      p2pcast ledger --task sums --hub-http 127.0.0.1:7078 --database postgresql://rollouts@db/run7
    """
    from p2pcast.daemon.daemon_requests import bearer_token
    from p2pcast.process.daemon_process import raise_descriptor_limit, restrict_umask, run_until_signal
    from p2pcast.tasks.prompt_hooks import load_hooks
    from p2pcast.tasks.task_loader import load_task
    from trainer_node.ledger.ledger_rows import Policy
    from trainer_node.ledger.staleness_rule import StalenessBounds
    from trainer_node.ledger_server.ledger_daemon import CertificateSource, LedgerConfig, run_ledger
    from trainer_node.ledger_server.prompt_feeder import Feed

    given = given.checked()
    source = None
    if given.hub is not None:
        token = shared.token_of_node(given.hub, given.token_file)
        source = CertificateSource(given.hub, token, given.name or default_name(socket.gethostname()))
    hub = hub_url(given.hub_http)
    task = load_task(given.task, Path.cwd())
    if given.hooks is not None:
        load_hooks(given.hooks, Path.cwd())  # a wrong name makes the command exit at once
    feed = Feed(given.seed, given.group_size, given.temperature, max(32, min(4000, 2 * given.batch_groups)))
    config = LedgerConfig(
        state=given.state,
        http=given.http,
        http_per_address=given.http_per_address,
        policy=Policy(
            StalenessBounds(given.staleness, given.batch_groups, given.last_step),
            given.rule,
            task.vocabulary,
            given.lease_guess_s,
            task_hash=task.hash,
            asks_hub=hub is not None,
            trust=trust_of(task, given.trust_workers, given.replay_share),
            experts=given.experts,
        ),
        task=task,
        task_name=given.task,
        hub=hub,
        hub_bearer=None if hub is None else bearer_token(hub, file=given.hub_bearer_file),
        listen=given.listen,
        certificate=source,
        database=given.database,
        feed=None if given.no_prompts else feed,
        hooks=given.hooks,
        check_s=given.checks.check_s,
        checks=given.checks.processes,
        check_memory_bytes=given.checks.memory_bytes,
    )
    restrict_umask()
    raise_descriptor_limit()
    event_loop.run(run_until_signal(lambda: run_ledger(config)))


def trust_of(task: Task, trust_workers: bool, replay_share: float | None) -> Trust | None:
    """Return how far workers are trusted. Raises UsageError if the task and the options disagree."""
    from p2pcast.tasks.task import trusted_reward_of
    from trainer_node.ledger.ledger_rows import Trust

    why = trusted_reward_of(task)
    if not trust_workers:
        if replay_share is not None:
            raise UsageError("--replay-share needs --trust-workers")
        if why is not None:
            raise UsageError(
                f"task {task.name} states trusted_reward = {why!r}: the ledger would take its rewards from the workers;"
                " --trust-workers allows that, for workers of your own"
            )
        return None
    if why is None:
        raise UsageError(f"--trust-workers: the ledger computes the rewards of task {task.name} itself: leave it out")
    if why == "unrepeatable" and replay_share is not None:
        raise UsageError(f"--replay-share: task {task.name} is unrepeatable, so no reward of it can be compared")
    return Trust(REPLAY_SHARE if replay_share is None else replay_share, why == "costly")


def hub_url(hub_http: tuple[str, int] | None) -> str | None:
    """Return the base URL of the hub's HTTP server. Raises UsageError if it is on a different machine."""
    if hub_http is None:
        return None
    if hub_http[0] != "localhost" and not is_loopback(hub_http[0]):
        raise UsageError(
            "--hub-http: HTTP is not encrypted, so the hub's bearer token would be readable on its way: run the ledger"
            " on the hub's machine, or forward a port of this machine to the hub by ssh -L"
        )
    return f"http://{show_address(*hub_http)}"

"""``p2pcast ledger``: own the jobs, leases, results and batches of a run."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2pcast.cli.options import (
    PATH,
    TOKEN_VARIABLE,
    Address,
    check_options,
    http_per_address,
    read_token,
    seconds,
    task_option,
)
from p2pcast.ground.addresses import is_loopback, show_address
from p2pcast.ground.errors import UsageError
from p2pcast.process import event_loop
from p2pcast.trust.node_names import default_name, name_fault

if TYPE_CHECKING:
    from p2pcast.tasks.task import Task
    from trainer_node.ledger.ledger_rows import Trust

REPLAY_SHARE = 0.05
"""Default of --replay-share."""


@click.command()
@task_option
@click.option(
    "--http",
    type=Address("127.0.0.1"),
    default="127.0.0.1:7079",
    help="Address of the HTTP server for workers, trainers, status and metrics.",
)
@http_per_address
@click.option(
    "--listen",
    type=Address("", 7080),
    help="Address for workers and trainers of other machines, over https with certificates of the run; needs --hub.",
)
@click.option(
    "--hub", type=Address(None, 7077), help="Address of the run's hub, which issues this ledger's certificate."
)
@click.option(
    "--token-file",
    type=PATH,
    help=(
        "File with a join token of the role ledger, from `p2pcast token create --role ledger`; or set P2PCAST_TOKEN. "
        "Needed with --hub at the first start."
    ),
)
@click.option("--name", help="Name of this ledger at the hub.  [default: the host's name]")
@click.option("--state", type=PATH, help="Folder for the database, the results, and the bearer tokens.")
@click.option(
    "--database",
    metavar="URL",
    help="Database, as in postgresql://USER@HOST/NAME.  [default: SQLite in the state folder]",
)
@click.option(
    "--hub-http",
    type=Address("127.0.0.1"),
    help="HTTP address of the hub, for its versions.  [default: trainers state versions]",
)
@click.option(
    "--hub-bearer-file",
    type=PATH,
    help="File with the hub's bearer token.  [default: of a hub that this user runs on this machine]",
)
@click.option(
    "--rule",
    type=click.Choice(["bounded", "strict"]),
    default="bounded",
    help=(
        "Acceptance of results. bounded: every version is at most --staleness steps old; strict: within the lease, by "
        "the job's own version alone."
    ),
)
@click.option(
    "--staleness",
    type=click.IntRange(0, 1000),
    default=3,
    help="Greatest age of a result's versions, in learner steps.",
)
@click.option("--batch-groups", type=click.IntRange(1, 65536), default=32, help="Number of groups of one batch.")
@click.option("--group-size", type=click.IntRange(2, 1024), default=8, help="Number of samples of one prompt.")
@click.option(
    "--temperature", type=click.FloatRange(0.0, 2.0), default=1.0, help="Sampling temperature of the task's prompts."
)
@click.option("--last-step", type=click.IntRange(1), help="Learner step at which the run ends.  [default: no end]")
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), default=0, help="Seed of the task's prompts.")
@click.option(
    "--hooks",
    metavar="PKG.MODULE:CLASS",
    help="Class that leaves prompts of the task out, or repeats them, by their rewards.",
)
@click.option(
    "--trust-workers",
    is_flag=True,
    help="Rewards that workers state, instead of the ledger's own. For tasks with trusted_reward alone.",
)
@click.option(
    "--replay-share",
    type=click.FloatRange(0.0, 1.0),
    help=(
        "Share of results whose trusted rewards the ledger computes all the same, for tasks that can be replayed.  "
        "[default: 0.05]"
    ),
)
@click.option(
    "--expert-shape",
    metavar="LAYERS,TOP_K,EXPERTS",
    help=(
        "Shape of the model's experts: layers, experts of a token, experts of a layer. Routed experts of another shape "
        "count as malformed.  [default: not compared]"
    ),
)
@click.option("--no-prompts", is_flag=True, help="No groups from the task's prompts: trainers add all groups.")
@seconds(
    "ledger", "lease-guess", click.FloatRange(1.0, 86400.0), 120.0,
    "Time in seconds of the first leases, before completions are measured.",
)  # fmt: skip
@check_options("ledger")
def ledger(
    task: str,
    http: tuple[str, int],
    http_per_address: int | None,
    listen: tuple[str, int] | None,
    hub: tuple[str, int] | None,
    token_file: Path | None,
    name: str | None,
    state: Path | None,
    database: str | None,
    hub_http: tuple[str, int] | None,
    hub_bearer_file: Path | None,
    rule: str,
    staleness: int,
    batch_groups: int,
    group_size: int,
    temperature: float,
    last_step: int | None,
    seed: int,
    hooks: str | None,
    trust_workers: bool,
    replay_share: float | None,
    expert_shape: str | None,
    no_prompts: bool,
    lease_guess_s: float,
    check_s: float,
    checks: int,
    check_memory: int,
) -> None:
    """Lease jobs to workers, judge their results, and cut batches for the learner.

    \b
    Examples:
      p2pcast ledger --task sums --hub-http 127.0.0.1:7078
      p2pcast ledger --task sums --hub-http 127.0.0.1:7078 \\
        --listen :7080 --hub 127.0.0.1:7077 --token-file ledger.join
      p2pcast ledger --task sums --hub-http 127.0.0.1:7078 --database postgresql://rollouts@db/run7
    """
    from p2pcast.daemon.daemon_requests import bearer_token
    from p2pcast.ground.limits import MIB
    from p2pcast.process.daemon_process import raise_descriptor_limit, restrict_umask, run_until_signal, state_home
    from p2pcast.rollouts.routed_experts import ExpertShape
    from p2pcast.tasks.prompt_hooks import load_hooks
    from p2pcast.tasks.task_loader import load_task
    from p2pcast.trust.join_token import JoinToken
    from trainer_node.ledger.ledger_rows import Policy
    from trainer_node.ledger.staleness_rule import Bounds
    from trainer_node.ledger_server.ledger_daemon import CertificateSource, LedgerConfig, run_ledger
    from trainer_node.ledger_server.prompt_feeder import Feed

    if hub_bearer_file is not None and hub_http is None:
        raise UsageError("--hub-bearer-file needs --hub-http")
    if hooks is not None and no_prompts:
        raise UsageError("--hooks choose among the task's prompts: leave --no-prompts out")
    if (listen is None) != (hub is None) or (hub is None and (token_file is not None or name is not None)):
        raise UsageError("--listen and --hub belong together: workers of other machines show certificates")
    if name is not None and (fault := name_fault(name)) is not None:
        raise UsageError(fault)
    source = None
    if hub is not None:
        given = token_file is not None or TOKEN_VARIABLE in os.environ
        token = JoinToken.parse(read_token(token_file)) if given else None
        source = CertificateSource(hub, token, default_name(socket.gethostname()) if name is None else name)
    hub_http_url = hub_url(hub_http)
    loaded = load_task(task, Path.cwd())
    if hooks is not None:
        load_hooks(hooks, Path.cwd())  # an error of the name ends the command at once
    trust = trust_of(loaded, trust_workers, replay_share)
    bounds = Bounds(staleness, batch_groups, last_step)
    config = LedgerConfig(
        state=state or state_home() / "ledger",
        http=http,
        http_per_address=http_per_address,
        policy=Policy(
            bounds,
            "strict" if rule == "strict" else "bounded",
            loaded.vocabulary,
            lease_guess_s,
            task_hash=loaded.hash,
            asks_hub=hub_http_url is not None,
            trust=trust,
            experts=None if expert_shape is None else ExpertShape.parse(expert_shape),
        ),
        task=loaded,
        task_name=task,
        hub=hub_http_url,
        hub_bearer=None if hub_http_url is None else bearer_token(hub_http_url, file=hub_bearer_file),
        listen=listen,
        certificate=source,
        database=database,
        feed=None if no_prompts else Feed(seed, group_size, temperature, max(32, min(4000, 2 * batch_groups))),
        hooks=hooks,
        check_s=check_s,
        checks=checks,
        check_memory_bytes=check_memory * MIB,
    )
    restrict_umask()
    raise_descriptor_limit()
    event_loop.run(run_until_signal(lambda: run_ledger(config)))


def trust_of(task: Task, trust_workers: bool, replay_share: float | None) -> Trust | None:
    """Raises UsageError unless the task and the options agree on the trust in workers."""
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
    """The base URL of the hub's HTTP server. Raises UsageError for one on another machine."""
    if hub_http is None:
        return None
    if hub_http[0] != "localhost" and not is_loopback(hub_http[0]):
        raise UsageError(
            "--hub-http: HTTP is not encrypted, so the hub's bearer token would be readable on its way: run the ledger"
            " on the hub's machine, or forward a port of this machine to the hub by ssh -L"
        )
    return f"http://{show_address(*hub_http)}"

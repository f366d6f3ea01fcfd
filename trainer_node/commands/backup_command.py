"""``p2pcast backup`` and ``p2pcast restore``: the state of hub and ledger together."""

from __future__ import annotations

from pathlib import Path

import click

from p2pcast.cli.options import PATH
from p2pcast.ground.errors import UsageError

_HUB = click.option("--hub", type=PATH, help="State folder of the hub.")
_LEDGER = click.option("--ledger", type=PATH, help="State folder of the ledger.")


@click.command()
@click.argument("to", type=PATH)
@_HUB
@_LEDGER
@click.option(
    "--database",
    metavar="URL",
    help="The ledger's PostgreSQL database, as for p2pcast ledger.  [default: SQLite in the ledger's state folder]",
)
def backup(to: Path, hub: Path | None, ledger: Path | None, database: str | None) -> None:
    """Copy the state of hub and ledger to the new folder TO, while both run or after they have ended.

    TO appears when the copy is complete and on disk. TO holds the run's keys: its mode is 0700, and it needs the same
    protection as the state folders.

    \b
    Examples:
      p2pcast backup --hub hub --ledger ledger /backup/run7-monday
      p2pcast backup --ledger ledger --database postgresql://rollouts@db/run7 /backup/run7-ledger
    """
    from p2pcast.process.daemon_process import restrict_umask
    from trainer_node.backup.run_backup import make

    if hub is None and ledger is None:
        raise UsageError("name the state to copy: --hub STATE, --ledger STATE, or both")
    if database is not None and ledger is None:
        raise UsageError("--database needs --ledger")
    restrict_umask()
    made = make(to, hub, ledger, database)
    said = []
    if made.hub is not None:
        said.append(f"hub at version {made.hub['version'] or 'none'}")
    if made.ledger is not None:
        said.append(f"ledger at step {made.ledger['step']}")
    size = sum(size for size, _ in made.files.values())
    click.echo(f"{to}: {' and '.join(said)} of run {made.run or 'unknown'}; {len(made.files)} files, {size:,} bytes")


@click.command()
@click.argument("from_", metavar="FROM", type=PATH)
@_HUB
@_LEDGER
@click.option(
    "--database",
    metavar="URL",
    help="Empty PostgreSQL database for the ledger's rows.  [default: SQLite in the ledger's state folder]",
)
@click.option(
    "--step",
    type=click.IntRange(0),
    help="Steps of the learner's newest checkpoint, 0 without a checkpoint. Needed with --ledger.",
)
@click.option(
    "--branch",
    type=click.IntRange(1),
    help="Least branch of the hub's next version, if the run had higher branches than the backup knows.",
)
def restore(
    from_: Path, hub: Path | None, ledger: Path | None, database: str | None, step: int | None, branch: int | None
) -> None:
    """Write the state of hub and ledger from the backup FROM to new folders.

    Every file of FROM is compared with its hash first. The restored hub continues on a new branch, so no version of the
    time after the backup gets other weights. A restored ledger that is behind the learner is moved to the learner's
    step: results of the backup that no batch contained are not trained.

    Hub and ledger of the backup's run must have ended on every machine.

    \b
    Example:
      p2pcast restore /backup/run7-monday --hub hub --ledger ledger --step 1200
    """
    from p2pcast.process.daemon_process import restrict_umask
    from trainer_node.backup.run_backup import restored

    if hub is None and ledger is None:
        raise UsageError("name the folders to write: --hub STATE, --ledger STATE, or both")
    if (ledger is None) != (step is None):
        raise UsageError("--ledger and --step belong together: how many steps has the learner's newest checkpoint?")
    if database is not None and ledger is None:
        raise UsageError("--database needs --ledger")
    if branch is not None and hub is None:
        raise UsageError("--branch needs --hub")
    restrict_umask()
    done = restored(from_, hub, branch, ledger, step or 0, database)
    if done.branch is not None:
        click.echo(f"{hub}: the next version opens branch {done.branch}")
    if done.dropped is not None:
        click.echo(f"{ledger}: {done.dropped} groups were dropped, which the learner may have trained since the backup")

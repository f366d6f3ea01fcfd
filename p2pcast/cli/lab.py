"""``p2pcast lab``: emulated networks on this machine."""

from __future__ import annotations

import json

import click

from p2pcast.cli.options import console

SCENARIOS = [{"name": "doctor", "what": "what network emulation this machine can do, each thing tried for real"}]
"""What `p2pcast lab NAME` runs."""

JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document.")


@click.group()
def lab() -> None:
    """Emulated networks on this machine."""


@lab.command("list")
@JSON
def list_command(as_json: bool) -> None:
    """Show what can be run."""
    if as_json:
        click.echo(json.dumps(SCENARIOS))
        return
    for scenario in SCENARIOS:
        click.echo(f"{scenario['name']}: {scenario['what']}")


@lab.command()
@JSON
def doctor(as_json: bool) -> None:
    """Try what network emulation needs: namespaces, links, qdiscs, programs. Leaves nothing behind."""
    from netem.doctor import backends, chosen, document, probe

    checks = probe()
    if as_json:
        click.echo(json.dumps(document(checks)))
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "works", "why", "what would make it work")
    for check in checks:
        table.add_row(check.name, "[green]yes" if check.ok else "[red]no", escape(check.reason), escape(check.install))
    console().print(table)
    every = backends(checks)
    for backend in every:
        lacks = f"; lacks {', '.join(backend.lacks)}" if backend.lacks else ""
        click.echo(f"{backend.name}: {'yes' if backend.ok else 'no'}, {backend.what}{lacks}")
    click.echo(f"chosen: {chosen(every)}")

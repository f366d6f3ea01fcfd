"""``--backend`` of benchmarks over emulated delay and loss."""

from __future__ import annotations

import click

backend_option = click.option(
    "--backend",
    type=click.Choice(["auto", "native", "uml"]),
    default="auto",
    help="Emulation backend for delay and loss: this kernel (native) or user-mode Linux (uml).",
)

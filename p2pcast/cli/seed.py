"""``p2pcast seed``: the hub."""

from __future__ import annotations

from pathlib import Path

import click
import uvloop

from p2pcast.cli.options import PATH, Address, Rate, plaintext, require_plaintext


@click.command()
@click.argument("checkpoints", type=PATH)
@click.option("--base", type=PATH, help="Hugging Face folder that is version 0; peers that have it download nothing at first.")
@click.option("--listen", type=Address("0.0.0.0", 7077), default="0.0.0.0:7077", show_default=True)
@click.option("--advertise", type=Address(), help="Address that the printed join line names.")
@click.option("--http", type=Address("127.0.0.1"), default="127.0.0.1:7078", show_default=True, help="Status and metrics.")
@click.option("--state", type=PATH, help="Folder for key, versions and membership.")
@click.option("--shadow", type=PATH, help="Folder in tmpfs for the state in memory (1 x the model).")
@click.option(
    "--uplink", type=Rate(), default="1gbit", show_default=True, help="This side's upload rate: it decides the number of chains."
)
@click.option("--chains", type=click.IntRange(1), help="Number of chains, instead of what --uplink and measured rates say.")
@click.option(
    "--commit",
    type=click.Choice(["auto", "manual"]),
    default="auto",
    show_default=True,
    help="Engines switch by themselves, or on `p2pcast commit`.",
)
@click.option("--codec", type=click.Choice(["auto", "flat", "dense"]), default="auto", show_default=True)
@click.option("--token-file", type=PATH, help="Write the join token there (mode 0600).")
@plaintext
def seed(
    checkpoints: Path,
    base: Path | None,
    listen: tuple[str, int],
    advertise: tuple[str, int] | None,
    http: tuple[str, int],
    state: Path | None,
    shadow: Path | None,
    uplink: float,
    chains: int | None,
    commit: str,
    codec: str,
    token_file: Path | None,
    plaintext: bool,
) -> None:
    """Publish every new CHECKPOINTS/step_N/ (a Hugging Face safetensors folder) to all peers that join."""
    from p2pcast.daemon import default_shadow, keep_freed_memory, state_home, until_told
    from trainer_node.hub import Hub, HubConfig

    require_plaintext(plaintext)
    folder = state or state_home() / "hub"
    config = HubConfig(
        checkpoints=checkpoints,
        state=folder,
        shadow=shadow or default_shadow(folder),
        base=base,
        listen=listen,
        advertise=advertise,
        http=http,
        uplink_bps=uplink,
        chains=chains,
        commit=commit,
        codec=codec,
        token_file=token_file or (folder / "token"),
    )

    keep_freed_memory()

    async def work() -> None:
        await until_told(Hub(config).run)

    uvloop.run(work())

"""``p2pcast page`` and ``p2pcast replay``: a run in a browser."""

from __future__ import annotations

from pathlib import Path

import click

from p2pcast.cli.options import BEARER_FILE, PATH, Address
from p2pcast.ground.errors import UsageError


@click.command()
@click.option("--hub", metavar="URL", help="URL of the hub's HTTP server.  [default: http://127.0.0.1:7078]")
@click.option("--state", type=PATH, help="The hub's state folder, in place of --hub.")
@click.option(
    "--link", is_flag=True, help="Print a link that one browser on another machine may open within 10 minutes."
)
@BEARER_FILE
def page(hub: str | None, state: Path | None, link: bool, bearer_file: Path | None) -> None:
    """Print the address of the run's page.

    On the hub's machine the page opens without more. For a browser elsewhere the hub needs an --http address that this
    browser reaches; write that address in --hub, and add --link. The link works once; then a cookie lets the browser
    read the page for 12 hours.
    """
    from p2pcast.daemon.daemon_requests import ask, daemon_url

    url = daemon_url(hub, state)
    if not link:
        click.echo(f"{url.replace('//0.0.0.0:', '//127.0.0.1:').replace('//[::]:', '//[::1]:')}/")
        return
    found = ask(url, "/page/link", {}, state=state, bearer_file=bearer_file)
    click.echo(f"{url}{found['path']}")


@click.command()
@click.argument("events", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--speed", type=click.FloatRange(0.01, 10_000), default=1.0, help="Seconds of the run in one second.")
@click.option("--http", type=Address("127.0.0.1"), default="127.0.0.1:7081", help="Address of the page.")
def replay(events: Path, speed: float, http: tuple[str, int]) -> None:
    """Play recorded EVENTS of a hub on the page.

    \b
    To record:  curl -sN 'http://127.0.0.1:7078/events?since=0' > EVENTS
    To play:    p2pcast replay EVENTS --speed 10

    Lines of JSON are read, too: {"kind": "sealed", "time": 1795820502.9, "facts": {"version": "0.3", "bytes": 22026}}.
    """
    from p2pcast.ground.addresses import show_address
    from p2pcast.page.recorded_run import read_events
    from p2pcast.page.replay import RunReplay
    from p2pcast.process import event_loop
    from p2pcast.process.background_tasks import Tasks
    from p2pcast.process.daemon_process import run_until_signal

    try:
        with events.open(encoding="utf-8") as lines:
            recorded = sorted(read_events(lines), key=lambda event: event.time_s)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{events} cannot be read: {error}") from None
    except UsageError as error:
        raise UsageError(f"{events}: {error}") from None
    if not recorded:
        raise UsageError(f"{events} holds no event")

    async def work() -> None:
        played = RunReplay(recorded, speed, events.name)
        await played.http.start(*http)
        click.echo(f"{len(recorded)} events at http://{show_address(*played.http.address)}/")
        try:
            async with Tasks(played.events).group() as group:
                group.create_task(played.feed.run, name="page")
                group.create_task(played.play, name="replay", ends=True)
        finally:
            await played.http.stop()

    event_loop.run(run_until_signal(work))

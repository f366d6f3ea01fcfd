"""``p2pcast verify``: is a folder, or an engine's own memory, bit for bit what a delta or a hub says it should be?"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click

from p2pcast import limits, offline
from p2pcast.cli.verify_live import verify_live
from p2pcast.errors import IntegrityError, LocalError, RefusedError, RetryableError, UsageError
from p2pcast.progress import Meter
from p2pcast.version import Version

_TIMEOUT_S = 10.0


@click.command("verify")
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option("--against", metavar="FILE|HUB_HTTP", help="A .p2pd file, or a hub's http(s) address.")
@click.option("--version", "version_text", metavar="VERSION", help="With a hub: insist on this version instead of any it knows.")
@click.option(
    "--token-file",
    "--bearer-file",
    "token_file",
    type=click.Path(path_type=Path),
    help="A copy of the hub's STATE/http.token; with --peer, of the peer's.",
)
@click.option("--live", is_flag=True, help="Engines instead of a folder: their own weights, digested where they lie.")
@click.option("--peer", metavar="URL", help="With --live: a peer's HTTP address.")
@click.option("--state", type=click.Path(path_type=Path), help="With --live: state folder of a peer on this machine.")
@click.option(
    "--hub",
    metavar="URL",
    help="With --live: every peer of this hub's run; with a peer named, compare with the hub's digest too.",
)
@click.option("--engine", metavar="NAME", help="With --live: this engine alone, as `p2pcast status` calls it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def verify(
    folder: Path | None,
    against: str | None,
    version_text: str | None,
    token_file: Path | None,
    live: bool,
    peer: str | None,
    state: Path | None,
    hub: str | None,
    engine: str | None,
    as_json: bool,
) -> None:
    """Compare FOLDER's digest with the state that FILE leads to, or with a hub's versions; or, with --live, what engines hold in memory with the
    version that they use. Exit code 3 when it differs."""
    if live:
        if folder is not None or against is not None or version_text is not None:
            raise UsageError("--live looks at engines: give no folder, --against or --version with it")
        verify_live(hub, state, peer, engine, token_file, as_json)
        return
    if folder is None or against is None:
        raise UsageError("give a folder and --against FILE|HUB_HTTP, or --live")
    if (peer, state, hub, engine) != (None, None, None, None):
        raise UsageError("--peer, --state, --hub and --engine go with --live")
    version = None if version_text is None else Version.parse(version_text)
    if against.startswith(("http://", "https://")):
        status = fetch_status(against, token_file)
        with Meter("verify") as seen:
            found = offline.verify_digests(folder, status, version=version, seen=seen)
    else:
        with Meter("verify") as seen:
            found = offline.verify_folder(folder, against, seen=seen)
    if as_json:
        document = {
            "ok": not found.faults,
            "state": f"{found.state:016x}",
            "version": None if found.version is None else str(found.version),
            "faults": found.faults,
        }
        click.echo(json.dumps(document))
    if found.faults:
        raise IntegrityError(f"{folder} is not what {against} says:\n  " + "\n  ".join(found.faults))
    if not as_json:
        click.echo(f"{folder}: version {found.version}, state {found.state:016x}: as it should be")


def fetch_status(hub: str, token_file: Path | None = None, *, timeout_s: float = _TIMEOUT_S) -> Any:
    """A hub's ``/status``. Raises RetryableError when it can't be reached, RefusedError when it wants a token, LocalError otherwise."""
    url = hub.rstrip("/") + "/status"
    headers = {"Accept": "application/json"}
    if token_file is not None:
        try:
            headers["Authorization"] = f"Bearer {token_file.read_text().strip()}"
        except (OSError, UnicodeDecodeError) as error:
            raise LocalError(f"cannot read the token file {token_file}: {error}") from None
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout_s) as answer:
            body = answer.read(limits.MAX_LAYOUT_BYTES + 1)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 403):
            raise RefusedError(f"{url}: the hub wants its bearer token: pass --token-file") from None
        raise LocalError(f"{url}: answered {error.code}; is this a hub's address?") from None
    except (OSError, ValueError) as error:
        raise RetryableError(f"{url}: cannot be reached: {getattr(error, 'reason', error)}") from None
    if len(body) > limits.MAX_LAYOUT_BYTES:
        raise LocalError(f"{url}: answered more than {limits.MAX_LAYOUT_BYTES} bytes; is this a hub's address?")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise LocalError(f"{url}: did not answer with JSON; is this a hub's address?") from None

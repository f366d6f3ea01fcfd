"""``p2pcast verify``: compare a folder, or an engine's own memory, with a version's signed digest."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click

from p2pcast.cli.verify_live import verify_live
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, LocalError, RefusedError, RetryableError, UsageError
from p2pcast.ground.plain_text import written_text
from p2pcast.ground.progress_bar import ProgressMeter
from p2pcast.ground.version import Version

_TIMEOUT_S = 10.0


@click.command("verify")
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option(
    "--against", metavar="FILE|HUB_HTTP", help="Expected state: a .p2pd file, or the http(s) address of a hub."
)
@click.option(
    "--version",
    "version_text",
    metavar="VERSION",
    help="With a hub: the expected version.  [default: any version that the hub knows]",
)
@click.option(
    "--token-file",
    "--bearer-file",
    "token_file",
    type=click.Path(path_type=Path),
    help="File with a bearer token: a copy of the hub's STATE/http.token, or with --peer, of the peer's.",
)
@click.option("--live", is_flag=True, help="Comparison of engines' weights, digested in their memory, not of a folder.")
@click.option("--peer", metavar="URL", help="With --live: HTTP address of one peer.")
@click.option("--state", type=click.Path(path_type=Path), help="With --live: state folder of a peer on this machine.")
@click.option(
    "--hub",
    metavar="URL",
    help=(
        "With --live: HTTP address of a hub, for all peers of its run; with --peer or --state, a second source of the "
        "digest."
    ),
)
@click.option("--engine", metavar="NAME", help="With --live: name of one engine, as in `p2pcast status`.")
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
    """Compare FOLDER's weights and small files with those after the delta in FILE, or with a hub's versions. With
    --live, compare the weights in engines' memory with the version that the engines report. Exit code 3: they differ.
    Exit code 5: no difference was found, and some weights of an engine could not be compared.

    \b
    Examples:
      p2pcast verify step_2-copy --against 1-2.p2pd
      p2pcast verify /models/latest --against http://hub.example:7078 --token-file http.token
      p2pcast verify --live --hub http://127.0.0.1:7078
    """
    if live:
        if folder is not None or against is not None or version_text is not None:
            raise UsageError("--live verifies engines: give no folder, --against or --version with --live")
        verify_live(hub, state, peer, engine, token_file, as_json)
        return
    if folder is None or against is None:
        raise UsageError("give a folder and --against FILE|HUB_HTTP, or --live")
    if (peer, state, hub, engine) != (None, None, None, None):
        raise UsageError("--peer, --state, --hub and --engine need --live")
    version = None if version_text is None else Version.parse(version_text)
    if against.startswith(("http://", "https://")):
        status = _fetch(against, "status", token_file)
        files = _fetch(against, "files", token_file)
        if not isinstance(files, dict) or not isinstance(files.get("files"), dict):
            raise LocalError(f"{against}: answers without a list of small files; is this a hub of this release?")
        with ProgressMeter("verify") as seen:
            from p2pcast import offline

            found = offline.verify_digests(folder, status, files["files"], version=version, progress=seen)
    else:
        with ProgressMeter("verify") as seen:
            from p2pcast import offline

            found = offline.verify_folder(folder, against, progress=seen)
    if as_json:
        document = {
            "ok": not found.faults,
            "state": f"{found.state:016x}",
            "version": None if found.version is None else str(found.version),
            "faults": found.faults,
        }
        click.echo(json.dumps(document))
    if found.faults:
        raise IntegrityError(f"{folder} differs from {against}:\n  " + "\n  ".join(found.faults))
    if not as_json:
        click.echo(f"{folder}: version {found.version}, state {found.state:016x}: verified")


def _fetch(hub: str, name: str, token_file: Path | None) -> Any:
    """Fetch ``/status`` or ``/files`` from a hub. Raises RetryableError if the hub is unreachable, RefusedError if it
    demands a token, and LocalError otherwise.
    """
    url = f"{hub.rstrip('/')}/{name}"
    headers = {"Accept": "application/json"}
    if token_file is not None:
        try:
            headers["Authorization"] = f"Bearer {written_text(token_file.read_bytes()).strip()}"
        except (OSError, UnicodeDecodeError) as error:
            raise LocalError(f"cannot read the token file {token_file}: {error}") from None
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S) as answer:
            body = answer.read(limits.MAX_LAYOUT_BYTES + 1)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 403):
            raise RefusedError(f"{url}: the hub requires its bearer token: give --token-file") from None
        raise LocalError(f"{url}: answered HTTP {error.code}; is this a hub's address?") from None
    except (OSError, ValueError) as error:
        raise RetryableError(f"{url}: cannot be reached: {getattr(error, 'reason', error)}") from None
    if len(body) > limits.MAX_LAYOUT_BYTES:
        raise LocalError(f"{url}: answered more than {limits.MAX_LAYOUT_BYTES} bytes; is this a hub's address?")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise LocalError(f"{url}: the answer is not JSON; is this a hub's address?") from None

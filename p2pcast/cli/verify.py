"""``p2pcast verify``: is a folder, bit for bit, what a delta or a hub says it should be?"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click

from p2pcast import limits, offline
from p2pcast.errors import IntegrityError, LocalError, RefusedError, RetryableError
from p2pcast.progress import Meter
from p2pcast.version import Version

_TIMEOUT_S = 10.0


@click.command("verify")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--against", required=True, metavar="FILE|HUB_HTTP", help="A .p2pd file, or a hub's http(s) address.")
@click.option("--version", "version_text", metavar="VERSION", help="With a hub: insist on this version instead of any it knows.")
@click.option(
    "--token-file", type=click.Path(path_type=Path), help="With a hub that is not on loopback: the file with its bearer token."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def verify(folder: Path, against: str, version_text: str | None, token_file: Path | None, as_json: bool) -> None:
    """Compare FOLDER's digest with the state that FILE leads to, or with a hub's versions. Exit code 3 when it differs."""
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

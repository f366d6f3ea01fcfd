"""Parameter types and options that several commands share."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from rich.console import Console

from p2pcast.addresses import parse_address
from p2pcast.daemon import parse_rate
from p2pcast.errors import UsageError
from p2pcast.limits import MAX_KEPT, MAX_STRIPES
from p2pcast.store.files import atomic_write
from p2pcast.store.retention import KEEP_ANCHORS, KEEP_DELTAS
from p2pcast.version import Version

F = TypeVar("F", bound=Callable[..., Any])

TOKEN_VARIABLE = "P2PCAST_TOKEN"
PATH = click.Path(path_type=Path)
PIPED_COLUMNS = 160


class Address(click.ParamType[tuple[str, int]]):
    """HOST:PORT or [IPV6]:PORT. Without ``default_host`` a host has to be named; ``""`` is every address of this machine."""

    name = "HOST:PORT"

    def __init__(self, default_host: str | None = None, default_port: int | None = None) -> None:
        self._host = default_host
        self._port = default_port

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        try:
            return parse_address(value, default_host=self._host, default_port=self._port)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class Rate(click.ParamType[float]):
    """Bits per second."""

    name = "RATE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return parse_rate(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class Stripes(click.ParamType[int | None]):
    """A number of TCP connections; None for ``auto``."""

    name = "S|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value is None or value == "auto":
            return None
        return int(click.IntRange(1, MAX_STRIPES).convert(value, param, ctx))


class VersionType(click.ParamType[Version | str]):
    """BRANCH.STEP, or one of ``words``."""

    name = "VERSION"

    def __init__(self, words: Sequence[str] = ()) -> None:
        self._words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Version | str:
        if isinstance(value, Version) or value in self._words:
            return cast(Version | str, value)
        try:
            return Version.parse(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


def seconds(command: str, option: str, kind: click.FloatRange, default: float | None, text: str) -> Callable[[F], F]:
    """``--option SECONDS`` of ``command``. The parameter has its unit in its name, the variable of the environment has not."""
    name = option.replace("-", "_")
    return click.option(
        f"--{option}",
        f"{name}_s",
        envvar=f"P2PCAST_{command}_{name}".upper(),
        type=kind,
        default=default,
        show_default=default is not None,
        metavar="SECONDS",
        help=text,
    )


def retention(function: F) -> F:
    """``--keep-deltas``, ``--keep-anchors``."""
    deltas = click.option(
        "--keep-deltas",
        type=click.IntRange(1, MAX_KEPT),
        metavar="N",
        help=f"Deltas that stay on disk: the newest N, and those that the newest version needs.  [default: {KEEP_DELTAS}]",
    )
    anchors = click.option(
        "--keep-anchors",
        type=click.IntRange(1, MAX_KEPT),
        metavar="N",
        help=f"Whole states that stay on disk: the newest N, and those that kept deltas start from.  [default: {KEEP_ANCHORS}]",
    )
    return deltas(anchors(function))


def congestion(function: F) -> F:
    """``--congestion NAME``."""
    return click.option(
        "--congestion",
        metavar="NAME",
        help="TCP congestion control of links, for what this side sends.  [default: bbr where the kernel has it, else its own]",
    )(function)


def plaintext(function: F) -> F:
    """``--plaintext``: TLS is what is usual."""
    return click.option(
        "--plaintext",
        is_flag=True,
        help="Links without encryption, for loopback and closed networks: whoever is on the way can read the weights. The token, one for all, still decides who is admitted, and weights are signed.",
    )(function)


def console() -> Console:
    """Where tables go. A pipe or a file has no width of its own: there nothing is squeezed into 80 columns."""
    return Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS)


def documented(function: F) -> F:
    """``--json`` and ``--output FILE``, for commands that measure, which end with ``handed_over``."""
    function = click.option("-o", "--output", type=PATH, help="Write the JSON document to this file too.")(function)
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")(function)


def handed_over(document: dict[str, Any], output: Path | None, *, as_json: bool) -> bool:
    """The document to its file, and with ``as_json`` to stdout; False: there the table for people is wanted. Raises LocalError."""
    write_document(document, output)
    if as_json:
        click.echo(json.dumps(document))
    return as_json


def write_document(document: dict[str, Any], file: Path | None) -> None:
    """Raises LocalError."""
    if file is not None:
        atomic_write(file, json.dumps(document, indent=1).encode() + b"\n", None)


BEARER_FILE = click.option(
    "--bearer-file",
    type=PATH,
    help="A copy of the daemon's STATE/http.token; or P2PCAST_HTTP_TOKEN.  [default: found by --state]",
)


def read_token(file: Path | None) -> str:
    """From the file, else from the environment; never from argv. Raises UsageError."""
    if file is None:
        text = os.environ.get(TOKEN_VARIABLE, "")
        if not text:
            raise UsageError(
                f"a join token is needed: --token-file FILE (as `p2pcast seed --token-file` wrote it), or {TOKEN_VARIABLE}"
            )
        return text
    try:
        return file.read_text()
    except OSError as error:
        raise UsageError(f"cannot read the token file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not a token file") from None

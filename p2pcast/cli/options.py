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

from p2pcast.checkpoint.folder_form import StepNames
from p2pcast.files.atomic_files import atomic_write
from p2pcast.ground.addresses import parse_address
from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import MAX_STRIPES
from p2pcast.ground.plain_text import written_text
from p2pcast.ground.version import Version
from p2pcast.process.daemon_process import parse_rate

F = TypeVar("F", bound=Callable[..., Any])

TOKEN_VARIABLE = "P2PCAST_TOKEN"
PATH = click.Path(path_type=Path)
PIPED_COLUMNS = 160


class Address(click.ParamType[tuple[str, int]]):
    """HOST:PORT or [IPV6]:PORT. The host is required unless there is a ``default_host``. The host ``""`` stands for
    every address of this machine.
    """

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


class RateParameter(click.ParamType[float]):
    """A rate in bits per second, as in ``100mbit``."""

    name = "RATE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return parse_rate(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class Stripes(click.ParamType[int | None]):
    """A number of TCP connections, 1 to ``MAX_STRIPES``; None for ``auto``."""

    name = "S|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value is None or value == "auto":
            return None
        return int(click.IntRange(1, MAX_STRIPES).convert(value, param, ctx))


class StepNamesType(click.ParamType[StepNames]):
    """Names of step folders, as in ``weight_v{step:06}``."""

    name = "PATTERN"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> StepNames:
        if isinstance(value, StepNames):
            return value
        try:
            return StepNames.parse(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


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
    """Return a decorator that adds ``--option SECONDS`` to ``command``. The Python parameter's name ends in ``_s``; the
    environment variable's name has no unit.
    """
    name = option.replace("-", "_")
    return click.option(
        f"--{option}",
        f"{name}_s",
        envvar=f"P2PCAST_{command}_{name}".upper(),
        type=kind,
        default=default,
        metavar="SECONDS",
        help=text,
    )


def console() -> Console:
    """Return a console for tables on stdout. In a pipe or a file, which has no width, lines have ``PIPED_COLUMNS``."""
    return Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS)


def documented(function: F) -> F:
    """Add ``--json`` and ``--output FILE`` to a measuring command, which must call ``written`` last."""
    function = click.option("-o", "--output", type=PATH, help="File for the JSON document, in addition to stdout.")(
        function
    )
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of a table.")(
        function
    )


def written(document: dict[str, Any], output: Path | None, *, as_json: bool) -> bool:
    """Write the document to ``output`` and, if ``as_json``, to stdout. Returns False if the caller has to print its
    table. Raises LocalError.
    """
    write_document(document, output)
    if as_json:
        click.echo(json.dumps(document))
    return as_json


def write_document(document: dict[str, Any], file: Path | None) -> None:
    """Write the JSON document to ``file`` unless it is None. Raises LocalError."""
    if file is not None:
        atomic_write(file, json.dumps(document, indent=1).encode() + b"\n", None)


BEARER_FILE = click.option(
    "--bearer-file",
    type=PATH,
    help=(
        "File with the daemon's bearer token, a copy of its STATE/http.token; or set P2PCAST_HTTP_TOKEN.  [default: "
        "found by --state]"
    ),
)


def read_token(file: Path | None) -> str:
    """Read a join token from ``file``, or else from the environment; never from argv, which other users can read.
    Raises UsageError.
    """
    if file is None:
        text = os.environ.get(TOKEN_VARIABLE, "")
        if not text:
            raise UsageError(
                "no join token: give --token-file FILE (written by `p2pcast seed --token-file`) or set "
                f"{TOKEN_VARIABLE}"
            )
        return text
    try:
        return written_text(file.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read the token file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not a token file: its contents are not UTF-8") from None


def task_names(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the short names of tasks that start with ``incomplete``, for shell completion."""
    from p2pcast.tasks import task_loader

    return [name for name in task_loader.task_names() if name.startswith(incomplete)]

"""One page for ``man`` for each command, from the command line's own help: ``python tests/packaging/man_pages.py
[FOLDER]``; ``make man``. FOLDER is build/man by default.

click-man was tried: its pages lack commands that are loaded when used, and it escapes nothing.
"""

from __future__ import annotations

import datetime
import os
import re
import sys
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

import click
from built_wheel import ROOT

from p2pcast.cli import cli
from p2pcast.ground.release import RELEASE

PREFORMATTED = "\b"
"""First line of a paragraph of help whose lines are kept, as click has it."""


def write_man_pages(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for context in contexts(cli, None, "p2pcast"):
        (folder / f"{page_name(context)}.1").write_text(page(context))


def contexts(command: click.Command, parent: click.Context | None, name: str) -> Iterator[click.Context]:
    """A context for the command, and one for each command below."""
    context = click.Context(command, info_name=name, parent=parent, **command.context_settings)
    yield context
    for inner, below in children(context):
        yield from contexts(below, context, inner)


def children(context: click.Context) -> list[tuple[str, click.Command]]:
    command = context.command
    if not isinstance(command, click.Group):
        return []
    found = [(name, command.get_command(context, name)) for name in command.list_commands(context)]
    return [(name, below) for name, below in found if below is not None and not below.hidden]


def page_name(context: click.Context) -> str:
    return context.command_path.replace(" ", "-")


def page(context: click.Context) -> str:
    command, name = context.command, page_name(context)
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH", datetime.datetime.now(datetime.UTC).timestamp()))
    date = datetime.datetime.fromtimestamp(seconds, datetime.UTC).date()
    lines = [f'.TH "{name.upper()}" "1" "{date}" "p2pcast {RELEASE}" "p2pcast"', ".SH NAME"]
    lines += [rf"{escaped(name)} \- {escaped(command.get_short_help_str(limit=200).rstrip('.'))}"]
    lines += [".SH SYNOPSIS", rf"\fB{escaped(context.command_path)}\fR"]
    lines += [escaped(" ".join(command.collect_usage_pieces(context)))]
    lines += [".SH DESCRIPTION", *paragraphs(cleandoc(command.help or ""))]
    options = [one for one in command.get_params(context) if isinstance(one, click.Option)]
    if records := [record for one in options if (record := one.get_help_record(context))]:
        lines += [".SH OPTIONS"]
        for option, text in records:
            lines += [".TP", rf"\fB{escaped(option)}\fR", escaped(" ".join(text.split())) or r"\&"]
    if below := children(context):
        lines += [".SH COMMANDS"]
        for inner, one in below:
            lines += [".TP", rf"\fB{escaped(name)}\-{escaped(inner)}\fR(1)"]
            lines += [escaped(one.get_short_help_str(limit=200))]
    related = [page_name(context.parent)] if context.parent else []
    related += [f"{name}-{inner}" for inner, _ in below]
    if related:
        last = len(related) - 1
        lines += [".SH SEE ALSO"]
        lines += [f".BR {escaped(one)} (1){',' if n < last else ''}" for n, one in enumerate(related)]
    return "\n".join(lines) + "\n"


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs of help in the language of man. Lines of a preformatted one are kept."""
    first = True
    for one in re.split(r"\n\s*\n", text.strip()):
        if not first:
            yield ".PP"
        first = False
        lines = one.strip("\n").split("\n")
        if lines[0].strip() == PREFORMATTED:
            yield from (".nf", *(escaped(line) for line in lines[1:]), ".fi")
        else:
            yield escaped(" ".join(line.strip() for line in lines))


def escaped(text: str) -> str:
    """Text that groff prints as given."""
    text = text.replace("\\", r"\e").replace("-", r"\-").replace("`", r"\`").replace("'", r"\(aq")
    text = text.replace("^", r"\(ha").replace("~", r"\(ti").replace('"', r"\(dq")
    return rf"\&{text}" if text.startswith(".") else text


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "man"
    write_man_pages(out)
    print(f"{out}: {len(list(out.iterdir()))} pages")

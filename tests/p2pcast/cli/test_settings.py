"""A record's fields as options, environment variables and keys of a TOML file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import pytest

from p2pcast.cli import config
from p2pcast.cli.options import RateParameter
from p2pcast.cli.settings import made, options, part, setting, settings_of, table
from p2pcast.ground.errors import UsageError


def even(number: int) -> int:
    if number % 2:
        raise UsageError(f"{number} is odd")
    return number


def window(begin: float, length: float | None) -> tuple[float, float]:
    return begin, begin + (length or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    place: Path | None = setting(None, argument=True)
    must: str = setting(text="A text.")
    kind: Literal["near", "far"] = setting("near", "A choice.")
    share: float = setting(0.5, "A number.", above=0, high=1)
    pairs: tuple[int, ...] = setting((), "Even numbers.", reads=even)
    rate_bps: float = setting("8kbit", "A rate.", name="rate", type=RateParameter())
    wait_s: float = setting(2.0, "A time.", 0)
    kept_bytes: int = setting(4, "Kibibytes.", name="kept", unit=1024)
    cached: bool = setting(False, "No cache.", name="no_cache", inverse=True)
    folder: Path = setting(text="A folder.", absent=lambda given: Path("folders") / given["must"])
    span: tuple[float, float] = part(window, (0.0, 0.0), begin=setting(0.0, "Begin."), length=setting(None, "Length."))
    inner: int = 7


@click.command()
@options(Record, "try")
@click.option("--other", default="x")
def command(record: Record, other: str) -> tuple[Record, str]:
    return record, other


def parsed(*words: str) -> Record:
    found: tuple[Record, str] = command.main(list(words), standalone_mode=False)
    return found[0]


def test_a_record_without_words_has_the_defaults_of_the_fields() -> None:
    direct = Record(must="a", folder=Path("folders/a"))
    assert parsed("--must", "a") == direct
    assert (direct.rate_bps, direct.kept_bytes, direct.cached, direct.inner) == (8000.0, 4096, True, 7)


@pytest.mark.parametrize("words", [["--must"], ["--must", "a", "--folder"], ["--must", "a", "--rate"]])
def test_no_option_goes_without_its_value(words: list[str]) -> None:
    with pytest.raises(click.BadOptionUsage, match="requires an argument"):
        parsed(*words)
    assert parsed("--must", "-a", "--folder", "-b").folder == Path("-b")


def test_each_option_reaches_the_record() -> None:
    words = "here --must a --kind far --share 1 --pairs 2 --pairs 4 --rate 1mbit --wait 3 --kept 2 --no-cache"
    assert parsed(*words.split(), "--folder", "f", "--begin", "1", "--length", "2") == Record(
        place=Path("here"), must="a", kind="far", share=1.0, pairs=(2, 4), rate_bps=1e6, wait_s=3.0, kept_bytes=2048,
        cached=False, folder=Path("f"), span=(1.0, 3.0),
    )  # fmt: skip


def test_options_have_the_order_of_the_fields_and_other_options_stay() -> None:
    assert [each.name for each in command.params] == [each.name for each in settings_of(Record)] + ["other"]
    found: tuple[Record, str] = command.main(["--must", "a", "--other", "y"], standalone_mode=False)
    assert found[1] == "y"


def test_variables_have_the_names_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MUST": "a", "WAIT": "5", "NO_CACHE": "1", "PLACE": "here", "PAIRS": "2 6"}.items():
        monkeypatch.setenv(f"P2PCAST_TRY_{name}", value)
    found = parsed()
    assert (found.wait_s, found.cached, found.place, found.pairs) == (5.0, False, Path("here"), (2, 6))


@pytest.mark.parametrize(
    ("words", "option", "why"),
    [
        (["--share", "0"], "--share", "not in the range 0<x<=1"),
        (["--kind", "off"], "--kind", "not one of"),
        (["--pairs", "2", "--pairs", "3"], "--pairs", "3 is odd"),
        (["--rate", "fast"], "--rate", "is not a rate"),
    ],
)
def test_the_error_of_a_wrong_value_names_the_option(words: list[str], option: str, why: str) -> None:
    with pytest.raises(click.BadParameter, match=why) as refusal:
        parsed("--must", "a", *words)
    assert option in refusal.value.format_message()


def test_a_value_without_a_default_is_missing() -> None:
    with pytest.raises(click.MissingParameter) as refusal:
        parsed()
    assert "--must" in refusal.value.format_message()


@dataclass(frozen=True, slots=True)
class Table:
    count: int = setting(2, "An even number.", 0, 10, reads=even)
    folder: Path | None = setting(None, "A folder.")


@pytest.mark.parametrize(("text", "why"), [("count = 11", "count: 11 is not in"), ("\ncount = 3", "count: 3 is odd")])
def test_the_error_of_a_key_names_its_line(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("P2PCAST_COUNT", "4")
    group = click.Group("run", commands={"one": table(Table, "one")})

    def read(contents: str) -> dict[str, Any]:
        (tmp_path / "run.toml").write_text(contents)
        return config.tables(tmp_path / "run.toml", group)["one"]

    assert made(Table, read("[one]\nfolder = 'f'\n")) == Table(2, Path("f"))
    with pytest.raises(UsageError, match=f"line {2 + text.count(chr(10))}: {why}"):
        read(f"[one]\n{text}\n")

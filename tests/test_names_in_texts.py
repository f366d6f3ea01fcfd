"""Names in backquotes exist, in pages, docstrings and comments: programs, settings or file names have them."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
QUOTED = re.compile(r"`+([^`\n]+)`+")
IDENTIFIERS = re.compile(r"[A-Za-z_][\w.]*(?:\(\))?")
VALUE = re.compile(r"[a-z0-9]_[A-Z]|[a-z][A-Z]$|v0+N")
OTHERS = {
    "AWS_SESSION_TOKEN": "boto3",
    "OTEL_EXPORTER_OTLP_CERTIFICATE": "OpenTelemetry",
    "OTEL_EXPORTER_OTLP_HEADERS": "OpenTelemetry",
    "OTEL_RESOURCE_ATTRIBUTES": "OpenTelemetry",
    "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "SGLang",
    "TOKENS_PER_S": "an argument in a line of usage",
    "_async_gen_next_batch": "verl",
    "_reset_caches": "vLLM",
    "colocate_async": "verl",
    "importance_sampling": "Tinker",
    "proc_net_tcp": "the kernel's documentation",
    "rollout_correction": "verl",
    "save_to_disk": "Hugging Face datasets",
    "separate_async": "verl",
    "test_report_matches_brute_force": "an example of a name",
    "train_async": "slime",
    "wmem_max": "Linux",
}
"""Other names, and the project or place of each."""


@cache
def files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(name) for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@cache
def tokens() -> tuple[list[tuple[Path, int, str]], set[str]]:
    """File, line and text of each docstring and comment of the Python files, and the words of everything else."""
    prose: list[tuple[Path, int, str]] = []
    words: set[str] = set()
    for path in files():
        if path.suffix != ".py" or path == Path(__file__).relative_to(ROOT):
            continue
        before = tokenize.NEWLINE
        for token in tokenize.generate_tokens(io.StringIO((ROOT / path).read_text()).readline):
            starts = before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and starts):
                prose.append((path, token.start[0], token.string))
            elif token.type in (tokenize.NAME, tokenize.STRING):
                words.update(re.findall(r"\w+", token.string))
            if token.type not in (tokenize.NL, tokenize.COMMENT):
                before = token.type
    return prose, words


@cache
def code() -> str:
    """All words of programs, settings and file names, each once."""
    words = tokens()[1] | {word for path in files() for word in re.findall(r"\w+", str(path))}
    for path in files():
        if path.suffix not in (".py", ".md", ".png", ".svg", ".gz", ".bin"):
            words.update(re.findall(r"\w+", (ROOT / path).read_text(errors="ignore")))
    return "\n".join(sorted(words))


def unknown(text: str) -> Iterator[str]:
    """Names with an underscore that no word of a program contains. A capital part stands for a value: ``step_N``."""
    for quoted in QUOTED.findall(text):
        if "_" in quoted and IDENTIFIERS.fullmatch(quoted):
            names = (name for name in re.findall(r"\w+", quoted) if not VALUE.search(name))
            yield from (name for name in names if name not in code() and name not in OTHERS)


def test_names_in_pages_exist() -> None:
    found = []
    for path in files():
        if path.suffix == ".md":
            for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
                found += [f"{path}:{number}: {name}" for name in unknown(line)]
    assert found == []


def test_names_in_docstrings_and_comments_exist() -> None:
    found = []
    for path, line, text in tokens()[0]:
        found += [f"{path}:{line}: {name}" for name in unknown(text)]
    assert found == []


def test_other_names_are_needed() -> None:
    said = [text for _, _, text in tokens()[0]]
    said += [(ROOT / path).read_text() for path in files() if path.suffix == ".md"]
    assert [name for name in OTHERS if name in code() or not any(name in text for text in said)] == []


def test_an_unknown_name_is_found() -> None:
    assert list(unknown("`no_such_name_" + "anywhere`, `p2pcast.missing_" + "mod_ule` and `code()`")) == [
        "no_such_name_" + "anywhere",
        "missing_" + "mod_ule",
    ]

"""The files of the tree are as .editorconfig tells editors, which agrees with ruff's settings."""

from __future__ import annotations

import configparser
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parent.parent
FREE = ("p2pcast/page/static/*.min.*", "p2pcast/page/static/licences/*", "tests/golden/*")
"""Files of other projects, and recorded bytes."""


def test_lines_end_as_editors_write_them() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = []
    for name in filter(None, listed.split("\0")):
        data = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b""
        if b"\0" in data or any(fnmatch(name, pattern) for pattern in FREE):
            continue
        if re.search(rb"\r|[ \t]\n|(?<!\n)\Z", data) and data:
            found.append(name)
        if re.search(rb"^ *\t", data, re.MULTILINE) and name != "Makefile":
            found.append(f"{name}: tab")
    assert found == []


def test_lines_of_python_files_are_as_long_as_ruff_allows() -> None:
    read = configparser.ConfigParser()
    read.read_string("[top]\n" + (ROOT / ".editorconfig").read_text())
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert read["*.py"]["max_line_length"] == str(ruff["line-length"])
    assert list(FREE) == next(name for name in read.sections() if name.startswith("{p2pcast"))[1:-1].split(",")

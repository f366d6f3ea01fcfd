"""The wheel of `make dist` holds a valid bill of materials, and a page for each command."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import click
import pytest
from bill_of_materials import SCHEMA, VENDORED
from built_wheel import DEADLINE_S, ROOT
from cyclonedx.validation.json import JsonStrictValidator
from make_dist import made
from man_pages import contexts, page_name

from p2pcast.cli import cli

STATIC = ROOT / "p2pcast" / "page" / "static"
OF_OTHERS = re.compile(rb"copyright|licen[cs]e|(github\.com|d3js\.org)/", re.IGNORECASE)
"""In the beginning of a file of another project."""
WHOLE = pytest.mark.prove
"""Makes a release; test_wheel.py and the other tests of this file are samples."""
PAGES = {page_name(context): context for context in contexts(cli, None, "p2pcast")}


@pytest.fixture(scope="module")
def dist(wheel: Path, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("dist"), wheel, python)


@pytest.fixture(scope="module")
def bill(dist: Path) -> dict[str, Any]:
    held = zipfile.ZipFile(dist)
    [name] = [one for one in held.namelist() if ".dist-info/sboms/" in one]
    text = held.read(name).decode()
    [beside] = dist.parent.glob("*.cdx.json")
    assert beside.read_text() == text
    assert JsonStrictValidator(SCHEMA).validate_str(text) is None
    document: dict[str, Any] = json.loads(text)
    return document


@pytest.fixture(scope="module")
def pages(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the pages as the wheel holds them."""
    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(dist).extractall(folder)
    [found] = folder.glob("*.data/data/share/man/man1")
    return found


@WHOLE
def test_the_bill_names_every_dependency_and_no_tool(bill: dict[str, Any], python: Path) -> None:
    code = "from importlib.metadata import distributions as d; print(*{one.name for one in d()})"
    run = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True, timeout=DEADLINE_S)
    installed = {name.replace("_", "-").lower() for name in run.stdout.split()} - {"pip", "setuptools", "p2pcast"}
    npm = {package["name"] for package in VENDORED}
    assert {one["name"].replace("_", "-").lower() for one in bill["components"]} == installed | npm
    assert all(one["purl"].startswith("pkg:") and one["licenses"] for one in bill["components"])
    assert bill["metadata"]["component"]["name"] == "p2pcast"


@WHOLE
def test_the_bill_names_each_vendored_file_with_its_hash(bill: dict[str, Any]) -> None:
    by_name = {one["name"]: one for one in bill["components"]}
    for package in VENDORED:
        one = by_name[package["name"]]
        assert (one["version"], one["purl"]) == (package["version"], package["purl"])
        assert one["licenses"][0]["license"]["id"] == package["licence"]
        digests = {inner["name"]: inner["hashes"][0]["content"] for inner in one["components"]}
        assert digests == package["files"]
        for name, digest in digests.items():
            assert hashlib.sha256((ROOT / name).read_bytes()).hexdigest() == digest


def test_licences_of_vendored_files_are_in_the_metadata(wheel: Path) -> None:
    held = zipfile.ZipFile(wheel)
    [name] = [one for one in held.namelist() if one.endswith(".dist-info/METADATA")]
    metadata = held.read(name).decode()
    for package in VENDORED:
        assert f"License-File: {package['licence_file']}\n" in metadata
        assert name.replace("METADATA", f"licenses/{package['licence_file']}") in held.namelist()
        assert f" AND {package['licence']}" in metadata.split("License-Expression: ")[1].splitlines()[0]


def test_every_file_of_another_project_is_listed() -> None:
    """Files that name another project in their first lines, in the folders that the wheel and the images carry."""
    listed = {name for package in VENDORED for name in package["files"]}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    found = [str(path.relative_to(ROOT)) for path in STATIC.iterdir() if path.is_file()]
    found += [name for name in tracked if name.endswith((".js", ".mjs", ".css", ".ttf", ".woff", ".woff2"))]
    foreign = {name for name in found if OF_OTHERS.search((ROOT / name).read_bytes()[:300])}
    assert foreign <= listed
    assert {name for name in found if ".min." in name} <= listed


@WHOLE
def test_a_page_for_each_command_and_each_option(pages: Path) -> None:
    assert {path.name for path in pages.iterdir()} == {f"{name}.1" for name in PAGES}
    for name, context in PAGES.items():
        text = (pages / f"{name}.1").read_text().replace(r"\-", "-")
        for option in context.command.get_params(context):
            if isinstance(option, click.Option) and not option.hidden:
                assert all(one in text for one in (*option.opts, *option.secondary_opts)), (name, option.name)


@WHOLE
@pytest.mark.parametrize("tool", ["mandoc", "groff"])
def test_pages_give_no_warning(tool: str, pages: Path) -> None:
    files = sorted(map(str, pages.iterdir()))
    words = {"mandoc": ["mandoc", "-Tlint", "-Wwarning"], "groff": ["groff", "-man", "-ww", "-z", "-Tutf8", "-k"]}
    done = subprocess.run([*words[tool], *files], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@WHOLE
def test_examples_keep_their_lines(pages: Path) -> None:
    done = subprocess.run(
        ["mandoc", "-Tutf8", "-Owidth=200", str(pages / "p2pcast-seed.1")], capture_output=True, text=True, check=True
    )
    text = re.sub(r".\x08", "", done.stdout)
    assert "  p2pcast seed runs/math --commit barrier --mirror s3://bucket/run\n" in text

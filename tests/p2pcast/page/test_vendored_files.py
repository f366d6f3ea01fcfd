"""The page's files from npm are those of the stated releases, and each has its licence beside it."""

from __future__ import annotations

import hashlib
from importlib import resources

import pytest

VENDORED = {
    # d3-hierarchy 3.1.3, ISC
    "d3-hierarchy.min.js": "971f374ce9fdbec711eb2358003e2bb755bff22ec6852dc5ebd59f987270db64",
    # uPlot 1.6.32, MIT
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
STATIC = resources.files("p2pcast.page") / "static"


@pytest.mark.parametrize("name", VENDORED)
def test_a_vendored_file_is_unchanged(name: str) -> None:
    assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == VENDORED[name]


def test_each_package_has_its_licence() -> None:
    texts = {one.name: one.read_text() for one in (STATIC / "licences").iterdir()}
    assert texts.keys() == {"d3-hierarchy.txt", "uPlot.txt"}
    assert "Permission to use, copy, modify, and/or distribute" in texts["d3-hierarchy.txt"]
    assert "Permission is hereby granted, free of charge" in texts["uPlot.txt"]

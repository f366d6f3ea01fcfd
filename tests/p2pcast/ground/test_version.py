"""Versions as text."""

from __future__ import annotations

import pytest

from p2pcast.ground import limits
from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.12", (0, 12)),
        ("7", (0, 7)),
        ("3.0", (3, 0)),
        (f"{limits.MAX_BRANCH}.{limits.MAX_STEP}", (limits.MAX_BRANCH, limits.MAX_STEP)),
    ],
)
def test_text_round_trip(text, version):
    assert Version.parse(text) == version


@pytest.mark.parametrize(
    "text",
    [
        "",
        "v1",
        "1.",
        ".1",
        "1.2.3",
        "-1",
        "0.-1",
        "1e3",
        "٣",
        f"{limits.MAX_BRANCH + 1}.0",
        str(limits.MAX_STEP + 1),
        "9" * 5000,
    ],
)
def test_invalid_text_is_refused(text):
    with pytest.raises(UsageError, match="is not a version") as caught:
        Version.parse(text)
    assert len(str(caught.value)) < 200

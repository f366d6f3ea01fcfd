"""Commands of docs/guides/runbooks.md, by the names in the comments before them."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "runbooks.md"
_BLOCK = re.compile(r"^<!-- tested: ([\w-]+) -->\n```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> dict[str, str]:
    found = _BLOCK.findall(PAGE.read_text())
    assert len(found) == len(dict(found)), "two blocks have one name"
    return dict(found)

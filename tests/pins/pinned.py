"""Comparison of what the code shows with what was pinned in golden/.

Golden files are written anew, on purpose, by

    P2PCAST_WRITE_PINS=1 python -m pytest tests/pins

The tests pass then. Read the difference with git before it is committed: the interface that users see has changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[2]
PACKAGES = ("p2pcast", "topology", "trainer_node", "rollout_node", "netem")
"""Where source lies. A folder that is not there is passed over, so a renamed package has to be added."""
WRITING = os.environ.get("P2PCAST_WRITE_PINS") == "1"
MOST_LINES = 40


def check(name: str, found: Any) -> None:
    """Fails unless ``found`` is what golden/NAME.json holds."""
    file = GOLDEN / f"{name}.json"
    text = json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if WRITING:
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(text)
        return
    assert file.exists(), f"{file} is not there; P2PCAST_WRITE_PINS=1 python -m pytest tests/pins writes it"
    lines = list(differences(json.loads(file.read_text()), json.loads(text)))
    more = [f"… and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    assert not lines, "\n".join(
        [
            f"{len(lines)} differences from tests/pins/golden/{name}.json:",
            *lines[:MOST_LINES],
            *more,
            "This is a change of the interface that users see. If it is wanted, describe it in docs/changelog.md",
            "and write the pins anew: P2PCAST_WRITE_PINS=1 python -m pytest tests/pins",
        ]
    )


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """A line for each leaf that is gone, new, or another."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            at = f"{where} / {key}" if where else key
            if key not in new:
                yield f"- {at}: {_short(old[key])}"
            elif key not in old:
                yield f"+ {at}: {_short(new[key])}"
            else:
                yield from differences(old[key], new[key], at)
    elif isinstance(old, list) and isinstance(new, list) and old != new:
        gone, come = [e for e in old if e not in new], [e for e in new if e not in old]
        yield from (f"- {where}: {_short(e)}" for e in gone)
        yield from (f"+ {where}: {_short(e)}" for e in come)
        if not gone and not come:
            yield f"~ {where}: another order or number of elements: {_short(old)} -> {_short(new)}"
    elif old != new or type(old) is not type(new):
        yield f"~ {where}: {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:200] + "…"


def sources() -> Iterator[tuple[Path, str]]:
    """Every module of the packages, wherever it lies in them."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            yield file, file.read_text()

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]

sys.path.append(str(TESTS / "p2pcast" / "relay"))  # artifact_maker

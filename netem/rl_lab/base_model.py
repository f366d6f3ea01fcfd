"""Writes the small model with which a run in the lab begins: ``main: FOLDER LAYERS``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from netem.fleet.small_model import SmallModel, write_small_model
from netem.rollouts.graded_answers import VOCABULARY

HIDDEN: Final = 256
SPREAD: Final = 0.02
"""That of large models: the share of words that a step changes depends on the weights' size."""


def main() -> None:
    folder, layers = sys.argv[1:]
    form = SmallModel(VOCABULARY, hidden=HIDDEN, layers=int(layers), spread=SPREAD)
    write_small_model(Path(folder), form, seed=0, dtype="bfloat16")

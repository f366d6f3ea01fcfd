"""Keeps seeded requests alive whose prompts are computed in chunks, on vLLM's CPU build.

vLLM samples a token after each chunk of a prompt, drops it, and turns the request's generator back by an offset. Only
generators of CUDA have offsets: on a CPU the engine ends with "CPU Generator does not use offset". Promise: after
``keep_generators``, a request draws from its generator only when its token counts. So its answer does not depend on the
chunks.

The module of the runner loads numba, so this comes after a model is loaded.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, Final

import numpy as np

_FAULT: Final = "get_offset"
_INSTALLED: Final = "_p2pcast"


def keep_generators(runner: Any) -> None:
    """``runner``: vLLM's ``CPUModelRunner`` class. Without the fault it stays as it is."""
    inner = runner.sample_tokens
    if not is_faulty(runner) or hasattr(inner, _INSTALLED):
        return

    @wraps(inner)
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        batch = self.input_batch
        unfinished = np.flatnonzero(self.discard_request_mask.np[: batch.num_reqs])
        # Without its generator a row draws from the common one, as rows without a seed do.
        kept = {int(row): batch.generators.pop(row) for row in unfinished if row in batch.generators}
        try:
            return inner(self, grammar_output)
        finally:
            batch.generators.update(kept)

    setattr(sample_tokens, _INSTALLED, True)
    runner.sample_tokens = sample_tokens


def is_faulty(runner: Any) -> bool:
    """Whether this class still turns generators back by an offset."""
    return _FAULT in runner._bookkeeping_sync.__code__.co_names

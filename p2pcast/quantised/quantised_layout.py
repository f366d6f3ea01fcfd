"""The layout of a quantised state, derived from the layout of the weights as trained.

Guarantee: equal layouts and kinds give equal quantised layouts. It does no I/O.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import IntegrityError
from p2pcast.quantised.quantisation_kinds import QuantisationKind, Role, is_quantised

CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Origin:
    """A quantised tensor's source: its number in the plain layout, and the part that the tensor contains."""

    source: int
    role: Role


class QuantisedLayout:
    """``origins``: each tensor's origin, by its number in ``layout``. Raises IntegrityError if none can be
    quantised.
    """

    def __init__(self, plain: Layout, kind: QuantisationKind) -> None:
        self.plain, self.kind = plain, kind
        found: dict[str, tuple[Tensor, Origin]] = {}
        self.sources: list[int] = []
        """Numbers in the plain layout of the tensors that are quantised."""
        for number, tensor in enumerate(plain.tensors):
            quantised = is_quantised(tensor)
            if quantised:
                self.sources.append(number)
            for part, role in kind.parts(tensor) if quantised else [(tensor, Role.COPY)]:
                if part.name in found:
                    raise IntegrityError(
                        f"tensor {part.name!r}: the state holds scales already; "
                        "only weights as trained can be quantised"
                    )
                found[part.name] = part, Origin(number, role)
        if not self.sources:
            raise IntegrityError(
                "no tensor can be quantised: none is a weight of a linear (NAME_proj.weight) "
                "of 2 dimensions in BF16, F16 or F32"
            )
        self.layout = Layout([tensor for tensor, _ in found.values()], cell_words=plain.cell_words)
        self.origins = tuple(found[tensor.name][1] for tensor in self.layout.tensors)
        self.parts: dict[int, dict[Role, int]] = {}
        """Source's number → role → number in ``layout``."""
        for number, origin in enumerate(self.origins):
            self.parts.setdefault(origin.source, {})[origin.role] = number

    @property
    def ignored(self) -> list[str]:
        """Modules with a matrix that is not quantised."""
        kept = (self.plain.tensors[o.source] for o in self.origins if o.role is Role.COPY)
        return [t.name.removesuffix(".weight") for t in kept if len(t.shape) == 2 and t.name.endswith(".weight")]

    def files(self, small: dict[str, bytes]) -> dict[str, bytes]:
        """Return the quantised folder's small files. Raises IntegrityError if the weights are already quantised."""
        config = _parsed(small.get(CONFIG, b"{}"))
        if config.get("quantization_config") is not None:
            raise IntegrityError(f"{CONFIG} has a quantization_config: only weights as trained can be quantised")
        config["quantization_config"] = self.kind.engine_config(self.ignored)
        return {**small, CONFIG: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()}


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{CONFIG} is not JSON ({type(error).__name__})") from None
    if not isinstance(found, dict):
        raise IntegrityError(f"{CONFIG} is not an object")
    return found

"""The model settings with which an engine was started, compared with a version's.

Guarantee: ``differing`` names the settings with which a fresh engine would build a different model from the same
tensors. Both documents pass through the model's own configuration class, so a default, an older spelling, or a number
that JSON turned into a key makes no difference. Training and generation settings, names and dtypes are ignored.
Quantisation is ignored too, because different codes and scales are different tensors.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = "config.json"
_LEFT_OUT = re.compile(
    r"_name_or_path|\w+_version|(torch_)?dtype|use_cache|return_dict|output_(attentions|hidden_states|router_logits)"
    r"|router_aux_loss_coef|initializer_range|\w+_(dropout|pdrop)|gradient_checkpointing|_?attn_implementation"
    r"|(bos|eos|pad)_token_id|id2label|label2id|quantization_config|auto_map"
)
"""Names of settings that do not change the model, or whose effect its tensors show."""
_ABSENT = object()


class StartedSettings:
    """``kind``: the model's configuration class from transformers. ``model``: the folder or name from which the engine
    was started; it is read at once, because a later version may replace the folder's file.
    """

    def __init__(self, kind: type, model: str, log: logging.Logger) -> None:
        self._kind = kind
        self._document: Any = None
        try:
            from transformers.utils import cached_file

            self._document = json.loads(Path(cached_file(model, FILE, local_files_only=True)).read_text("utf-8"))
        except Exception as error:  # noqa: BLE001 - transformers raises its own errors
            log.warning(
                "p2pcast: %s of %s cannot be read, so versions' are not compared with it: %s", FILE, model, error
            )

    def differing(self, config: bytes) -> list[str]:
        """Names of the settings in a version's ``config.json`` that differ, or the file's name if it is not JSON."""
        if self._document is None:
            return []
        try:
            document = json.loads(config)
            ours, theirs = (dict(_leaves(self._read(d))) for d in (self._document, document))
        except (AttributeError, ValueError, RecursionError):
            return [FILE]
        return sorted(k for k in ours.keys() | theirs.keys() if ours.get(k, _ABSENT) != theirs.get(k, _ABSENT))

    def _read(self, document: Any) -> Any:
        """Return all settings as JSON values. Raises AttributeError for a document that is not a map."""
        model_type = document.get("model_type")
        try:
            found = self._kind.from_dict(copy.deepcopy(document)).to_dict()  # type: ignore[attr-defined]
        except Exception:  # noqa: BLE001 - models' own code; the documents are then compared as they are
            found = document
        return json.loads(json.dumps({**found, "model_type": model_type}, default=str))


def _leaves(settings: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each setting that is compared."""
    for name, value in settings.items():
        if _LEFT_OUT.fullmatch(name) or value is None:
            continue
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield path + name, value

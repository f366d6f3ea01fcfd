"""Configurations of adapters, as a version's small files hold them."""

from __future__ import annotations

import pytest

from p2pcast.checkpoint.adapter_form import configs_of
from p2pcast.ground.errors import IntegrityError


def test_configurations_are_found_by_adapter() -> None:
    files = {"a/adapter_config.json": b'{"r": 4, "lora_alpha": 0.5}', "adapter_config.json": b'{"r": 2}'}
    assert configs_of(["a", ""], files) == {"a": {"r": 4, "lora_alpha": 0.5}, "": {"r": 2}}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (None, "the version has no a/adapter_config.json"),
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b'{"r": 4, "lora_alpha": NaN}', "a number that is not finite"),
        (b'{"r": 4, "lora_alpha": -Infinity}', "a number that is not finite"),
        (b'{"r": 4, "lora_alpha": 1e400}', "a number that is not finite"),
    ],
)
def test_unusable_configurations_are_refused(contents: bytes | None, message: str) -> None:
    files = {} if contents is None else {"a/adapter_config.json": contents}
    with pytest.raises(IntegrityError, match=message):
        configs_of(["a"], files)

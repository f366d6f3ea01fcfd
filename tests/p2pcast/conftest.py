"""Checkpoint folders made byte by byte, without the code under test; certificates for tests over TLS."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from p2pcast.trust.certificate_authority import Authority
from p2pcast.trust.certificates import new_key
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.dial_permissions import Certified
from p2pcast.trust.tls_contexts import Tls

Tensors = Mapping[str, tuple[str, list[int], bytes]]
MakeCheckpoint = Callable[..., Path]


def _safetensors(tensors: Tensors, pad: int) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, contents) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(contents)]}
        data += contents
    text = json.dumps(header).encode()
    text += b" " * ((pad - len(text)) % 8)
    return len(text).to_bytes(8, "little") + text + data


def _make(
    folder: Path, tensors: Tensors, files: Mapping[str, bytes] | None = None, *, pad: int = 0, shards: int = 1
) -> Path:
    """A folder of ``tensors`` (name → dtype, shape, bytes). ``pad`` 1…7 misaligns the data section."""
    folder.mkdir(parents=True)
    if shards == 1:
        (folder / "model.safetensors").write_bytes(_safetensors(tensors, pad))
    else:
        weight_map = {}
        for k in range(shards):
            part = {n: t for i, (n, t) in enumerate(tensors.items()) if i % shards == k}
            name = f"model-{k + 1:05}-of-{shards:05}.safetensors"
            (folder / name).write_bytes(_safetensors(part, pad))
            weight_map |= dict.fromkeys(part, name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for path, contents in (files or {}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(contents)
    return folder


@pytest.fixture(scope="session")
def make_checkpoint() -> MakeCheckpoint:
    return _make


class Papers:
    """A run's authority, and certificates of it for whomever a test wants."""

    run = bytes(16)

    def __init__(self) -> None:
        self.authority = Authority.create(self.run, time.time())

    def credentials(
        self, node: bytes, role: str = "peer", *, lifetime_s: float = 3600.0, at: float | None = None
    ) -> Credentials:
        key, who, now = new_key(), Certified(self.run, node, role), time.time() if at is None else at
        return Credentials(
            key, self.authority.issue(key.public_key(), who, now, lifetime_s), self.authority.certificate, now
        )

    def tls(self, node: bytes, role: str = "peer", **options: float) -> Tls:
        return Tls(self.credentials(node, role, **options), strangers=role == "hub")


@pytest.fixture(scope="session")
def papers() -> Papers:
    return Papers()

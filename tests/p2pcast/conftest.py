"""Checkpoint folders made byte by byte, without the code under test; a certificate for tests over TLS."""

from __future__ import annotations

import datetime
import ipaddress
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

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


def _make(folder: Path, tensors: Tensors, files: Mapping[str, bytes] | None = None, *, pad: int = 0, shards: int = 1) -> Path:
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


@pytest.fixture(scope="session")
def certificates(tmp_path_factory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key, as files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "p2pcast test")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "cert.pem", folder / "key.pem"

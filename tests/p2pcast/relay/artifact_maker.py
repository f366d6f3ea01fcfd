"""Signed artifacts with random payloads, made by the real packer."""

from __future__ import annotations

import random
from typing import NamedTuple

import blake3

from p2pcast.artifact import Assembly, Open, Packer, RunKey, run_id
from p2pcast.artifact.piece_set import PieceSet
from p2pcast.artifact.signed_records import OWN
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.version import Version
from p2pcast.relay.verified_pieces import VerifiedPieces

KEY = RunKey(bytes([9]) * 32)
LAYOUT = Layout([Tensor("w", "BF16", (64, 65536))], cell_words=65536)
"""64 cells of 128 KiB."""


class Made(NamedTuple):
    open: bytes
    batches: list[bytes]
    manifest: bytes
    log: bytes
    id: bytes
    durable: bytes = b""

    def pieces(self, size: int) -> list[bytes]:
        return [self.log[at : at + size] for at in range(0, len(self.log), size)]


class Maker:
    key = KEY
    layout = LAYOUT

    @staticmethod
    def make(
        sizes: list[int],
        *,
        step: int = 1,
        piece: int = 65536,
        seed: int = 0,
        kind: str = "delta",
        files: int = 0,
        version_hash: bytes | None = None,
    ) -> Made:
        """``sizes``: of the cells' payloads, in bytes. Batches are taken once full. ``version_hash``: OWN
        for a delta that seals its version.
        """
        draw = random.Random(f"{seed} {step} {sizes}")
        base = Version(0, step - 1) if kind == "delta" else None
        record = Open(draw.randbytes(16), base, kind, LAYOUT.layout_id, piece, run_id(KEY.public), Version(0, step))
        packer = Packer(KEY, record, LAYOUT)
        log, batches, state = b"", [], 0
        for cell, size in enumerate(sizes):
            payload = draw.randbytes(size)
            log += payload
            after = draw.getrandbits(64)
            state += after
            packer.add_cell(cell, 1 if kind == "anchor" else 3, payload, 0 if kind == "anchor" else 1, after)
            while (batch := packer.take_batch()) is not None:
                batches.append(batch)
        for n in range(files):
            contents = draw.randbytes(100 * n)
            packer.add_file(f"f{n}.json", contents, len(contents), blake3.blake3(contents).digest())
            log += contents
        *rest, manifest = packer.seal(state % 2**64, version_hash=version_hash)
        durable = packer.durable() if version_hash == OWN else b""
        return Made(packer.open_signed, batches + rest, manifest, log, record.artifact, durable)

    @classmethod
    def anchor(cls, *, step: int = 0, files: int = 3) -> Made:
        return cls.make([c.nbytes for c in LAYOUT.cells], step=step, piece=1 << 20, kind="anchor", files=files)

    @staticmethod
    def artifact(
        made: Made, *, batches: int | None = None, held: int | None = None, sealed: bool = True
    ) -> VerifiedPieces:
        """As a node knows it after ``batches`` batches (all) and the first ``held`` pieces (all)."""
        assembly = Assembly(made.open, KEY.public, LAYOUT)
        for batch in made.batches[:batches]:
            assembly.add_batch(batch)
        if sealed:
            assembly.add_manifest(made.manifest)
        return VerifiedPieces(assembly, PieceSet(assembly.linked_pieces if held is None else held))

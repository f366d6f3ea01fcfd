"""trust.json written row by row equals the whole written at once."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from p2pcast.trust.token_register import TokenRegister
from trainer_node.admission.trust_files import read_ledger
from trainer_node.admission.trust_state import write_document


def test_every_row_comes_back_and_none_is_there_where_none_was(tmp_path: Path) -> None:
    path, ledger = tmp_path / "trust.json", TokenRegister()
    for count in range(3):
        write_document(path, ledger.document)
        assert json.loads(path.read_text()) == ledger.document
        assert read_ledger(path, frozenset()).document == ledger.document
        ledger.grant(bytes([count]) * 20, "peer", 1.0, uses=2)
        ledger.adopt(bytes([count]) * 16, "print", f'n"\\{count}', 1.0, 2.0)
        ledger.came_with(bytes([count]) * 16, bytes.fromhex(next(iter(ledger.tokens))))


def test_a_document_shares_nothing_with_its_ledger() -> None:
    ledger = TokenRegister()
    ident = ledger.grant(bytes(20), "peer", 1.0)
    ledger.adopt(bytes(16), "print", "a", 1.0, 2.0)
    document = ledger.document
    before = json.dumps(document)
    ledger.came_with(bytes(16), bytes.fromhex(ident))
    assert document["tokens"] == {i: asdict(g) for i, g in ledger.tokens.items()}
    assert json.dumps(document) == before

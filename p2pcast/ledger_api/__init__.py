"""Clients of a ledger: its connection, batches, audits, probes and the trainer's certificate."""

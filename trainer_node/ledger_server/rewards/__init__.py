"""Rewards of results: checked at the ledger, in turns of the callers, or replayed for a sample."""

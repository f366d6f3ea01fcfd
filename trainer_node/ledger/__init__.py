"""The ledger: which rollouts are wanted, leased, accepted and trained."""

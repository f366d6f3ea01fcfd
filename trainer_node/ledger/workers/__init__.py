"""The ledger's workers: their registrations."""

"""The ledger as a daemon: its HTTP API, its waiting workers, and what it learns from the hub."""

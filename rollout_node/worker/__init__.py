"""The worker: leases jobs from the ledger, plays them with the engine next to it, and hands in the results."""

"""The worker: leases jobs from the ledger, plays them with an engine beside it, and hands in the results."""

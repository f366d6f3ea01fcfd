"""Probes at the ledger: workers' scores of the learner's probe set, on their way to the learner."""

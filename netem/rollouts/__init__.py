"""The rollout plane in simulation: workers, learner and broadcasts around the ledger's own decisions."""

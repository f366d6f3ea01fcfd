"""The learner: trains on rollouts of the ledger, and publishes the new weights."""

"""Records that workers, the ledger and the learner exchange: jobs, groups and results, and their encoding."""

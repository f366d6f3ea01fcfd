"""Records that workers, ledger and learner exchange: jobs, groups, trajectories and results, and their bytes."""

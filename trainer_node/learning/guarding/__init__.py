"""The guard of sparse attention in a learner: acceptance rates, and the schedule that versions carry."""

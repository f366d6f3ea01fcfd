"""Commands of the rollout plane."""

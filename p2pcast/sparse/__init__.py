"""Rollouts by sparse attention: how far they are from dense ones, the budget by position, and the cost."""

"""Benches of sparse attention on models that they train: budgets by length, the guard, and the adapter of rollouts."""

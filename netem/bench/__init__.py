"""Benchmarks whose figures are ratios, measured side by side in one run on real data."""

"""``make bench``: measures this installation beside its rivals and its bars, part by part, and writes
docs/benchmarks.md.
"""

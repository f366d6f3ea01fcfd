"""``make bench``: what this installation does beside its rivals and its bars, measured part by part, and written up in docs/benchmarks.md."""

"""A peer's work for each engine: staging, commits, engines that span several hosts."""

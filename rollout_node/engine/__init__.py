"""What a peer does for each engine: staging, commits, and engines that span several hosts."""

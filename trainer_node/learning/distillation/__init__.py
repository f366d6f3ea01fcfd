"""DistillSparse: an adapter for rollouts alone, which makes sparse attention's distribution nearer to the policy's."""

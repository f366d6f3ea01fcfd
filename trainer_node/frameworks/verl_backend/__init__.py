"""p2pcast as verl's checkpoint engine, and its rollouts from a ledger."""

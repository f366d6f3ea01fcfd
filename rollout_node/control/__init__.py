"""A peer's connection to the hub: session, dispatch of the hub's messages, reports and certificate."""

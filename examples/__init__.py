"""Examples of p2pcast, and trials of methods of training in `research`."""

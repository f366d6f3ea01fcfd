"""One process of p2pcast: its event loop, background tasks, log, events, metrics and shortages."""

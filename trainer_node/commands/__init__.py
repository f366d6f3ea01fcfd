"""Commands of the trainer's side. ``p2pcast.cli`` lists them, and imports each only when it runs."""

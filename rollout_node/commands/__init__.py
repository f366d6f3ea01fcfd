"""Commands of a rollout machine. ``p2pcast.cli`` lists them, and imports one when it is run."""

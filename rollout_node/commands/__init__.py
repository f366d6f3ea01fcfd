"""Commands of a rollout machine. ``p2pcast.cli`` names them, and imports one when it runs."""

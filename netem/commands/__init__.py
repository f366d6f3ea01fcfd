"""Commands of experiments. ``p2pcast.cli`` names them, and imports one when it runs."""

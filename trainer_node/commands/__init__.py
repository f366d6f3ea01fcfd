"""Commands of the trainer's side. ``p2pcast.cli`` names them, and imports one when it runs."""

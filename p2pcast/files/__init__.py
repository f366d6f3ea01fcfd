"""Files on disk: written whole or not at all, private, appended to, and the room that is left."""

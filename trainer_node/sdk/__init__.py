"""``Publisher`` and its parts: they run inside a training process."""

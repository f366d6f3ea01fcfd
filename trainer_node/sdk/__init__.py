"""``Publisher`` and its parts, which run inside a training process."""

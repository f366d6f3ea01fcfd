"""A peer's state: the shadow, the patches against it, and the staging of deltas into both."""

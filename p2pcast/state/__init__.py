"""A peer's state: the shadow, patches against it, and the staging of deltas."""

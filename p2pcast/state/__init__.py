"""The state that a peer holds: the shadow, the patches against it, and the staging of deltas into both."""

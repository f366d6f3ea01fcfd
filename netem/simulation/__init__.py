"""The hub's decisions about simulated fleets."""

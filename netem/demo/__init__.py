"""The demo: a real trainer, a hub, peers and engines on one machine."""

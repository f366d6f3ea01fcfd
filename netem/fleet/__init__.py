"""A hub and peers as processes of this machine, and measurements of processes."""

"""Benches that train with sparse attention: its guard, and the adapter that makes it nearer to dense."""

"""Trials of methods of training, which no user of p2pcast needs: ``python -m examples.research.TRIAL``."""

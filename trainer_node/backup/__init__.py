"""Backups of a run: the state folders of hub and ledger, each as of one moment, copied while both run."""

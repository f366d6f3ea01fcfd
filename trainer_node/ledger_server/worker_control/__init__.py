"""Workers at the ledger's server: orders about them, the regions of their engines, and their part of the summary."""

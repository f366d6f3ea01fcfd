"""Installers bring a staged version into an engine: ``installer`` has the interface, the others serve one kind each."""

from rollout_node.installers.installer import Audit, CommitReport, Installer

__all__ = ["Audit", "CommitReport", "Installer"]

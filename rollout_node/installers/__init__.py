"""Installers bring a staged version into an engine. ``installer`` is the interface; each other one serves one kind."""

from rollout_node.installers.installer import Audit, CommitReport, Installer

__all__ = ["Audit", "CommitReport", "Installer"]

"""Installers bring a staged version into whatever uses the weights: ``base`` has the interface, one module each the rest."""

from rollout_node.installers.base import Audit, CommitReport, Installer

__all__ = ["Audit", "CommitReport", "Installer"]

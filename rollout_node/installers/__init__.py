"""Installers bring a staged version into whatever uses the weights: ``base`` has the interface, one module each the rest."""

from rollout_node.installers.base import CommitReport, Installer

__all__ = ["CommitReport", "Installer"]

"""Defences of manifests and units: docs/design/security.md, section Deployed daemons."""

from __future__ import annotations

from mutation import Mutation

PODS = "tests/deploy/test_kubernetes.py::"
BASE = "deploy/kubernetes/base/"

DEPLOYED = [
    Mutation(
        "connects to a daemon or an engine",
        BASE + "network.yaml",
        "        - podSelector: {matchLabels: {p2pcast/node: trainer}}",
        "        - namespaceSelector: {}",
        PODS + "test_network_admits_strangers_nowhere",
    ),
    Mutation(
        "becomes root, writes to the image",
        BASE + "rollout.yaml",
        "readOnlyRootFilesystem: true",
        "readOnlyRootFilesystem: false",
        PODS + "test_pods_are_restricted",
    ),
    Mutation(
        "calls the cluster's API server",
        BASE + "rollout.yaml",
        "metadata: {name: p2pcast-rollout}\nautomountServiceAccountToken: false",
        "metadata: {name: p2pcast-rollout}\nautomountServiceAccountToken: true",
        PODS + "test_accounts_have_no_token_but_in_the_container_of_the_fleet",
    ),
    Mutation(
        "changes other objects of the cluster",
        "deploy/kubernetes/components/fleet/role.yaml",
        "verbs: [list, patch]",
        "verbs: [list, patch, delete]",
        "tests/deploy/test_fleet_role.py::test_role_admits_the_calls_of_the_provider_and_no_more",
    ),
    Mutation(
        "replaces a state folder",
        BASE + "hub.yaml",
        "{name: state, mountPath: /state, subPath: own}",
        '{name: state, mountPath: /state, subPath: ""}',
        PODS + "test_daemons_get_folders_that_other_users_cannot_change",
    ),
    Mutation(
        "reads a join token",
        "deploy/systemd/p2pcast-peer.service",
        "LoadCredential=token:/etc/p2pcast/peer.token",
        "Environment=P2PCAST_TOKEN=token",
        "tests/deploy/test_systemd.py::test_tokens_are_credentials_and_users_are_not_root",
    ),
]

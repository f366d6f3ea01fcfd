"""NetworkPolicies as Kubernetes reads them: a connection needs the source's egress and the target's ingress.

As far as the manifests of ``deploy/kubernetes`` use them: no address ranges. All pods are in the namespace of the
manifests, except sources of another ``namespace``, whose egress is not asked.
"""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]
Labels = dict[str, str]
OWN = "p2pcast"
NAMESPACE_NAME = "kubernetes.io/metadata.name"


def selects(selector: Document, labels: Labels) -> bool:
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def _is_party(party: Document, labels: Labels, namespace: str) -> bool:
    assert party.keys() <= {"podSelector", "namespaceSelector"}
    where = party.get("namespaceSelector")
    if where is None and namespace != OWN:
        return False
    if where is not None and not selects(where, {NAMESPACE_NAME: namespace}):
        return False
    return selects(party.get("podSelector", {}), labels)


def _passes(rule: Document, side: str, labels: Labels, namespace: str, port: int, named: str) -> bool:
    parties, ports = rule.get(side), rule.get("ports")
    if parties is not None and not any(_is_party(party, labels, namespace) for party in parties):
        return False
    return ports is None or any(p.get("protocol", "TCP") == "TCP" and p["port"] in (port, named) for p in ports)


def admitted(
    documents: tuple[Document, ...], source: Labels, target: Labels, port: int, namespace: str = OWN, named: str = ""
) -> bool:
    """``namespace``: of the source. ``named``: the port's name at the target, if any."""
    policies = [document["spec"] for document in documents if document["kind"] == "NetworkPolicy"]
    into = [p for p in policies if "Ingress" in p["policyTypes"] and selects(p["podSelector"], target)]
    out = [p for p in policies if "Egress" in p["policyTypes"] and selects(p["podSelector"], source)]
    enters = not into or any(
        _passes(rule, "from", source, namespace, port, named) for p in into for rule in p.get("ingress", [])
    )
    leaves = namespace != OWN or not out or any(
        _passes(rule, "to", target, OWN, port, named) for p in out for rule in p.get("egress", [])
    )  # fmt: skip
    return enters and leaves

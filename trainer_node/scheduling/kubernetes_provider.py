"""Runs workers as the pods of a Kubernetes Deployment, one worker per pod, through the official client.

A start raises the Deployment's scale by one, and a stop lowers it by one. The cluster chooses the pod to delete, so the
drained worker's pod is first marked with the lowest deletion cost. A worker has the name of its pod. Writes contain the
resource version that was read, so if another controller changed it (409), the write is retried.

Tests compare requests with the published OpenAPI schema of Kubernetes 1.37. The provider has not been run on a cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from p2pcast.ground.errors import LocalError

T = TypeVar("T")

TIME_LIMIT_S = (5.0, 30.0)
"""Time limits in seconds to connect, and to read a response."""
TRIES = 5
"""Attempts for a write that conflicts with another controller's change."""
CONFLICT = 409
MERGE = "application/merge-patch+json"
JSON = {"Content-Type": "application/json"}
"""The client does not send these headers with a scale."""
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
LOWEST_COST = "-2147483648"
ENDED = ("Succeeded", "Failed")
_OPTIONS: dict[str, Any] = {"_request_timeout": TIME_LIMIT_S}


def configured() -> Any:
    """Return a client that uses the pod's service account or the user's kubeconfig. Raises LocalError."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise LocalError("this provider needs the package kubernetes: pip install 'p2pcast[kubernetes]'") from None
    try:
        config.load_config()
    except config.ConfigException as error:
        raise LocalError(f"Kubernetes is not configured here: {error}") from None
    return client.ApiClient()


class KubernetesProvider:
    changes = True

    def __init__(self, api: Any, namespace: str, deployment: str) -> None:
        """``api``: a `kubernetes.client.ApiClient`."""
        from kubernetes import client

        self._apps, self._core = client.AppsV1Api(api), client.CoreV1Api(api)
        self._namespace, self._deployment = namespace, deployment

    async def running(self) -> Sequence[str]:
        return await self._ask(self._pods)

    async def start(self, name: str) -> None:
        """Start one worker. The cluster names the new pod, so ``name`` is not used."""
        await self._ask(lambda: self._scale(1))

    async def stop(self, name: str) -> None:
        def stop() -> None:
            if name not in self._pods():
                raise LocalError(f"{self._about}: there is no pod {name}")
            mark = {"metadata": {"annotations": {DELETION_COST: LOWEST_COST}}}
            self._core.patch_namespaced_pod(name, self._namespace, mark, **_OPTIONS, _content_type=MERGE)
            self._scale(-1)

        await self._ask(stop)

    @property
    def _about(self) -> str:
        return f"Kubernetes deployment {self._namespace}/{self._deployment}"

    def _pods(self) -> list[str]:
        scale = self._read()
        selector = scale.status.selector if scale.status is not None else None
        if not selector:
            raise LocalError(f"{self._about} has no selector for its pods")
        found = self._core.list_namespaced_pod(self._namespace, label_selector=selector, **_OPTIONS)
        return [pod.metadata.name for pod in found.items if _lives(pod)]

    def _read(self) -> Any:
        return self._apps.read_namespaced_deployment_scale(self._deployment, self._namespace, **_OPTIONS)

    def _scale(self, by: int) -> None:
        from kubernetes.client.exceptions import ApiException

        for attempt in range(TRIES):
            scale = self._read()
            if scale.spec is None:
                raise LocalError(f"{self._about} has no scale")
            scale.spec.replicas = max(0, (scale.spec.replicas or 0) + by)
            try:
                self._apps.replace_namespaced_deployment_scale(
                    self._deployment, self._namespace, scale, **_OPTIONS, _headers=JSON
                )  # fmt: skip
            except ApiException as error:
                if error.status != CONFLICT or attempt == TRIES - 1:
                    raise
            else:
                return

    async def _ask(self, question: Callable[[], T]) -> T:
        """Ask the cluster in a thread. Raises LocalError."""
        from kubernetes.client.exceptions import ApiException, OpenApiException
        from urllib3.exceptions import HTTPError

        try:
            return await asyncio.to_thread(question)
        except ApiException as error:
            raise LocalError(f"{self._about}: the cluster answers {error.status} {error.reason}") from None
        except OpenApiException as error:
            raise LocalError(f"{self._about}: {error}") from None
        except HTTPError as error:
            raise LocalError(f"{self._about}: the cluster cannot be reached: {error}") from None


def _lives(pod: Any) -> bool:
    ended = pod.status is not None and pod.status.phase in ENDED
    return not ended and pod.metadata.deletion_timestamp is None

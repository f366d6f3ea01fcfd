"""CPUs as a platform of verl, through verl's own registry; verl 0.9.1 brings platforms of accelerators alone.

VERL_USE_EXTERNAL_MODULES=cpu_platform VERL_PLATFORM=cpu
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.utils import distributed


class CpuModule(ModuleType):
    """``torch.cpu`` with what verl asks of ``torch.cuda`` beyond that; all of it does nothing, or finds no memory."""

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        if name.startswith(("max_memory", "memory_")):
            return lambda *arguments: 0
        if name == "mem_get_info":
            return lambda *arguments: (0, 0)
        if name in ("empty_cache", "ipc_collect", "manual_seed", "manual_seed_all", "reset_peak_memory_stats"):
            return lambda *arguments: None
        if name == "get_device_name":
            return lambda *arguments: "cpu"
        raise AttributeError(name)


def initialise_group(timeout_second: int | None = None, backend: str | None = None) -> None:
    """In place of verl's function, which asks for one backend on CPUs and another on the accelerator."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("cpu:gloo", init_method=os.environ.get("DIST_INIT_METHOD"))


distributed.initialize_global_process_group_ray = initialise_group


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = CpuModule("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: Any) -> None:
        pass

    def synchronize(self, device_index: Any = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        """verl counts this resource; ``ray.init(num_gpus=…)`` states it for a machine without GPUs."""
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None

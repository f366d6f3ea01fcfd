"""p2pcast inside SGLang: a hook in each rank's scheduler that switches the running model to a version in O(changed).

Start the server like this (the peer's ``join --install sglang:URL`` prints the socket's path):

    P2PCAST_SOCK=/run/p2pcast/install.sock python -m sglang.launch_server --model-path MODEL --host 127.0.0.1

SGLang finds the plugin through its entry point (group ``sglang.srt.plugins``). Without ``P2PCAST_SOCK``, it does
nothing. A program with access to SGLang's admin routes can order a switch, but cannot choose the weights, which come
only from the socket. Bind to loopback.

The schedulers' label, which gives each token's version, is ``none`` or the version that the rank holds. So a server
that has just started reports ``none``, whatever ``--weight-version`` is.

SGLang imports this package in each of its processes. Expensive modules are imported only in the scheduler, with the
first command.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from p2pcast.ground.version import NO_VERSION
from rollout_node.sglang_plugin import drain

SOCKET_VARIABLE = "P2PCAST_SOCK"
PREFIX = "p2pcast "
"""Prefix of the ``action`` of a ``/weights_checker`` request that is a peer's command; a JSON object follows."""
_CHECK = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.check_weights"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_FRONT_END = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


def register() -> None:
    """Register the hooks. SGLang calls this in each of its processes, before it loads a model."""
    if not os.environ.get(SOCKET_VARIABLE):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_CHECK, check_weights, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.get_new_batch_prefill", drain.next_prefill, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.continue_generation", drain.resume, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.record_weight_version_change", label, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.__init__", unlabelled_scheduler, HookType.AROUND)
    HookRegistry.register(f"{_FRONT_END}.__init__", unlabelled_front_end, HookType.AROUND)


def unlabelled_scheduler(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    original(scheduler, *args, **kwargs)
    scheduler.record_weight_version_change(NO_VERSION)


def unlabelled_front_end(original: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    original(manager, *args, **kwargs)
    manager.record_config_updates("tokenizer.weight_version", weight_version=NO_VERSION)


def label(original: Any, scheduler: Any, new_version: str | None) -> None:
    """Set the label in a scheduler, if it is ``none`` or the version that its rank holds."""
    commands = sys.modules.get(f"{__name__}.scheduler_commands")
    if new_version is None or new_version in (NO_VERSION, commands.held() if commands else None):
        original(scheduler, new_version)


def check_weights(original: Any, updater: Any, request: Any) -> Any:
    """Run a command or SGLang's own check; called in every rank's scheduler between two batches."""
    if not request.action.startswith(PREFIX):
        return original(updater, request)
    from rollout_node.sglang_plugin import scheduler_commands

    return scheduler_commands.answer(updater, request.action.removeprefix(PREFIX))

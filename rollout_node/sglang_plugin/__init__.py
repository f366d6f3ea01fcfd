"""p2pcast inside SGLang: a hook in each rank's scheduler switches the running model to a version in O(changed).

Start the server like this (the peer's ``join --install sglang:URL`` prints the socket's path):

    P2PCAST_SOCK=/run/p2pcast/install.sock python -m sglang.launch_server --model-path MODEL --host 127.0.0.1

SGLang finds the plugin by its entry point (group ``sglang.srt.plugins``). Without ``P2PCAST_SOCK`` the plugin does
nothing. A program that may use SGLang's admin routes can order a switch, but not choose the weights: these come from
the socket alone. Bind to loopback.

The schedulers' label, which names the version of each token, is ``none`` or the version that the rank holds. So a
server that has just started says ``none``, whatever ``--weight-version`` says.

SGLang imports this package in each of its processes. Everything heavy is imported in the scheduler, with the first
command.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from p2pcast.ground.version import NO_VERSION
from rollout_node.sglang_plugin import drain

SOCKET_VARIABLE = "P2PCAST_SOCK"
PREFIX = "p2pcast "
"""Begins the ``action`` of a request to ``/weights_checker`` that is a command of a peer; a JSON object follows."""
_CHECK = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.check_weights"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_FRONT_END = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


def register() -> None:
    """Register the hooks. SGLang calls this in each of its processes, before a model is loaded."""
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
    """In a scheduler: another label than the version that its rank holds has no effect."""
    commands = sys.modules.get(f"{__name__}.scheduler_commands")
    if new_version is None or new_version in (NO_VERSION, commands.held() if commands else None):
        original(scheduler, new_version)


def check_weights(original: Any, updater: Any, request: Any) -> Any:
    """In a scheduler, between two batches, on every rank: a command, or SGLang's own check."""
    if not request.action.startswith(PREFIX):
        return original(updater, request)
    from rollout_node.sglang_plugin import scheduler_commands

    return scheduler_commands.answer(updater, request.action.removeprefix(PREFIX))

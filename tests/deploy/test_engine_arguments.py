"""The arguments of the vLLM servers in the manifests, read by vLLM's own parser."""

from __future__ import annotations

import pytest

from tests.deploy.kubernetes_files import OVERLAYS, overlay, pods, words

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of vLLM's imports
]


@pytest.mark.parametrize("name", OVERLAYS)
def test_arguments_are_read_by_vllm(name: str) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    servers = [c for found in pods(overlay(name)) for c in found.containers if c["name"] == "vllm"]
    assert servers
    for container in servers:
        assert container["command"][:2] == ["vllm", "serve"]
        read = make_arg_parser(FlexibleArgumentParser()).parse_args([*container["command"][2:], *words(container)])
        assert read.model_tag == "/models/model"
        assert read.weight_transfer_config.backend == "p2pcast"
        assert read.headless or (read.host, read.port) == ("127.0.0.1", 8000), "the weight routes ask for no key"

"""vLLM's own loader, by which prime-rl's servers load folders, reads those that a peer writes, in each form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from p2pcast.checkpoint.folder_form import MARKERS, FolderForm, MarkerStyle, StepNames
from p2pcast.ground.version import Version
from rollout_node.installers.checkpoint_folder import FolderInstaller

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.mark.parametrize("style", MARKERS)
async def test_the_loader_of_vllm_reads_each_form(tmp_path: Path, style: MarkerStyle) -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    shadow = tmp_path / "shadow"
    draw = torch.Generator().manual_seed(7)
    state = {f"layer.{n}": torch.randn(3, n + 1, generator=draw).to(torch.bfloat16) for n in range(4)}
    save_file(state, shadow)
    form = FolderForm(StepNames.parse("weight_v{step:06}"), MARKERS[style])
    installer = FolderInstaller(tmp_path / "out", lambda _: {"config.json": b"{}"}, keep=1, form=form)
    await installer.start()
    await installer.stage(Version(0, 7), shadow)
    await installer.commit(Version(0, 7))
    folder = tmp_path / "out" / "weight_v000007"
    loader = DefaultModelLoader(LoadConfig())
    source = DefaultModelLoader.Source(str(folder), revision=None)
    found = dict(loader._get_weights_iterator(source))
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert load_file(folder / "model.safetensors").keys() == state.keys()
    await installer.close()

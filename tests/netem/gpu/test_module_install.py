"""Versions into a torch model without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from netem.gpu import module_install
from netem.gpu.module_install import Blocks, bench_module_install, layout_of
from p2pcast.ground.errors import IntegrityError
from tests.support.tensor_device import DEVICE

pytestmark = pytest.mark.device
HIDDEN = 64


def test_every_version_is_installed_and_compared(tmp_path: Path) -> None:
    found = bench_module_install(tmp_path, 14 * 2 * HIDDEN * HIDDEN, 3, hidden=HIDDEN, device=str(DEVICE))
    assert found["state_bytes"] == layout_of(2, HIDDEN).nbytes
    assert found["versions"] == 3
    assert found["values"] > 0
    assert 0 < found["pause_p50_s"] <= found["pause_p99_s"]
    assert found["cuda_graph"] == (torch.device(DEVICE).type == "cuda")


def test_a_weight_of_another_version_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(module_install.Installation):
        def commit(self, version):
            mark = super().commit(version)
            if version.step == 2:
                self._model.blocks[0].get_parameter("o").data[3, 5] += 1
            return mark

    monkeypatch.setattr(module_install, "Installation", Forgetful)
    with pytest.raises(IntegrityError, match=r"0\.2: parameter blocks\.0\.o is not that of a freshly loaded model"):
        bench_module_install(tmp_path, 1, 3, hidden=HIDDEN, device=str(DEVICE))


def test_a_forward_pass_with_old_weights_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(model: Blocks, device: torch.device):
        return (lambda: torch.zeros(module_install.ROWS, HIDDEN, dtype=torch.bfloat16, device=device)), False

    monkeypatch.setattr(module_install, "_forward", stale)
    with pytest.raises(IntegrityError, match=r"0\.0: the forward pass computes with weights of another version"):
        bench_module_install(tmp_path, 1, 1, hidden=HIDDEN, device=str(DEVICE))

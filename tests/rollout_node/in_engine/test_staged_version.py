"""A version beside a running model: staging writes nothing, apply and restore are exact."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from p2pcast.codec.digest import digest
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version
from rollout_node.in_engine.installation import install_dense
from rollout_node.in_engine.loader_recording import Storages
from rollout_node.in_engine.staged_version import stage
from rollout_node.in_engine.weight_mapping import Mapping, StridedBlock
from tests.support.tensor_device import DEVICE

pytestmark = pytest.mark.device

LAYOUT = Layout([Tensor("w", "BF16", (4, 8))])
(CELL,) = LAYOUT.cells
OLD = np.arange(32, dtype=np.uint16)
V = Version


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.from_numpy(OLD.view(np.int16).copy()).view(torch.bfloat16))
        self.loaded: list[str] = []

    @property
    def words(self) -> list[int]:
        return self.weight.view(torch.int16).tolist()

    def load_weights(self, weights: Any) -> None:
        self.loaded += [name for name, _ in weights]


@pytest.fixture
def model() -> Model:
    return Model().to(DEVICE)


@pytest.fixture
def storages(model: Model) -> Storages:
    made = Storages(model)
    made.number(model.weight.data)
    return made


def mapping(*, reload: tuple[int, ...] = ()) -> Mapping:
    blocks = {} if reload else {0: (StridedBlock.of(0, (32,), (1,), 0, 0, (1,)),)}
    return Mapping(blocks, dict.fromkeys(reload, "by a test"))


def patch(base: np.ndarray[Any, Any], step: int, changes: dict[int, int]) -> Any:
    """A patch from ``base`` (its words) that sets words at positions."""
    new = base.copy()
    positions = np.array(sorted(changes), np.uint32)
    new[positions] = [changes[p] for p in sorted(changes)]
    change = SimpleNamespace(
        cell=0, positions=positions, words=new[positions], before=digest(base, CELL), after=digest(new, CELL)
    )
    return SimpleNamespace(cells=[change], base=V(0, step - 1)), new


def test_staging_writes_nothing_and_apply_writes_the_new_values(model: Model, storages: Storages) -> None:
    one, new = patch(OLD, 1, {3: 100, 30: 200})
    staged = stage([one], LAYOUT, mapping(), storages)
    assert model.words == OLD.tolist()
    at = model.weight.data_ptr()
    assert staged.apply(storages) == staged.mark
    assert model.words == new.tolist()
    assert model.weight.data_ptr() == at


def test_restore_undoes_every_bit_of_a_chain(model: Model, storages: Storages) -> None:
    one, middle = patch(OLD, 1, {3: 100, 4: 101})
    two, new = patch(middle, 2, {3: 7})
    staged = stage([one, two], LAYOUT, mapping(), storages)
    staged.apply(storages)
    assert model.words == new.tolist()
    assert staged.restore(storages)
    assert model.words == OLD.tolist()
    assert staged.restore(storages), "a second call has nothing to restore"


def test_other_live_values_than_the_bases_are_refused(model: Model, storages: Storages) -> None:
    one, _ = patch(OLD + np.uint16(1), 1, {3: 100})
    with pytest.raises(IntegrityError, match=r"not those of 0\.0"):
        stage([one], LAYOUT, mapping(), storages)


def test_a_tensor_that_the_loader_transforms_is_left_to_the_loader(model: Model, storages: Storages) -> None:
    one, _ = patch(OLD, 1, {3: 100})
    staged = stage([one], LAYOUT, mapping(reload=(0,)), storages)
    assert (staged.reload, staged.values) == ({0}, 0)


class Shadow:
    def words(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.arange(100, 132, dtype=torch.int16).view(dtype)

    def tensor(self, number: int) -> torch.Tensor:
        return self.words(number, torch.int16)


def test_a_dense_install_copies_into_the_existing_storage(model: Model, storages: Storages) -> None:
    at = model.weight.data_ptr()
    install_dense(Shadow(), LAYOUT, mapping(), storages, model)  # type: ignore[arg-type]
    assert model.words == list(range(100, 132))
    assert (model.weight.data_ptr(), model.loaded) == (at, [])


def test_a_dense_install_gives_transformed_tensors_to_the_loader(model: Model, storages: Storages) -> None:
    install_dense(Shadow(), LAYOUT, mapping(reload=(0,)), storages, model)  # type: ignore[arg-type]
    assert model.loaded == ["w"]
    assert model.words == OLD.tolist()

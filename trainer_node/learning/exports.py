"""The learner's weights as Hugging Face folders, for transformers, vLLM and everything else that loads such folders.

    FOLDER/EPOCH-STEP/    model.safetensors          the words that are published, under the names of the model's folder
                          config.json, tokenizer …   the small files of the model's folder
                          generation_config.json     the folder's, or the one that transformers derives from its model

Guarantees: a folder appears under its name only when every byte of it is durable; learners of two epochs never write
the same folder. A step whose learner died between its checkpoint and its export is exported by the next learner.
Several ranks gather one tensor at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from p2pcast.checkpoint.folder import Checkpoint, write_folder
from p2pcast.checkpoint.safetensors_file import WORD_DTYPES
from p2pcast.codec.layout import Cell, Layout, Tensor
from p2pcast.files.atomic_files import explained
from p2pcast.files.disk import USERS
from p2pcast.ground.errors import LocalError, P2PCastError
from trainer_node.learning.checkpoints import prune
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.trainer_ranks import TrainerRanks
from trainer_node.sdk.tensors import DTYPES

GENERATION = "generation_config.json"


@dataclass(frozen=True, slots=True)
class Export:
    """``nbytes``: of its weights."""

    folder: Path
    nbytes: int


class Exports:
    """``every``: learner steps from one export to the next. ``keep``: exports kept. All ranks call alike."""

    def __init__(self, folder: Path, model: LearnerModel, ranks: TrainerRanks, *, every: int, keep: int) -> None:
        self._folder, self._model, self._ranks = folder, model, ranks
        self._every, self._keep = every, keep
        self._newest: int | None = None

    def due(self, step: int, *, last: bool = False) -> bool:
        """Whether to export ``step`` now. ``last``: whether the run has ended."""
        return step != self._newest and (last or step % self._every == 0)

    def owed(self, step: int) -> bool:
        """Whether ``step`` had to be exported by a learner that died before."""
        held = self._ranks.share(any(self._folder.glob(f"*-{step:09d}")))
        return step % self._every == 0 and not held

    def write(self, epoch: int, step: int) -> Export:
        """Raises LocalError on every rank if the folder cannot be written; then it has not appeared."""
        final = self._folder / f"{epoch:06d}-{step:09d}"
        tensors = {name: tensor.detach() for name, tensor in self._model.stored.items()}
        published = self._model.stored_dtypes
        layout = Layout(Tensor(name, DTYPES[published[name]], tuple(t.shape)) for name, t in tensors.items())
        whole = _Whole(layout, tensors, published)
        error: str | None = None
        if self._ranks.first:
            try:
                with explained("replace", final):
                    if final.exists():
                        shutil.rmtree(final)  # of this epoch: a branch that the hub left
                write_folder(final, layout, whole.words, self._small_files(), modes=USERS)
                prune(self._folder, self._keep)
            except P2PCastError as failed:
                error = str(failed)
        whole.finish()
        if (failure := self._ranks.share(error)) is not None:
            raise LocalError(failure)
        self._newest = step
        return Export(final, layout.nbytes)

    def _small_files(self) -> dict[str, bytes]:
        files = Checkpoint.open(self._model.folder).small_files()
        generation = getattr(self._model.module, "generation_config", None)
        if GENERATION not in files and generation is not None:
            files[GENERATION] = generation.to_json_string().encode()
        return files


class _Whole:
    """Words of whole tensors on the CPU, gathered in the layout's order: each rank gathers each tensor once, whether or
    not the first rank could write it.
    """

    def __init__(
        self, layout: Layout, tensors: Mapping[str, torch.Tensor], published: Mapping[str, torch.dtype]
    ) -> None:
        self._layout, self._tensors, self._published = layout, tensors, published
        self._next = 0
        self._words: npt.NDArray[Any] | None = None

    def words(self, cell: Cell) -> npt.NDArray[Any]:
        """Cells come in their order."""
        while self._next <= cell.tensor:
            self._words = self._gathered()
        assert self._words is not None
        return self._words[cell.start : cell.start + cell.words]

    def finish(self) -> None:
        while self._next < len(self._layout.tensors):
            self._gathered()

    def _gathered(self) -> npt.NDArray[Any]:
        known = self._layout.tensors[self._next]
        tensor = self._tensors[known.name]
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        self._next += 1
        exact = tensor.to("cpu", self._published[known.name]).contiguous()
        words: npt.NDArray[Any] = exact.reshape(-1).view(torch.uint8).numpy().view(WORD_DTYPES[known.word_bytes])
        return words

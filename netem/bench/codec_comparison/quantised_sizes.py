"""Bytes of a version in each quantised form, beside the same version as trained.

The weights are those of ``adamw_steps``. Weights of linears get the names that a language model's have. Each form's
delta is a real file, as ``p2pcast delta diff`` writes it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from netem.fleet.adamw_steps import State, consecutive_states
from p2pcast.checkpoint.folder import write_folder
from p2pcast.codec.cell import Words
from p2pcast.codec.layout import Cell, Layout, Tensor
from p2pcast.ground.ordered_map import cores
from p2pcast.offline import diff
from p2pcast.quantised.folder_opening import opening
from p2pcast.quantised.quantisation_kinds import KINDS

RATES: Final = (1e-6, 3e-6)
AS_TRAINED: Final = "bf16"
_LINEAR: Final = re.compile(r"(encoder\.layer\..*)(query|key|value|dense)\.weight")


def measured(rate: float, versions: int) -> dict[str, Any]:
    """Rows of mean bytes and changed values of a version at a learning rate, by form."""
    layout, states = consecutive_states(rate, versions)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="p2pcast-quantised-") as name:
        folder = Path(name)
        for number, state in enumerate(states):
            _save(folder / AS_TRAINED / f"step_{number}", layout, state)
        rows.append(_row(AS_TRAINED, folder / AS_TRAINED, versions))
        for kind in KINDS:
            for number in range(versions + 1):
                source = opening(kind)(folder / AS_TRAINED / f"step_{number}")
                write_folder(folder / kind / f"step_{number}", source.layout(), source.words, {}, workers=cores())
            rows.append(_row(kind, folder / kind, versions))
    return {"learning_rate": rate, "params": layout.params, "versions": versions, "rows": rows}


def _row(form: str, folder: Path, versions: int) -> dict[str, Any]:
    made = list(_deltas(folder, versions))
    return {
        "form": form,
        "dense_bytes": made[0].dense_bytes,
        "bytes": round(fmean(delta.nbytes for delta in made)),
        "changed": round(fmean(delta.changed for delta in made)),
    }


def _deltas(folder: Path, versions: int) -> Iterator[Any]:
    for number in range(versions):
        out = folder / f"{number}.p2pd"
        yield diff(folder / f"step_{number}", folder / f"step_{number + 1}", out)


def _save(folder: Path, layout: Layout, state: State) -> None:
    """As a folder of a language model: matrices of the encoder's layers are linears."""
    folder.parent.mkdir(exist_ok=True)
    names = {_renamed(tensor): tensor.name for tensor in layout.tensors}
    renamed = Layout([Tensor(new, t.dtype, t.shape) for t in layout.tensors if (new := _renamed(t))])

    def words(cell: Cell) -> Words:
        row = state[names[renamed.tensors[cell.tensor].name]]
        return row[cell.start : cell.start + cell.words]

    write_folder(folder, renamed, words, {})


def _renamed(tensor: Tensor) -> str:
    found = _LINEAR.fullmatch(tensor.name)
    return tensor.name if found is None else f"{found[1]}{found[2]}_proj.weight"

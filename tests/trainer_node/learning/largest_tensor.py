"""Memory by the shapes of tensors: the largest one that a block of code makes."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LargestTensor(TorchDispatchMode):
    """``nbytes``: of the largest memory that an operation took. Views take none, nor do maps of files."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        answer = function(*args, **(kwargs or {}))
        if all(each.alias_info is None for each in function._schema.returns):
            for found in tree_iter(answer):
                if isinstance(found, torch.Tensor) and found.device.type != "meta":
                    self.nbytes = max(self.nbytes, found.untyped_storage().nbytes())
        return answer

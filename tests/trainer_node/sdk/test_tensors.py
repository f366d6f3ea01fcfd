"""Names, aliases, dtypes: the tensors of a model that make the state, and the errors for a model that does not fit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from p2pcast.codec.layout import Tensor
from p2pcast.ground.errors import UsageError
from trainer_node.sdk.tensors import DTYPES, ExpectedTensors, checkpoint_name, fit, named

BF16 = torch.bfloat16


def table(*tensors: tuple[str, str, tuple[int, ...]], where: str = "the base") -> ExpectedTensors:
    return ExpectedTensors.of(where, [Tensor(*t) for t in tensors])


def fitted(tensors, *known, dtype=BF16, rename=None):
    return {tensor.name: (tensor.dtype, tensor.shape) for _, tensor in fit(list(named(tensors, rename)), known, dtype)}


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("module.model.embed.weight", "model.embed.weight"),
        ("_orig_mod.module.layers.0.w", "layers.0.w"),
        ("model._fsdp_wrapped_module.layers.3._checkpoint_wrapped_module.mlp.w", "model.layers.3.mlp.w"),
        ("layers.0._orig_mod.w", "layers.0.w"),
        ("submodule.modules.w", "submodule.modules.w"),
        ("w", "w"),
    ],
)
def test_wrappers_leave_names(name, plain):
    assert checkpoint_name(name) == plain


def test_rename_comes_after_the_wrappers():
    assert checkpoint_name("module.a.w", {"a.w": "b.w"}) == "b.w"
    assert checkpoint_name("module.c.w", {"a.w": "b.w"}) == "c.w"
    assert checkpoint_name("module.a.w", lambda name: f"model.{name}") == "model.a.w"


def test_without_a_base_floats_are_cast_and_the_rest_stays():
    tensors = {
        "w": torch.zeros(2, 3),
        "half": torch.zeros(4, dtype=torch.float16),
        "ids": torch.arange(5),
        "scalar": torch.tensor(1.0),
    }
    assert fitted(tensors) == {
        "w": ("BF16", (2, 3)),
        "half": ("BF16", (4,)),
        "ids": ("I64", (5,)),
        "scalar": ("BF16", ()),
    }
    assert fitted(tensors, dtype=torch.float32)["half"] == ("F32", (4,))


def test_the_base_decides_dtypes():
    base = table(("w", "F32", (2,)), ("v", "F16", (2,)))
    assert fitted({"w": torch.zeros(2, dtype=BF16), "v": torch.zeros(2)}, base) == {
        "w": ("F32", (2,)),
        "v": ("F16", (2,)),
    }


def test_every_dtype_has_its_name():
    for dtype, name in DTYPES.items():
        assert fitted({"w": torch.empty(3, dtype=dtype)}, dtype=dtype if dtype.is_floating_point else BF16) == {
            "w": (name, (3,))
        }


def test_one_error_lists_every_difference():
    live = {
        "same": torch.zeros(2),
        "shape": torch.zeros(2, 3),
        "kind": torch.zeros(2, dtype=torch.int64),
        "packed": torch.zeros(2),
        **{f"extra.{n}": torch.zeros(1) for n in range(30)},
    }
    base = table(
        ("same", "BF16", (2,)), ("shape", "BF16", (3, 2)), ("kind", "BF16", (2,)), ("packed", "F4", (2,)),
        ("gone.1", "BF16", (1,)), ("gone.2", "BF16", ())
    )  # fmt: skip
    hub = table(("same", "BF16", (4,)), where="the hub's newest version 0.3")
    with pytest.raises(UsageError) as error:
        fitted(live, base, hub)
    lines = str(error.value).splitlines()
    against_base, against_hub = (
        lines[: lines.index("these tensors are not those of the hub's newest version 0.3:")],
        lines,
    )
    assert against_base[0] == "these tensors are not those of the base:"
    assert [line.strip() for line in against_base[1:]] == [
        "missing: gone.1",
        "missing: gone.2",
        *[f"unexpected: extra.{n}" for n in range(30)],
        "shape: F32[2, 3] here, BF16[3, 2] there",
        "kind: I64 here, which cannot become BF16",
        "packed: F32 here, which cannot become F4",
    ]
    assert "  same: F32[2] here, BF16[4] there" in against_hub


def test_a_tied_alias_that_the_base_lacks_is_dropped():
    embedding = torch.randn(7, 3)
    base = table(("embed.weight", "BF16", (7, 3)))
    for head in (embedding, embedding.clone()):
        assert list(fitted({"embed.weight": embedding, "lm_head.weight": head}, base)) == ["embed.weight"]
        assert list(fitted({"lm_head.weight": head, "embed.weight": embedding}, base)) == ["embed.weight"]


def test_an_alias_that_differs_is_unexpected():
    embedding = torch.randn(7, 3)
    other = embedding.clone()
    other[6, 2] += 1
    with pytest.raises(UsageError, match=r"unexpected: lm_head\.weight"):
        fitted({"embed.weight": embedding, "lm_head.weight": other}, table(("embed.weight", "BF16", (7, 3))))


def test_equal_norms_are_not_aliases():
    """Vectors may be equal by chance, and what is all ones or zeros, as much is at first: no reason to forget one of
    them.
    """
    base = table(("a.norm", "BF16", (4,)), ("a.w", "BF16", (2, 2)))
    live = {
        "a.norm": torch.arange(4.0),
        "b.norm": torch.arange(4.0),
        "a.w": torch.zeros(2, 2),
        "b.w": torch.zeros(2, 2),
    }
    with pytest.raises(UsageError) as error:
        fitted(live, base)
    assert [line.strip() for line in str(error.value).splitlines()[1:]] == ["unexpected: b.norm", "unexpected: b.w"]


def test_a_tensor_twice_in_the_base_is_sent_twice():
    embedding = torch.randn(7, 3)
    base = table(("embed.weight", "BF16", (7, 3)), ("lm_head.weight", "BF16", (7, 3)))
    assert len(fitted({"embed.weight": embedding, "lm_head.weight": embedding}, base)) == 2


def test_without_a_base_one_storage_is_sent_once():
    embedding = torch.nn.Parameter(torch.randn(7, 3))
    fused = torch.randn(6, 3)
    live = {"embed": embedding, "head": embedding, "q": fused[:2], "k": fused[2:4], "clone": embedding.detach().clone()}
    assert list(fitted(live)) == ["embed", "q", "k", "clone"]


def test_one_name_twice():
    one = torch.randn(2, 3)
    assert list(fitted([("module.w", one), ("w", one)])) == ["w"]
    with pytest.raises(UsageError, match="w: comes twice, with different values"):
        fitted([("module.w", one), ("w", one + 1)])


def test_tensors_outside_the_checkpoint_are_named():
    live = {
        "meta": torch.empty(2, device="meta"),
        "double": torch.zeros(2, dtype=torch.complex128),
        "sparse": torch.eye(2).to_sparse(),
    }
    with pytest.raises(UsageError, match=r"(?s)meta: .*double: .*sparse: "):
        fitted(live)
    with pytest.raises(UsageError, match="takes names and tensors"):
        list(named([("w", 3)]))


def test_the_package_and_the_hub_do_not_load_torch():
    code = (
        "import sys, trainer_node, trainer_node.hub; assert 'torch' not in sys.modules; "
        "from trainer_node import Publisher, Handle; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

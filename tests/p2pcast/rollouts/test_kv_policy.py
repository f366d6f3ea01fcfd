"""KV policies: their names in commands and records, and what each implies."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from p2pcast.rollouts import kv_policy
from p2pcast.rollouts.kv_policy import KV_OF_ONE_VERSION, KV_POLICIES, SPAN_KVS, KvPolicy, recomputes
from rollout_node.commands.join import join

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "vllm.md"


def test_policies_have_the_names_of_the_option_and_of_spans() -> None:
    assert KV_POLICIES == ("recompute", "salt", "keep")
    assert (*KV_POLICIES, "drain") == SPAN_KVS
    (option,) = [p for p in join.params if p.name == "kv"]
    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == KV_POLICIES


@pytest.mark.parametrize(("policy", "found"), [("recompute", True), ("salt", False), ("keep", False)])
def test_only_one_policy_has_an_effect_at_a_switch(policy: KvPolicy, found: bool) -> None:
    assert recomputes(policy) is found


def test_kept_caches_alone_mix_versions() -> None:
    assert set(SPAN_KVS) - set(KV_OF_ONE_VERSION) == {"keep"}


@pytest.mark.parametrize("policy", KV_POLICIES)
def test_every_policy_is_explained_in_the_module_and_in_the_guide(policy: str) -> None:
    assert f"| ``{policy}`` |" in str(kv_policy.__doc__)
    assert f"| `{policy}` " in GUIDE.read_text()

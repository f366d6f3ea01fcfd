"""One rank, a real hub and a real peer: bases, small files, folders in between, restarts, snapshots that are not
torn.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from blake3 import blake3

from p2pcast.ground.errors import RefusedError, RetryableError, UsageError
from p2pcast.ground.limits import MAX_SMALL_FILE_BYTES
from p2pcast.ground.version import Version
from p2pcast.sparse.budget_schedule import FILE, BudgetSchedule
from tests.support.tensor_device import CUDA, DEVICE
from trainer_node import Publisher
from trainer_node.sdk import publisher as publisher_module

pytestmark = pytest.mark.device


@pytest.fixture
def checkpoints(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(211, 33, generator=draw).to(DEVICE),
        "norm.weight": torch.ones(33, device=DEVICE),
        "ids": torch.arange(7, device=DEVICE),
        "scalar": torch.tensor(0.5, device=DEVICE),
        "nothing": torch.zeros(0, 4, device=DEVICE),
    }


def as_published(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: (t.to(torch.bfloat16) if t.is_floating_point() else t.clone()) for n, t in tensors.items()}


def step(tensors: dict[str, torch.Tensor], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.add_(torch.randn(tensor.shape, generator=draw).to(DEVICE), alpha=1e-3)


@pytest.mark.parametrize("previous", ["gpu", "pinned"] if CUDA else ["gpu"])
def test_a_plain_loop(run, states, checkpoints, previous):
    """Every version has the tensors' values at its publishing, though they change as soon as the snapshot is
    taken.
    """
    run.hub_up(checkpoints)
    run.peer_up("peer")
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.GELU(), torch.nn.Linear(300, 7))
    model: Any = torch.compile(plain.to(DEVICE), backend="eager")
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    truth = {}
    with Publisher(run.address, token_file=run.token, previous=previous) as publisher:
        handle = None
        for number in range(1, 8):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            if handle is not None:
                handle.wait_snapshot()
            optimiser.step()
            if handle is not None:
                handle.wait_live(1.0)  # a peer that falls behind skips versions, and here every one is looked at
            truth[number] = {
                n.removeprefix("_orig_mod."): p.detach().to(torch.bfloat16) for n, p in model.named_parameters()
            }
            handle = publisher.publish(number, model.named_parameters())
        assert str(handle.wait_durable()) == "0.7"
        assert handle.durable.params == sum(p.numel() for p in model.parameters())
        assert 0 < handle.durable.changed < handle.durable.params
        assert {str(v) for v in handle.wait_live(1.0).values()} == {"0.7"}
    for number, expected in truth.items():
        assert states.differing(run.installed(number), expected) == []


def test_with_the_hubs_base_the_first_version_is_a_delta(run, states, checkpoints, tmp_path):
    live = weights()
    base = states.folder(tmp_path / "base", as_published(live), **{"tokenizer.json": b"[1]"})
    run.hub_up(checkpoints, "--base", base)
    run.peer_up("peer")
    with Publisher(run.address, token_file=run.token, base=base) as publisher:
        assert str(publisher.newest) == "0.0"
        live["embed.weight"][3, 3] += 1
        handle = publisher.publish(1, live)
        assert handle.wait_durable() == publisher.newest
    assert handle.durable.changed == 1
    assert states.differing(run.installed(1), as_published(live)) == []
    assert (run.out() / "step_1" / "tokenizer.json").read_bytes() == b"[1]"


def test_another_base_than_the_hubs_is_exact_too(run, states, checkpoints, tmp_path):
    """The hub holds other weights of the same shapes: it gets all words, and codes them itself."""
    live = weights()
    run.hub_up(checkpoints, "--base", states.folder(tmp_path / "base", as_published(weights(1))))
    run.peer_up("peer")
    with Publisher(
        run.address, token_file=run.token, base=states.folder(tmp_path / "other", as_published(live))
    ) as publisher:
        handle = publisher.publish(1, live)
        assert str(handle.wait_durable()) == "0.1"
    assert run.status()["last"]["kind"] == "delta"
    assert states.differing(run.installed(1), as_published(live)) == []


def test_the_bases_dtypes_and_files_go_with_the_first_version(run, states, checkpoints, tmp_path):
    live = weights()
    kept = {n: t.to(torch.float16) if n == "embed.weight" else t.clone() for n, t in live.items()}
    base = states.folder(tmp_path / "base", kept, **{"config.json": b'{"b": 2}'})
    run.hub_up(checkpoints)
    run.peer_up("peer")
    with Publisher(run.address, token_file=run.token, base=base) as publisher:
        publisher.publish(1, live).wait_live(1.0)
        step(live, 1)
        expected = {n: t.to(kept[n].dtype) for n, t in live.items()}
        publisher.publish(2, live).wait_durable()
    assert states.differing(run.installed(1), kept) == []
    assert states.differing(run.installed(2), expected) == []
    for number in (1, 2):
        assert (run.out() / f"step_{number}" / "config.json").read_bytes() == b'{"b": 2}'


def test_small_files_begin_with_a_version_and_stay(run, states, checkpoints, tmp_path):
    live = weights()
    base = states.folder(tmp_path / "base", live, **{"config.json": b'{"b": 2}'})
    run.hub_up(checkpoints)
    run.peer_up("peer")
    schedules = [BudgetSchedule((pages,)).to_bytes() for pages in (29, 61)]
    with Publisher(run.address, token_file=run.token, base=base) as publisher:
        for number, files in enumerate(({}, {FILE: schedules[0]}, None, {FILE: schedules[1], "a/b": b"c"}), 1):
            publisher.publish(number, live, files=files).wait_live(1.0)
            step(live, number)
        for wrong in ({FILE: b"{}"}, {"../a": b""}, {"a": bytes(MAX_SMALL_FILE_BYTES + 1)}):
            with pytest.raises(UsageError):
                publisher.publish(5, live, files=wrong)
        with pytest.raises(RetryableError, match="'a/b' lies below the file 'a'"):
            publisher.publish(5, live, files={"a": b""}).wait_durable()
        publisher.publish(6, live).wait_live(1.0)
    found = [
        {path: (run.out() / f"step_{number}" / path).read_bytes() for path in (FILE, "a/b", "config.json")
         if (run.out() / f"step_{number}" / path).exists()}
        for number in (1, 2, 3, 4, 6)
    ]  # fmt: skip
    first = {"config.json": b'{"b": 2}'}
    second, last = first | {FILE: schedules[0]}, first | {FILE: schedules[1], "a/b": b"c"}
    assert found == [first, second, second, last, last]


@pytest.mark.parametrize("from_folder", [False, True])
def test_a_publisher_knows_the_schedule_of_the_newest_version(run, states, checkpoints, tmp_path, from_folder):
    schedule, other = (BudgetSchedule((pages,)).to_bytes() for pages in (29, 61))
    live = weights()
    base = states.folder(tmp_path / "base", live, **({FILE: schedule} if from_folder else {}))
    run.hub_up(checkpoints, *(["--base", base] if from_folder else []))
    with Publisher(run.address, token_file=run.token, base=base) as publisher:
        assert publisher.schedule == (blake3(schedule).digest() if from_folder else None)
        publisher.publish(1, live, files={FILE: schedule}).wait_durable()
        publisher.publish(2, live).wait_durable()
    with Publisher(run.address, token_file=run.token, base=base) as publisher:
        assert publisher.schedule == blake3(schedule).digest()
        publisher.publish(3, live, files={FILE: other}).wait_durable()
    with Publisher(run.address, token_file=run.token, base=base) as publisher:
        assert publisher.schedule == blake3(other).digest()


def test_tensors_of_an_iterator_are_published_one_by_one(run, states, checkpoints):
    """Before anything says which tensors come, and after; beside versions of tensors that are all there."""
    live = weights()
    run.hub_up(checkpoints)
    run.peer_up("peer")
    truth = {}

    def made():
        buffer = torch.empty(0, device=DEVICE)
        for name, tensor in live.items():
            if tensor.is_floating_point():
                # In the memory of the tensor before, as by a gather.
                yield name, buffer.resize_(tensor.shape).copy_(tensor)
            else:
                yield name, tensor

    with Publisher(run.address, token_file=run.token) as publisher:
        for number in range(1, 6):
            step(live, number)
            truth[number] = as_published(live)
            handle = publisher.publish(number, live if number == 4 else made(), streamed=number != 4)
            handle.wait_live(1.0)
            assert handle.durable.params == sum(t.numel() for t in live.values())
        assert 0 < handle.durable.changed < handle.durable.params
        with pytest.raises(
            UsageError, match=r"(?s)not those of version 0\.1:\n  missing: embed.weight\n.*missing: scalar$"
        ):
            publisher.publish(6, iter({"ids": live["ids"], "nothing": live["nothing"]}.items()), streamed=True)
        with pytest.raises(ZeroDivisionError):
            publisher.publish(6, ((name, tensor[1 // 0 :]) for name, tensor in live.items()), streamed=True)
        assert str(publisher.resume(6, made(), streamed=True).wait_live(1.0)) != ""
    for number, expected in truth.items():
        assert states.differing(run.installed(number), expected) == []
    assert run.status()["version"] == "1.6"


def test_all_mismatches_are_one_error(run, states, checkpoints, tmp_path):
    live = weights()
    run.hub_up(checkpoints)
    with Publisher(
        run.address, token_file=run.token, base=states.folder(tmp_path / "base", as_published(live))
    ) as publisher:
        wrong = {**live, "embed.weight": torch.zeros(3), "more": torch.zeros(1)}
        del wrong["ids"]
        with pytest.raises(UsageError) as error:
            publisher.publish(1, wrong)
        assert [line.strip() for line in str(error.value).splitlines()[1:]] == [
            "missing: ids",
            "unexpected: more",
            "embed.weight: F32[3] here, BF16[211, 33] there",
        ]
        assert str(publisher.publish(1, live).wait_durable()) == "0.1"
    with (
        Publisher(run.address, token_file=run.token) as publisher,
        pytest.raises(UsageError, match=r"(?s)not those of the hub's newest version 0\.1:.*missing: ids"),
    ):
        publisher.publish(2, wrong)


def test_folders_and_tensors_take_turns(run, states, checkpoints):
    live = weights()
    run.hub_up(checkpoints)
    run.peer_up("peer")
    with Publisher(run.address, token_file=run.token) as publisher:
        publisher.publish(1, live).wait_durable()
        step(live, 1)
        publisher.publish(2, live).wait_durable()
        states.folder(tmp := checkpoints / "part", as_published(weights(5)))
        tmp.rename(checkpoints / "step_3")
        assert states.differing(run.installed(3), as_published(weights(5))) == []
        step(live, 2)
        assert str(publisher.publish(4, live).wait_durable()) == "0.4"
        assert states.differing(run.installed(4), as_published(live)) == []
        # An older step is a branch, by itself or because it was asked for.
        assert str(publisher.publish(4, live).wait_durable()) == "1.4"
        assert str(publisher.resume(9, live).wait_durable()) == "2.9"
    assert states.differing(run.installed(9), as_published(live)) == []


def test_a_hub_that_was_restarted(run, states, checkpoints, monkeypatch):
    live = weights()
    run.hub_up(checkpoints)
    run.peer_up("peer")
    with Publisher(run.address, token_file=run.token) as publisher:
        publisher.publish(1, live).wait_durable()
        run.down("hub")
        step(live, 1)
        with monkeypatch.context() as patch:
            patch.setattr(publisher_module, "GATHER_S", 1.0)
            lost = publisher.publish(2, live)
            lost.wait_snapshot()
            with pytest.raises(RetryableError):
                lost.wait_durable()
        run.hub_up(checkpoints)
        step(live, 2)
        assert str(publisher.publish(3, live).wait_durable()) == "0.3"
    assert states.differing(run.installed(3), as_published(live)) == []
    assert not (run.out() / "step_2").exists()


def test_trainer_that_another_has_replaced_publishes_nothing(run, states, checkpoints):
    live, others = weights(), weights(1)
    run.hub_up(checkpoints)
    run.peer_up("peer")
    with ExitStack() as stack:
        old = stack.enter_context(Publisher(run.address, token_file=run.token))
        first = old.resume(3, live).wait_durable()
        # Not before: a trainer that connects ends the versions that others have under way.
        new = stack.enter_context(Publisher(run.address, token_file=run.token))
        resumed = new.resume(3, others).wait_durable()
        assert resumed.branch > first.branch
        for number in (4, 5):
            with pytest.raises(RefusedError, match=f"branch {resumed.branch} was opened after"):
                old.publish(number, live).wait_durable()
        assert new.publish(4, others).wait_durable() == Version(resumed.branch, 4)
        # A trainer that never resumed continues whatever branch is the newest.
        with Publisher(run.address, token_file=run.token) as plain:
            assert plain.publish(5, live).wait_durable() == Version(resumed.branch, 5)
        assert old.resume(6, live).wait_durable().branch > resumed.branch


def test_max_lag_holds_back(run, states, checkpoints):
    """With manual commits the fleet does not move without a command."""
    live = weights()
    run.hub_up(checkpoints, "--max-lag", 1, "--commit", "manual")
    run.peer_up("peer")
    with Publisher(run.address, token_file=run.token) as publisher:
        publisher.publish(1, live).wait_durable()
        run.commit("0.1")
        run.installed(1)
        held = None
        for number in range(2, 6):
            step(live, number)
            held = publisher.publish(number, live)
            held.wait_snapshot()
            try:
                held.wait_durable(2.0)
            except RetryableError:
                break
        assert held.version is None, "nothing held it back"
        assert held.step > 2
        run.commit(f"0.{held.step - 1}")
        assert held.wait_durable().step == held.step
        run.commit(f"0.{held.step}")
    assert states.differing(run.installed(held.step), as_published(live)) == []


def test_a_wrong_token_is_refused(run, checkpoints, monkeypatch):
    run.hub_up(checkpoints)
    text = run.token.read_text().strip()
    prefix, ident, _ = text.split("-")
    monkeypatch.setenv("P2PCAST_TOKEN", f"{prefix}-{ident}-{'a' * 32}")
    with pytest.raises(RefusedError):
        Publisher(run.address)

"""One rank of a trainer, as a process: ``python ranks.py SCENARIO FOLDER RANK RANKS HUB``. Run by test_ranks.py, with a
process for each rank.

FOLDER holds ``token`` (of the hub) and takes ``truth/step_N.safetensors``, written by rank 0 from what torch itself
gathers and casts, and ``said_RANK.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from p2pcast.ground.errors import P2PCastError
from trainer_node import Handle, Publisher
from trainer_node.learning.trainer_ranks import leave

VOCABULARY, HIDDEN = 101, 13
"""No number of ranks divides them."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 3 * HIDDEN + 1)
        self.narrow = nn.Linear(3 * HIDDEN + 1, 3)
        """Fewer rows than ranks: some have none."""
        self.down = nn.Linear(3, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.narrow(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """A language model in small: the output layer is the embedding, and buffers are part of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, HIDDEN))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x * self.scale)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], step: int, rank: int) -> torch.Tensor:
    ids = torch.randint(VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(1000 * rank + step))
    logits = model(ids[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Rank:
    """The parts of every scenario."""

    def __init__(self, folder: Path, rank: int, ranks: int, hub: str) -> None:
        self.folder, self.rank, self.ranks, self.hub = folder, rank, ranks, hub
        self.said: list[Any] = []
        torch.manual_seed(7)

    def publisher(self, **options: Any) -> Publisher:
        return Publisher(self.hub, token_file=self.folder / "token", **options)

    def keep(
        self, step: int, state: dict[str, torch.Tensor], *, without: tuple[str, ...] = ("lm_head.weight",)
    ) -> None:
        """The independent truth, by rank 0."""
        if self.rank == 0:
            cast = {
                n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in state.items() if n not in without
            }
            path = self.folder / "truth" / f"step_{step}.safetensors"
            path.parent.mkdir(exist_ok=True)
            save_file({n: t.contiguous().clone() for n, t in cast.items()}, path)

    def keep_model(self, step: int, model: nn.Module) -> None:
        """Collective."""
        self.keep(step, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))

    def sharded(self, **options: Any) -> Model:
        model = Model()
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        return model

    def installed(self, handle: Handle | None) -> None:
        """A peer that falls behind skips versions, and here every one is looked at. Rank 0 waits; the others wait for
        it, in their next version.
        """
        if handle is not None and self.rank == 0:
            handle.wait_live(1.0, 600)

    def train(self, model: nn.Module, optimiser: torch.optim.Optimizer, step: int) -> None:
        optimiser.zero_grad()
        loss_of(model, step, self.rank).backward()
        optimiser.step()


def fsdp(world: Rank, **options: Any) -> None:
    """20 steps. While a version is on its way the next step is computed; only the optimiser waits, and only for the
    snapshot.
    """
    model = world.sharded(**options)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4)
    handle = None
    with world.publisher() as publisher:
        for step in range(1, 21):
            optimiser.zero_grad()
            loss_of(model, step, world.rank).backward()
            if handle is not None:
                handle.wait_snapshot()
            optimiser.step()
            world.installed(handle)
            handle = publisher.publish(step, model.state_dict())
            world.keep_model(step, model)
        world.said.append(str(handle.wait_durable()))


def hsdp(world: Rank) -> None:
    mesh = init_device_mesh("cpu", (2, world.ranks // 2), mesh_dim_names=("replicate", "shard"))
    fsdp(world, mesh=mesh)


def columns(world: Rank) -> None:
    """FSDP2 that shards each matrix by columns where it can: tensors that have to be gathered."""

    def placed(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % world.ranks == 0 else None

    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 5))
    fully_shard(model, shard_placement_fn=placed)
    assert any(isinstance(p, DTensor) and p.placements == (Shard(1),) for p in model.parameters())
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4)
    with world.publisher() as publisher:
        for step in range(1, 4):
            optimiser.zero_grad()
            model(torch.randn(3, 8)).square().sum().backward()
            optimiser.step()
            handle = publisher.publish(step, model.named_parameters())
            world.keep_model(step, model)
            world.installed(handle)


def placements(world: Rank) -> None:
    """Every way to place a tensor that a mesh of two dimensions knows, and tensors that only some ranks have."""
    mesh = init_device_mesh("cpu", (2, world.ranks // 2), mesh_dim_names=("a", "b"))
    ways = [
        (Shard(0), Shard(0)),
        (Shard(0), Replicate()),
        (Replicate(), Shard(0)),
        (Replicate(), Replicate()),
        (Shard(1), Replicate()),
        (Replicate(), Shard(1)),
        (Shard(0), Shard(1)),
        (Shard(1), Shard(0)),
        (Shard(1), Shard(1)),
    ]
    tensors: dict[str, torch.Tensor] = {}
    for number, way in enumerate(ways):
        for rows in (1, 3, 4, 9):
            tensors[f"way{number}.rows{rows}"] = distribute_tensor(torch.randn(rows, 5), mesh, way)
    some = torch.full((3, 2), 1.0 + world.rank)
    tensors["partial"] = DTensor.from_local(some, mesh, (Partial(), Replicate()), run_check=False)
    for name, way in (("rows", Shard(0)), ("columns", Shard(1)), ("whole", Replicate())):
        tensors[f"beside.{name}"] = distribute_tensor(torch.randn(5, 3), mesh["b"], (way,))
    tensors["plain"] = torch.randn(6, 2)
    tensors["complex"] = torch.randn(5, dtype=torch.complex64)
    with world.publisher(dtype=torch.float32) as publisher:
        for step in range(1, 4):
            for tensor in tensors.values():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                local.mul_(1.5)
            handle = publisher.publish(step, tensors)
            full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
            if world.rank == 0:
                (world.folder / "truth").mkdir(exist_ok=True)
                save_file(
                    {n: t.contiguous() for n, t in full.items()}, world.folder / "truth" / f"step_{step}.safetensors"
                )
            world.installed(handle)


def killed(world: Rank) -> None:
    """In the middle of the sixth version rank 2 kills itself."""
    model = world.sharded()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4)
    publisher = world.publisher()
    for step in range(1, 7):
        world.train(model, optimiser, step)
        world.keep_model(step, model)
        if step == 6 and world.rank == 2:
            die_after_first_part(publisher)
        handle = publisher.publish(step, model.state_dict())
        handle.wait_snapshot()
        try:
            handle.wait_durable(600)
            world.installed(handle)
        except P2PCastError as error:
            world.said.append([step, type(error).__name__, str(error)])
    tell(world)
    # The rest of the group cannot end it in an orderly way.
    leave(0)


def die_after_first_part(publisher: Publisher) -> None:
    send, parts = publisher._uplink.send, []

    def and_die(record: Any, nbytes: int = 0) -> None:
        send(record, nbytes)
        parts.append(record.type.name)
        if parts.count("CELL") == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    publisher._uplink.send = and_die  # type: ignore[method-assign]


def resumed(world: Rank) -> None:
    """A new trainer, from an older step."""
    torch.manual_seed(11)
    model = world.sharded()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4)
    with world.publisher() as publisher:
        for step in range(5, 8):
            world.train(model, optimiser, step)
            state = model.state_dict()
            handle = publisher.resume(step, state) if step == 5 else publisher.publish(step, state)
            world.keep_model(step, model)
            world.said.append(str(handle.wait_durable(600)))
            world.said.append({n: str(v) for n, v in handle.wait_live(1.0, 600).items()})


def disagreeing(world: Rank) -> None:
    """One rank has a tensor of another shape, one another step; then all is well."""
    with world.publisher() as publisher:
        for attempt in (
            {"w": torch.zeros(3 if world.rank != 1 else 4)},
            {"w": torch.zeros(3), "odd": object()} if world.rank == 1 else {"w": torch.zeros(3)},
        ):
            try:
                publisher.publish(1, attempt).wait_durable(600)
            except P2PCastError as error:
                world.said.append([type(error).__name__, str(error)])
        try:
            publisher.publish(1 + world.rank, {"w": torch.zeros(3)}).wait_durable(600)
        except P2PCastError as error:
            world.said.append([type(error).__name__, str(error)])
        w = torch.arange(3, dtype=torch.float32)
        world.said.append(str(publisher.publish(2, {"w": w}).wait_durable(600)))
        world.keep(2, {"w": w})


def accelerated(world: Rank) -> None:
    """accelerate's loop, with DDP around the model."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    inner = Model()
    model, optimiser = accelerator.prepare(inner, torch.optim.AdamW(inner.parameters(), lr=3e-4))
    assert all(name.startswith("module.") for name, _ in model.named_parameters())
    with world.publisher() as publisher:
        for step in range(1, 6):
            optimiser.zero_grad()
            accelerator.backward(loss_of(model, step, world.rank))
            optimiser.step()
            handle = publisher.publish(step, model.state_dict())
            world.keep(step, dict(accelerator.unwrap_model(model).state_dict()))
            world.installed(handle)


def gathered(world: Rank) -> None:
    """All ranks gather the tensors one by one; at first rank 0 publishes alone, then each rank its share."""
    model = world.sharded()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def whole() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in model.state_dict().items():
            if name != "lm_head.weight" or tables_known:
                yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def steps(first: int, publish: Callable[[int], Handle | None]) -> None:
        for step in range(first, first + 4):
            world.train(model, optimiser, step)
            handle = publish(step)
            world.keep_model(step, model)
            world.installed(handle)

    def drained(step: int) -> None:
        for _ in whole():
            pass

    alone, tables_known = dist.new_group([0]), False
    if world.rank == 0:
        with world.publisher(group=alone) as publisher:
            steps(1, lambda step: publisher.publish(step, whole(), streamed=True))
    else:
        steps(1, drained)
    tables_known = True
    with world.publisher() as publisher:
        steps(5, lambda step: publisher.publish(step, whole(), streamed=True))


def tell(world: Rank) -> None:
    (world.folder / f"said_{world.rank}.json").write_text(json.dumps(world.said))


SCENARIOS = {
    f.__name__: f for f in (fsdp, hsdp, columns, placements, killed, resumed, disagreeing, accelerated, gathered)
}


def main() -> None:
    scenario, folder, rank, ranks, hub = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    os.environ |= {"ACCELERATE_USE_CPU": "true"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous_{scenario}", rank=rank, world_size=ranks)
    world = Rank(folder, rank, ranks, hub)
    SCENARIOS[scenario](world)
    tell(world)
    dist.barrier()  # a rank that ends while others still communicate may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave(0)

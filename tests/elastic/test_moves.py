"""Moves of state are loads of a checkpoint that was never written."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import phalanx
from phalanx import (
    DDP,
    FSDP,
    Backend,
    CheckpointMismatchError,
    ErrorFeedback,
    ShardingStrategy,
    TopK,
    load_checkpoint,
    save_checkpoint,
)
from phalanx.elastic.moves import Holding, holding, move
from phalanx.wire.memory import plain, tensor_bytes

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
Wrap = Callable[[nn.Module, Backend], nn.Module]


class Mixed(nn.Module):
    """Sizes that do not divide, buffers, tied weights, a scalar, doubles, and one large tensor."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 3)
        self.body = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3, bias=False))
        self.head = nn.Linear(3, 7)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.rand(()))
        self.long = nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.empty(0, 4), requires_grad=False)
        self.large = nn.Parameter(torch.randn(3, 9000))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.body(self.embed(inputs)) * self.scale + self.large.mean(dim=1)
        return self.head(hidden + self.long.mean().float())

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": [1, 2], "tensor": self.body.get_buffer("1.running_mean")}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state


WAYS: dict[str, Wrap] = {
    "plain": lambda model, backend: model,
    "ddp": DDP,
    "top-k": lambda model, backend: DDP(model, backend, compression=ErrorFeedback(TopK(0.3))),
    "full": FSDP,
    "grad_op": lambda model, backend: FSDP(model, backend, strategy=ShardingStrategy.SHARD_GRAD_OP),
    "none": lambda model, backend: FSDP(model, backend, strategy=ShardingStrategy.NO_SHARD),
}


def trained(model: nn.Module, rank: int, make: Callable[..., Any], steps: int = 2) -> Any:
    optimizer = make(model.parameters())
    for step in range(steps):
        inputs = torch.arange(8).reshape(2, 4)[:, step : step + 2] % 7
        optimizer.zero_grad()
        (model(inputs.flatten() + 0 * rank).square().sum() * (rank + 1)).backward()
        optimizer.step()
    return optimizer


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def bits(value: object) -> object:
    """A value with tensors as bytes, to be compared."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), bytes(tensor_bytes(plain(value)))
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [bits(each) for each in value]
    return value


def state_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> object:
    own = [wrapper.own_state() for wrapper in model.modules() if isinstance(wrapper, DDP | FSDP)]
    extra = [getattr(module, "extra", None) for module in model.modules()]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    states = [(list(o.state.values()), [*o.param_groups[0].items()][1:]) for o in optimizers]
    return bits([dict(tensors), own, extra, states])


def moved_and_loaded(
    wrap: Wrap,
    before: int,
    after: Sequence[int],
    *,
    make: Callable[..., Any] = adamw,
    again: Wrap | None = None,
    seed: int = 0,
) -> None:
    """Ranks 0 to `before` have a state, and those of `after` get it: from memory, and from a file.

    Ranks of a job; those that are new have nothing. What a lost rank had, another one has kept.
    """
    kept: dict[int, Holding] = {}
    lost = set(range(before)) - set(after)

    def run(world: Backend) -> None:
        rank, mine = world.rank, []
        if rank < before:
            group = world.subgroup(range(before))
            model = wrap(Mixed(3), group)
            optimizer = trained(model, rank if wrap is not WAYS["plain"] else 0, make)
            for buffer in model.buffers():
                buffer.add_(rank)  # of what differs between ranks, rank 0's counts
            save_checkpoint(folder, model=model, optimizer=optimizer, step=2, backend=group)
            mine.append(holding(rank, model, [optimizer]))
            if rank in lost:
                kept[rank] = copy.deepcopy(mine[0])
        world.barrier()
        if rank not in after:
            return
        if rank == after[-1]:
            mine += kept.values()
        group = phalanx.SubBackend(world, after, in_order=True)
        model, other = ((again or wrap)(Mixed(90 + rank), group) for _ in range(2))
        optimizer, of_other = make(model.parameters()), make(other.parameters())
        move(mine, group, model, [optimizer])
        load_checkpoint(folder, model=other, optimizer=of_other, backend=group, random_state=False)
        assert state_of(model, optimizer) == state_of(other, of_other)

    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        folder = Path(name)
        phalanx.simulate(run, max(before, max(after) + 1), seed)


@pytest.mark.parametrize("after", [(0, 2), (0, 1, 2), (1, 2, 4), (2,), (0, 1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_what_ranks_hold_is_moved_as_a_checkpoint_of_it_is_loaded(
    way: str, after: tuple[int, ...]
) -> None:
    moved_and_loaded(WAYS[way], 3, after)


@settings(max_examples=examples(15))
@given(
    st.integers(1, 5),
    st.lists(st.integers(0, 6), min_size=1, max_size=5, unique=True),
    st.sampled_from(sorted(WAYS)),
    st.sampled_from(sorted(WAYS)),
    st.integers(0, 99),
)
def test_any_ranks_go_on_with_the_state_of_any_others(
    before: int, after: list[int], way: str, again: str, seed: int
) -> None:
    moved_and_loaded(WAYS[way], before, after, again=WAYS[again], seed=seed)


def test_groups_of_ranks_that_hold_copies_go_on_with_other_copies() -> None:
    hybrid = ShardingStrategy.hybrid(2)
    moved_and_loaded(lambda model, backend: FSDP(model, backend, strategy=hybrid), 4, (0, 3))
    moved_and_loaded(lambda model, backend: FSDP(model, backend, strategy=hybrid), 4, (1, 2, 4, 5))


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    ],
    ids=["sgd", "momentum", "amsgrad"],
)
def test_optimizers_keep_their_state(make: Callable[..., Any]) -> None:
    moved_and_loaded(FSDP, 3, (0, 2), make=make)
    moved_and_loaded(DDP, 2, (0, 1, 2), make=make)


def test_several_optimizers_of_one_model_are_moved_each_with_its_state() -> None:
    def made(seed: int, backend: Backend) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = FSDP(Mixed(seed), backend)
        first, *rest = model.parameters()
        return model, [
            torch.optim.AdamW([first], lr=0.1 * (seed + 1)),
            torch.optim.SGD(rest, lr=0.01 * (seed + 1), momentum=0.9),
        ]

    def run(world: Backend) -> None:
        mine = []
        trained_one, optimizers = made(0, world.subgroup([world.rank]))
        for optimizer in optimizers:
            trained_one(torch.arange(7)).sum().backward()
            optimizer.step()
        if world.rank == 0:
            mine = [holding(0, trained_one, optimizers)]
        model, fresh = made(1, world)
        move(mine, world, model, fresh)
        assert [each.param_groups[0]["lr"] for each in fresh] == [0.1, 0.01]
        slices = model.slices()
        parts = {parameter: slices[name] for name, parameter in model.named_parameters()}
        whole = dict(zip(model.parameters(), trained_one.parameters(), strict=True))
        for new, old, key in zip(fresh, optimizers, ("exp_avg", "momentum_buffer"), strict=True):
            assert new.state
            for parameter, kept in new.state.items():
                part = parts[parameter]
                expected = old.state[whole[parameter]][key].reshape(-1)[part.start : part.stop]
                assert torch.equal(kept[key], expected)

    phalanx.simulate(run, 2)


# Cost ---------------------------------------------------------------------------------------


def test_what_is_in_its_place_is_neither_sent_nor_copied() -> None:
    def run(backend: Backend) -> tuple[int, bool]:
        model = DDP(Mixed(0), backend)
        optimizer = trained(model, 0, adamw)
        before = [parameter.data_ptr() for parameter in model.parameters()]
        kept = [state["exp_avg"].data_ptr() for state in optimizer.state.values()]
        mine = [holding(backend.rank, model, [optimizer])]
        start = backend.counters().bytes_out
        move(mine, backend, model, [optimizer])
        same = before == [parameter.data_ptr() for parameter in model.parameters()]
        same &= kept == [state["exp_avg"].data_ptr() for state in optimizer.state.values()]
        return backend.counters().bytes_out - start, same

    for sent, in_place in phalanx.simulate(run, 3):
        assert in_place
        assert sent < 40_000  # descriptions; the model and its optimizer have 330 KB


def test_a_newcomer_gets_each_element_once() -> None:
    size = sum(p.nbytes for p in Mixed(0).parameters())

    def run(backend: Backend) -> int:
        model = DDP(Mixed(backend.rank), backend)
        mine = [holding(0, model)] if backend.rank == 0 else []
        start = backend.counters().bytes_in
        move(mine, backend, model)
        return backend.counters().bytes_in - start

    first, second = phalanx.simulate(run, 2)
    assert first < 20_000
    assert size < second < size + 20_000


# What cannot be moved -----------------------------------------------------------------------


def test_nothing_is_changed_if_no_rank_has_some_elements() -> None:
    def run(backend: Backend) -> None:
        model = FSDP(Mixed(0), backend.subgroup(range(3)))
        mine = [holding(backend.rank, model)] if backend.rank != 1 else []
        before = state_of(model)
        with pytest.raises(CheckpointMismatchError, match=r"no rank holds the elements of \w+"):
            move(mine, backend, model)
        assert state_of(model) == before

    phalanx.simulate(run, 3)


@pytest.mark.parametrize(
    ("more", "name"), [("layer", r"more\.weight"), ("group", "the optimizer's")]
)
def test_nothing_is_changed_if_a_rank_has_no_place_for_some_elements(more: str, name: str) -> None:
    """Rank 1 has made a smaller model, or an optimizer for fewer parameters."""

    def run(backend: Backend) -> None:
        model = nn.ModuleDict({"first": nn.Linear(2, 2)})
        optimizer = adamw(model.parameters())
        if backend.rank == 0 or more == "group":
            model["more"] = nn.Linear(2, 2)
        if backend.rank == 0 and more == "group":
            optimizer.add_param_group({"params": list(model["more"].parameters())})
        mine = [holding(0, model, [optimizer])] if backend.rank == 0 else []
        before = state_of(model, optimizer)
        words = rf"rank 1 has no place for {name}.*, which others have"
        with pytest.raises(CheckpointMismatchError, match=words):
            move(mine, backend, model, [optimizer])
        assert state_of(model, optimizer) == before

    phalanx.simulate(run, 2)


def test_nothing_is_changed_if_a_rank_is_lost_before_all_have_theirs() -> None:
    def run(backend: Backend) -> object:
        old = backend.subgroup(range(2)) if backend.rank < 2 else None
        model = DDP(Mixed(backend.rank), old or backend.subgroup([2]))
        optimizer = trained(model, 0, adamw)
        mine = [holding(backend.rank, model, [optimizer])] if old else []
        before = state_of(model, optimizer)
        try:
            move(mine, backend, model, [optimizer])
        except phalanx.PeerLostError:
            assert state_of(model, optimizer) == before
            return "lost"
        return "moved"

    whole = phalanx.simulate(run, 3)
    assert list(whole) == ["moved"] * 3
    ends = set()
    for turn in range(whole.turns[2]):
        *survivors, nobody = phalanx.simulate(run, 3, crashes={2: turn})
        assert nobody is None
        ends.update(survivors)
    assert "lost" in ends


class ReadOnce(dict[Any, Any]):
    """Tensors that their owner can read once, and not for another rank."""

    def __getitem__(self, key: Any) -> Any:
        return self.pop(key)


def test_no_rank_changes_anything_before_all_have_theirs() -> None:
    """Rank 0 has all in its place; rank 1 takes a part from rank 2, which is lost meanwhile."""

    def run(backend: Backend) -> str:
        model = nn.Sequential(*(nn.Linear(50, 50, bias=False) for _ in range(2)))
        rank, parts, tensors = holding(backend.rank, model)
        if backend.rank == 2:
            tensors = [ReadOnce(each) for each in tensors]
        try:
            move([Holding(rank, parts, tensors)] if rank != 1 else [], backend, model)
        except phalanx.PeerLostError:
            return "lost"
        except KeyError:
            backend.abort()
            return "gone"
        return "moved"

    for order in range(8):
        assert phalanx.simulate(run, 3, order) == ["lost", "lost", "gone"]


class Repeats(nn.Linear):
    """Its state refers to one tensor 100 times: values of 100 MiB."""

    def get_extra_state(self) -> list[Tensor]:
        return [torch.ones(1 << 18)] * 100

    def set_extra_state(self, state: list[Tensor]) -> None:
        self.given = [float(each.sum()) for each in state]


def test_state_of_any_size_is_moved() -> None:
    """Files of a stranger may refer to a tensor so often only."""

    def run(backend: Backend) -> list[float]:
        held, model = Repeats(1, 1), Repeats(1, 1)
        move([holding(0, held)] if backend.rank == 0 else [], backend, model)
        return model.given

    assert phalanx.simulate(run, 2) == [[float(1 << 18)] * 100] * 2

"""What FSDP moves, counted where messages leave a rank: bytes, and in which order."""

from __future__ import annotations

import pytest
import torch
from ddp_runs import Watched, over_tcp
from torch import Tensor, nn

from phalanx import FSDP, Backend, ShardingStrategy, simulate

WIDTH, LAYERS = 24, 3
BYTES = LAYERS * WIDTH * WIDTH * 4
FLAGS = 64  # bytes at most that a pass moves besides: which parameters had a gradient


def layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def bytes_of_a_step(backend: Backend, strategy: ShardingStrategy, **options: object) -> int:
    """What this rank sends in its third step."""
    model = FSDP(layers(), backend, strategy=strategy, **options)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = Watched(backend)
    for _ in range(3):
        watched.clear()
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return watched.bytes_sent


@pytest.mark.checkered
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("strategy", "times"),
    [(ShardingStrategy.FULL_SHARD, 3), (ShardingStrategy.SHARD_GRAD_OP, 2)],
    ids=str,
)
def test_a_step_moves_so_many_times_the_parameters(
    size: int, strategy: ShardingStrategy, times: int
) -> None:
    least = times * (size - 1) * BYTES // size
    for sent in over_tcp(lambda backend: bytes_of_a_step(backend, strategy), size):
        assert least <= sent <= least + FLAGS


def test_in_half_precision_an_all_gather_moves_half() -> None:
    def run(backend: Backend) -> int:
        return bytes_of_a_step(backend, ShardingStrategy.FULL_SHARD, mixed_precision=torch.bfloat16)

    least = (BYTES + BYTES // 2 + BYTES // 2) // 2  # gradients are added in float32
    for sent in over_tcp(run, 2):
        assert least <= sent <= least + FLAGS


def test_hybrid_moves_shards_inside_a_group_and_averages_parts_between() -> None:
    def run(backend: Backend) -> int:
        return bytes_of_a_step(backend, ShardingStrategy.hybrid(2))

    inside, between = 3 * BYTES // 2, BYTES // 2
    for sent in over_tcp(run, 4):
        assert inside + between <= sent <= inside + between + FLAGS


def test_accumulation_without_sync_moves_no_gradients() -> None:
    def run(backend: Backend) -> int:
        model = FSDP(layers(), backend)
        watched = Watched(backend)
        with model.no_sync():
            model(torch.ones(2, WIDTH)).sum().backward()
        return watched.bytes_sent

    for sent in over_tcp(run, 2):
        assert sent == 2 * BYTES // 2  # two all-gathers


def test_where_memory_is_shared_to_unshard_moves_nothing() -> None:
    def run(backend: Backend) -> int:
        return bytes_of_a_step(backend, ShardingStrategy.FULL_SHARD)

    for sent in simulate(run, 2):
        assert sent <= BYTES // 2 + FLAGS  # the reduce-scatter


def test_the_next_group_is_on_its_way_while_one_computes() -> None:
    """Forward 0 1 2, backward 2 1 0; each all-gather is started one group ahead."""

    def run(backend: Backend) -> list[str]:
        model = FSDP(layers(), backend)
        model(torch.ones(2, WIDTH)).sum().backward()
        events: list[str] = []
        watched = Watched(backend)
        watched.events = events
        for group in range(LAYERS):
            model.module[group].register_forward_hook(
                lambda *_, group=group: events.append(f"computed {group}")
            )
        model(torch.ones(2, WIDTH)).sum().backward()
        return [
            event if event.startswith("computed") else event.split("FSDP ")[1].split(",")[0]
            for event in events
            if "FSDP" in event or event.startswith("computed")
        ]

    events, _ = over_tcp(run, 2)
    forward = ["gathers 0", "gathers 1", "computed 0", "gathers 2", "computed 1", "computed 2"]
    backward = ["gathers 2", "gathers 1", "reduces 2", "gathers 0", "reduces 1", "reduces 0"]
    assert events == [*forward, *backward]


def test_without_prefetch_each_is_unsharded_when_it_is_needed() -> None:
    def run(backend: Backend) -> list[str]:
        model = FSDP(layers(), backend, prefetch=0)
        watched = Watched(backend)
        model(torch.ones(2, WIDTH)).sum().backward()
        return [e.split("FSDP ")[1].split(",")[0] for e in watched.events if "FSDP" in e]

    events, _ = over_tcp(run, 2)
    assert events == [
        *["gathers 0", "gathers 1", "gathers 2"],
        *["gathers 2", "reduces 2", "gathers 1", "reduces 1", "gathers 0", "reduces 0"],
    ]


def reductions(backend: Backend, passes: int, model: nn.Module) -> list[str]:
    """Which groups are reduced in a backward pass through so many forward passes, in order."""
    fsdp = FSDP(model, backend, prefetch=0)
    watched = Watched(backend)
    sum(fsdp(torch.ones(2, WIDTH)).sum() for _ in range(passes)).backward()  # type: ignore[union-attr]
    steps = [event.split("FSDP ")[1].split(",")[0] for event in watched.events if "FSDP" in event]
    return [step for step in steps if step.startswith("reduces")]


def test_a_group_that_computes_twice_is_reduced_once() -> None:
    def run(backend: Backend) -> list[str]:
        first, middle, last = layers()
        return reductions(backend, 1, nn.Sequential(first, middle, nn.Tanh(), middle, last))

    assert over_tcp(run, 2) == [["reduces 4", "reduces 1", "reduces 0"]] * 2


def test_a_layer_that_gives_back_its_input_is_not_reduced_and_those_around_it_are_once() -> None:
    class LeftOut(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x

    def run(backend: Backend) -> list[str]:
        first, _, last = layers()
        return reductions(backend, 1, nn.Sequential(first, LeftOut(WIDTH, WIDTH), last))

    assert over_tcp(run, 2) == [["reduces 2", "reduces 0"]] * 2


def test_a_backward_pass_through_two_forward_passes_reduces_each_group_once() -> None:
    def run(backend: Backend) -> list[str]:
        return reductions(backend, 2, layers())

    assert over_tcp(run, 2) == [["reduces 2", "reduces 1", "reduces 0"]] * 2


def test_a_call_that_no_backward_pass_comes_to_is_not_waited_for_after_a_step() -> None:
    """Rank 0 keeps what it has computed besides, with its graph."""

    def run(backend: Backend) -> list[str]:
        fsdp = FSDP(layers(), backend, prefetch=0)
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)
        kept = [fsdp(torch.ones(2, WIDTH))]
        if backend.rank == 1:
            kept.clear()
        fsdp(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        watched = Watched(backend)
        fsdp(torch.ones(2, WIDTH)).sum().backward()
        steps = [e.split("FSDP ")[1].split(",")[0] for e in watched.events if "FSDP" in e]
        return [step for step in steps if step.startswith("reduces")]

    assert over_tcp(run, 2) == [["reduces 2", "reduces 1", "reduces 0"]] * 2


class Shifting(nn.Module):
    """Uses its shifts on some ranks only; between its layers something is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ShiftingLayer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class ShiftingLayer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.shifts = True

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias if self.shifts else None)


@pytest.mark.parametrize("shifting", [(), (0,), (0, 1)])
def test_a_group_is_reduced_once_whatever_ranks_use_of_it(shifting: tuple[int, ...]) -> None:
    def run(backend: Backend) -> list[str]:
        model = Shifting()
        for layer in model.layers:
            layer.shifts = backend.rank in shifting
        return reductions(backend, 1, model)

    expected = ["reduces layers.2", "reduces layers.1", "reduces layers.0"]
    assert over_tcp(run, 2) == [expected] * 2

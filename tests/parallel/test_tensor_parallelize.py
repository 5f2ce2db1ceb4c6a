"""parallelize: layers are replaced by name; whatever is wrong is said before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import noise, seeded
from ddp_runs import Watched, outcome_of
from tensor_models import Transformer, batch, plan_for, transformer
from torch import Tensor, nn

from phalanx import (
    DDP,
    Backend,
    ColumnParallelLinear,
    DesyncError,
    MisuseError,
    ParallelEmbedding,
    RowParallelLinear,
    SimulatedBackend,
    UnsupportedOperationError,
    parallelize,
    simulate,
)
from phalanx.tensor import ColumnStyle, RowStyle, SequenceNormStyle, SequenceParallelNorm


def one_of(size: int) -> Backend:
    """A rank of several, of which the others do nothing: whatever is sent is never answered."""
    return SimulatedBackend.create_group(size, timeout=1.0)[0]


def test_layers_are_replaced_in_place_by_the_names_of_the_plan():
    def run(backend: Backend) -> dict[str, str]:
        model = transformer(layers=2)
        assert parallelize(model, backend, plan_for(sequence_dim=1)) is model
        return {name: type(layer).__name__ for name, layer in model.named_modules()}

    names = simulate(run, 2)[1]
    kinds = {
        "embed": ParallelEmbedding,
        "head": ColumnParallelLinear,
        "norm": SequenceParallelNorm,
        "blocks.0.norm1": SequenceParallelNorm,
        "blocks.1.qkv": ColumnParallelLinear,
        "blocks.1.mix": RowParallelLinear,
        "blocks.1": nn.Module,
    }
    for name, kind in kinds.items():
        assert names[name] == kind.__name__ if kind is not nn.Module else names[name] == "Block"


def test_each_rank_holds_its_part_and_says_so():
    """The picture of a plan: what rank 1 of 2 has."""

    def run(backend: Backend) -> str:
        plan = {"embed": "embedding", "blocks.*.up": "column", "blocks.*.down": "row"}
        return str(parallelize(transformer(layers=1), backend, plan))

    picture = simulate(run, 2)[1]
    for line in (
        "(embed): ParallelEmbedding(13, 16, rank 1 of 2: 6 of 13)",
        "(qkv): Linear(in_features=16, out_features=48, bias=True)",
        "(up): ColumnParallelLinear(in_features=16, out_features=48, bias=True, rank 1 of 2: "
        "24 of 48)",
        "(down): RowParallelLinear(in_features=48, out_features=16, bias=True, rank 1 of 2: "
        "24 of 48)",
    ):
        assert line in picture


def test_a_model_that_is_a_layer_is_replaced_by_what_is_returned():
    x = noise(2, 3)
    plain = seeded(lambda: nn.Linear(3, 4))

    def run(backend: Backend) -> Tensor:
        layer = parallelize(plain, backend, {"": ColumnStyle(gather_output=True)})
        assert isinstance(layer, ColumnParallelLinear)
        return layer(x)

    for y in simulate(run, 2):
        torch.testing.assert_close(y, plain(x))


class Twice(nn.Module):
    """One layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_a_layer_in_two_places_stays_one_layer():
    x = noise(2, 4)
    expected = seeded(Twice)(x)

    def run(backend: Backend) -> Tensor:
        model: Any = parallelize(
            seeded(Twice), backend, {"*": ColumnStyle(gather_output=True), "": "column"}
        )
        return model(x)

    with pytest.raises(ValueError, match="two styles"):
        simulate(run, 2)

    def in_both(backend: Backend) -> Tensor:
        style = ColumnStyle(gather_output=True)
        model: Any = parallelize(seeded(Twice), backend, {"first": style, "second": style})
        assert model.first is model.second
        assert len(list(model.parameters())) == 2
        return model(x)

    for y in simulate(in_both, 2):
        torch.testing.assert_close(y, expected)


def test_it_costs_one_message_of_8_bytes():
    def run(backend: Backend) -> tuple[int, int]:
        watched = Watched(backend)
        parallelize(transformer(layers=3), backend, plan_for())
        return len(watched.events), watched.bytes_sent

    assert list(simulate(run, 2)) == [(1, 8), (1, 8)]


def test_the_memory_of_the_whole_weights_is_freed():
    def run(backend: Backend) -> list[int]:
        model = parallelize(transformer(layers=1), backend, plan_for())
        return [p.untyped_storage().nbytes() - p.nbytes for p in model.parameters()]

    assert not any(simulate(run, 4)[1])


# What is refused, with nothing changed --------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8)


def wrapped() -> nn.Module:
    (backend,) = SimulatedBackend.create_group(1)
    return DDP(transformer(), backend)


def parallel_already() -> nn.Module:
    (backend,) = SimulatedBackend.create_group(1)
    return parallelize(transformer(), backend, {"head": "column"})


def normalized() -> nn.Module:
    model = transformer()
    nn.utils.parametrizations.weight_norm(model.head)
    return model


Wrong = tuple[Callable[[], nn.Module], dict[str, Any], type[Exception], str]
WRONG: dict[str, Wrong] = {
    "a pattern that matches nothing": (
        lambda: transformer(layers=2),
        {"head": "column", "blocks.*.mlp.up": "column", "x": "row"},
        ValueError,
        r"matches 'blocks.\*.mlp.up', 'x'. Its modules are '', embed, blocks, blocks.0, .*\.\.\.",
    ),
    "a style that does not exist": (
        transformer,
        {"head": "col"},
        ValueError,
        "'col', for 'head', is no style: there are 'column', 'row',",
    ),
    "a plan that is a list": (
        transformer,
        ["head"],
        TypeError,
        "a plan is a dict from patterns of names to styles, such as",
    ),
    "a plan of numbers": (transformer, {0: "column"}, TypeError, "a plan is a dict from patterns"),
    "another kind of layer": (
        transformer,
        {"embed": "column"},
        UnsupportedOperationError,
        "parallelize: embed: ColumnStyle makes .* of nn.Linear, not of .*Embedding",
    ),
    "a container": (
        transformer,
        {"blocks.*": "column"},
        UnsupportedOperationError,
        "parallelize: blocks.0: .*, not of .*Block",
    ),
    "a norm of another kind": (
        lambda: nn.Sequential(nn.GroupNorm(1, 4)),
        {"0": SequenceNormStyle()},
        UnsupportedOperationError,
        "of nn.LayerNorm or nn.RMSNorm, not of .*GroupNorm",
    ),
    "two styles for one layer": (
        transformer,
        {"blocks.*.up": "column", "blocks.0.*p": "row"},
        ValueError,
        "two styles for blocks.0.up: ColumnStyle.* and RowStyle",
    ),
    "one layer in two places, in two styles": (
        lambda: seeded(Twice),
        {"first": "column", "second": "row"},
        ValueError,
        "two styles for second, which is first, too,: ColumnStyle",
    ),
    "one layer in two places, of which one is named": (
        lambda: seeded(Twice),
        {"first": "column"},
        MisuseError,
        "first.weight and second.weight are one parameter",
    ),
    "fewer rows than ranks": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)),
        {"0": "column", "1": "column"},
        ValueError,
        "parallelize: 1: out_features 1 is 1 elements",
    ),
    "tied weights of which one is named": (
        lambda: transformer(tied=True),
        {"embed": "embedding"},
        MisuseError,
        "embed.weight and head.weight are one parameter",
    ),
    "tied weights that are cut in two ways": (
        lambda: transformer(tied=True),
        {"embed": "embedding", "head": "row"},
        MisuseError,
        "Name all of its layers",
    ),
    "weights that are used past the layer": (
        Attention,
        {"layer.linear1": "column", "layer.linear2": "row"},
        UnsupportedOperationError,
        "layer.linear1 is part of a TransformerEncoderLayer, which computes with",
    ),
    "weights of torch's attention": (
        Attention,
        {"attention.out_proj": "row"},
        UnsupportedOperationError,
        "part of a MultiheadAttention",
    ),
    "a wrapped model": (wrapped, {"*head": "column"}, MisuseError, "wrapped already"),
    "a layer that is parallel already": (
        parallel_already,
        {"head": "column"},
        UnsupportedOperationError,
        "head: it is a ColumnParallelLinear already",
    ),
    "a weight with a parametrization": (
        normalized,
        {"head": "column"},
        UnsupportedOperationError,
        "parallelize: head: .* not of .*Parametrized",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_it_is_refused_before_anything_is_changed_or_sent(case: str):
    build, plan, kind, message = WRONG[case]
    model = build()
    before = {name: (m, list(m.parameters())) for name, m in model.named_modules()}
    backend = one_of(2)
    watched = Watched(backend)
    with pytest.raises(kind, match=message):
        parallelize(model, backend, plan)
    after = {name: (m, list(m.parameters())) for name, m in model.named_modules()}
    assert list(before) == list(after)
    for name, (layer, parameters) in before.items():
        assert after[name][0] is layer
        assert all(a is b for a, b in zip(parameters, after[name][1], strict=True))
    assert not watched.events


# Ranks that differ ------------------------------------------------------------------------------


def odd(what: str, rank: int) -> tuple[Transformer, dict[str, Any]]:
    """The model and plan of a rank; on rank 2 something is other than on the others."""
    model, plan = transformer(layers=2), plan_for()
    if rank != 2:
        return model, plan
    if what == "a value":
        with torch.no_grad():
            model.blocks[1].norm1.bias[3] = 1e-7
    elif what == "an option":
        plan["head"] = ColumnStyle(gather_output=True)
    elif what == "a layer less in the plan":
        del plan["blocks.*.down"]
    elif what == "a frozen parameter":
        model.head.bias.requires_grad_(False)
    elif what == "another model":
        model = transformer(layers=3)
    return model, plan


DIFFERENCES = {
    "a value": "rank 2 has blocks.1.norm1.bias (float32 [16]) with values of hash",
    "an option": "rank 2 has head as ColumnStyle(gather_output=True",
    "a layer less in the plan": "rank 2 has blocks.1.qkv as",
    "a frozen parameter": "rank 2 has head.bias (float32 [13], frozen)",
    "another model": "rank 2 has blocks.2.qkv as",
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_differ_are_told_in_what(what: str):
    def run(backend: Backend) -> BaseException | None:
        model, plan = odd(what, backend.rank)
        error = outcome_of(lambda: parallelize(model, backend, plan))
        assert type(model.head) is nn.Linear
        return error

    for rank, error in enumerate(simulate(run, 4)):
        assert isinstance(error, DesyncError)
        assert (error.rank, error.peer, error.op) == (rank, 2, "parallelize")
        assert str(error).startswith(f"rank {rank}: parallelize: the ranks differ: ")
        assert DIFFERENCES[what] in str(error)
        assert "torch.manual_seed(seed)" in str(error)


def test_layers_from_another_seed_are_told_so():
    def run(backend: Backend) -> BaseException | None:
        torch.manual_seed(backend.rank // 2)
        return outcome_of(lambda: RowParallelLinear(4, 2, backend))

    for error in simulate(run, 3):
        assert isinstance(error, DesyncError)
        assert "rank 2 has weight (float32 [2, 4]) with values of hash" in str(error)
        assert error.op == "RowParallelLinear"


def test_of_two_ranks_rank_0_is_taken_to_be_right():
    def run(backend: Backend) -> BaseException | None:
        torch.manual_seed(backend.rank)
        return outcome_of(lambda: ParallelEmbedding(4, 2, backend))

    for error in simulate(run, 2):
        assert isinstance(error, DesyncError)
        assert "the ranks differ: rank 1 has weight" in str(error)
        assert error.peer == 1


def test_layers_with_other_options_are_told_so():
    plain = seeded(lambda: nn.Linear(4, 6))

    def run(backend: Backend) -> BaseException | None:
        return outcome_of(
            lambda: ColumnParallelLinear.from_linear(
                plain, backend, gather_output=backend.rank == 1
            )
        )

    for error in simulate(run, 3):
        assert isinstance(error, DesyncError)
        assert "rank 1 has ColumnParallelLinear of Linear(" in str(error)
        assert "gather_output=True" in str(error)


def test_the_group_is_usable_after_the_ranks_were_found_to_differ():
    inputs, _ = batch()

    def run(backend: Backend) -> None:
        model, plan = odd("a value", backend.rank)
        with pytest.raises(DesyncError):
            parallelize(model, backend, plan)
        parallelize(transformer(), backend, plan_for())(inputs)

    simulate(run, 3)


def test_styles_are_values():
    assert RowStyle(unit=2) == RowStyle(unit=2) != RowStyle()
    assert ColumnStyle(parts=[1, 2]) == ColumnStyle(parts=(1, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        RowStyle(False)  # type: ignore[misc]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def hooked(seen: list[int]) -> nn.Sequential:
    """Gradients are doubled, and their sizes noted when they are accumulated; one layer's hooks
    were there before it was frozen.
    """
    model = seeded(mlp)
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: 2 * grad)
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.numel()))
    model[2].requires_grad_(False)
    return model


def test_hooks_of_parameters_stay_and_see_this_ranks_part():
    x = noise(4, 6)
    plain = hooked([])
    plain(x).square().mean().backward()

    def run(backend: Backend) -> tuple[list[int], Tensor, list[int]]:
        seen: list[int] = []
        model = parallelize(hooked(seen), backend, {"0": "column", "2": "row"})
        model(x).square().mean().backward()
        frozen = list(seen)
        model[2].requires_grad_(True)
        model(x).square().mean().backward()
        return frozen, model[0].weight.grad / 2, seen

    found = simulate(run, 2)
    for frozen, _, seen in found:
        assert sorted(frozen) == [4, 24]  # of 8 and 48
        assert len(seen) == 6
    torch.testing.assert_close(torch.cat([grad for _, grad, _ in found]), plain[0].weight.grad)


def test_a_layer_that_is_taken_from_keeps_its_own_hooks():
    """Those of a DDP that averages it are not the part's, which may be in another one."""

    def run(backend: Backend) -> None:
        ddp = DDP(seeded(mlp), backend)
        layer = ddp.module[0]
        before = dict(layer.weight._post_accumulate_grad_hooks)
        part = ColumnParallelLinear.from_linear(layer, backend)
        assert layer.weight._post_accumulate_grad_hooks == before
        part(noise(4, 6)).square().mean().backward()
        ddp(noise(4, 6)).square().mean().backward()

    simulate(run, 2)

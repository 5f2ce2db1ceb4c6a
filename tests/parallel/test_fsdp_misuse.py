"""What is wrong is found, named, and says what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import Branches, mlp, noise, seeded
from ddp_runs import assert_close, gradients, mean_of, outcome_of
from fsdp_runs import (
    COMMON,
    COOPERATIVE,
    SHARD_GRAD_OP,
    alone,
    every_way,
    gradient_pieces,
    joined,
    on_ranks,
)
from torch import nn

import phalanx
from phalanx import (
    DDP,
    FSDP,
    Backend,
    DesyncError,
    InvalidWorldSizeError,
    MisuseError,
    ShardingStrategy,
    SimulatedBackend,
)

RANKS = 2
way = every_way()


def x_of(rank: int) -> torch.Tensor:
    return noise(4, 6, seed=rank)


def second_backward(fsdp: FSDP, optimizer: torch.optim.Optimizer) -> None:
    loss = fsdp(x_of(0)).sum()
    loss.backward()
    loss.backward()


def a_backward_again_from_the_output(fsdp: FSDP, optimizer: torch.optim.Optimizer) -> None:
    output = fsdp(x_of(0))
    output.sum().backward()
    output.sum().backward()


def backward_after_a_step(fsdp: FSDP, optimizer: torch.optim.Optimizer) -> None:
    first, second = fsdp(x_of(0)), fsdp(x_of(1))
    first.sum().backward()
    optimizer.step()
    second.sum().backward()


def backward_after_loading(fsdp: FSDP, optimizer: torch.optim.Optimizer) -> None:
    output = fsdp(x_of(0))
    fsdp.load_state_dict(fsdp.full_state_dict())
    output.sum().backward()


def a_replaced_parameter(fsdp: FSDP, optimizer: torch.optim.Optimizer) -> None:
    fsdp.module[2].weight, kept = nn.Parameter(torch.zeros(7, 8)), fsdp.module[2].weight
    try:
        fsdp(x_of(0))
    finally:
        fsdp.module[2].weight = kept


def a_parameter_of_another_dtype(fsdp: FSDP, optimizer: torch.optim.Optimizer) -> None:
    kept = [p.data for p in fsdp.parameters()]
    fsdp.double()
    try:
        fsdp(x_of(0).double())
    finally:
        for p, data in zip(fsdp.parameters(), kept, strict=True):
            p.data = data


MISUSES: dict[str, tuple[Callable[..., None], str]] = {
    play.__name__.replace("_", " "): (play, said)
    for play, said in (
        (second_backward, "retain_graph"),
        (a_backward_again_from_the_output, "retain_graph"),
        (backward_after_a_step, "written after its forward pass"),
        (backward_after_loading, "written after its forward pass"),
        (a_replaced_parameter, "2.weight was replaced"),
        (a_parameter_of_another_dtype, "0.weight was replaced"),
    )
}


@pytest.mark.checkered
@way
@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES)
def test_misuse_is_found_and_the_next_step_works(misuse: Any, strategy: Any, where: Any):
    perform, said = misuse

    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend, strategy=strategy)
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.0)
        error = outcome_of(lambda: perform(fsdp, optimizer))
        assert isinstance(error, (MisuseError, RuntimeError))
        assert isinstance(error, MisuseError), error
        assert f"rank {backend.rank}" in str(error)
        assert said in str(error)
        fsdp.zero_grad()
        fsdp(x_of(backend.rank)).pow(2).sum().backward()
        return gradient_pieces(fsdp)

    plain = [mlp() for _ in range(RANKS)]
    for rank, model in enumerate(plain):
        model(x_of(rank)).pow(2).sum().backward()
    found = joined(on_ranks(where, RANKS, mlp, body))
    assert_close(found, mean_of([gradients(model) for model in plain]))


def test_a_parameter_that_comes_later_is_named():
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend)
        model.register_parameter("late", nn.Parameter(torch.ones(1)))
        with pytest.raises(MisuseError, match=f"rank {backend.rank}: FSDP: late came to the"):
            fsdp(x_of(0))

    on_ranks(COOPERATIVE, RANKS, mlp, body)


def test_a_module_is_in_one_fsdp_only():
    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend)
        for again in (model, fsdp, nn.Sequential(model[0])):
            with pytest.raises(MisuseError, match=r"0.*weight is in another FSDP .*unwrap"):
                FSDP(again, backend)
        fsdp(x_of(0)).sum().backward()
        text = r"of this Linear weight is in another FSDP already, of a Sequential, as 0\.weight: "
        with pytest.raises(MisuseError, match=text):  # a layer that shares it, or the same one
            FSDP(model[0], backend)

    on_ranks(COOPERATIVE, RANKS, mlp, body)


@pytest.mark.parametrize("even", [True, False], ids=["equal shards", "other shards"])
def test_ddp_and_fsdp_are_not_put_around_each_other(even: bool):
    """Shards that happen to have one shape everywhere would be averaged as if they were copies."""

    def body(model: nn.Module, backend: Backend) -> None:
        ddp = DDP(model, backend)
        with pytest.raises(MisuseError, match=r"is a DDP already: use only one"):
            FSDP(ddp, backend)
        del ddp
        fsdp = FSDP(model, backend)
        for outer in (fsdp, nn.Sequential(fsdp)):
            with pytest.raises(MisuseError, match=r"is a FSDP already: use only one"):
                DDP(outer, backend)
        fsdp(noise(4, 6)).sum().backward()

    on_ranks(COOPERATIVE, RANKS, lambda: nn.Linear(6, 4 if even else 3, bias=False), body)


@pytest.mark.parametrize(("ranks", "k"), [(3, 2), (4, 3), (2, 4)])
def test_hybrid_needs_a_multiple_of_its_group(ranks: int, k: int):
    def body(model: nn.Module, backend: Backend) -> None:
        with pytest.raises(InvalidWorldSizeError, match=f"multiple of {k}, and there are {ranks}"):
            FSDP(model, backend, strategy=ShardingStrategy.hybrid(intra_node_size=k))

    on_ranks(COOPERATIVE, ranks, mlp, body)
    for wrong in (0, -1):
        with pytest.raises(InvalidWorldSizeError, match=f"intra_node_size={wrong}"):
            ShardingStrategy.hybrid(wrong)


def test_prefetch_is_a_number_of_groups():
    def body(model: nn.Module, backend: Backend) -> None:
        with pytest.raises(
            ValueError, match="prefetch is a number of parameter groups, or 0, not -1"
        ):
            FSDP(model, backend, prefetch=-1)

    on_ranks(COOPERATIVE, 1, mlp, body)


RULES: dict[str, tuple[Any, type[Exception], str]] = {
    "a class that is not there": (nn.Conv2d, MisuseError, "fits none .* GELU, Linear, Sequential"),
    "a list of modules": (nn.ModuleList, MisuseError, "fits items, a ModuleList, which has no"),
    "a name": ("items", TypeError, "unit is a class of modules"),
    "nothing at all": ((), TypeError, "unit is a class of modules"),
    "classes and others": ((nn.Linear, "items"), TypeError, "unit is a class of modules"),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_that_makes_no_groups_is_refused(rule: Any):
    unit, kind, said = rule

    def body(model: nn.Module, backend: Backend) -> None:
        if unit is nn.ModuleList:
            model = nn.Module()
            model.items = nn.ModuleList([nn.Linear(1, 1)])
        with pytest.raises(kind, match=said):
            FSDP(model, backend, unit=unit)

    on_ranks(COOPERATIVE, 1, mlp, body)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "strategy": ({}, {"strategy": SHARD_GRAD_OP}, "strategy=SHARD_GRAD_OP"),
    "the size of a hybrid": (
        {"strategy": ShardingStrategy.hybrid(1)},
        {"strategy": ShardingStrategy.hybrid(3)},
        "intra_node_size=3",
    ),
    "prefetch": ({}, {"prefetch": 2}, "prefetch=2"),
    "mixed precision": ({}, {"mixed_precision": torch.bfloat16}, "bfloat16"),
    "units": ({}, {"unit": nn.Sequential}, r"units=\[''\]"),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_ranks_with_other_options_are_named_on_all_ranks(options: Any):
    usual, odd, said = options

    def body(model: nn.Module, backend: Backend) -> BaseException | None:
        return outcome_of(lambda: FSDP(model, backend, **(odd if backend.rank == 1 else usual)))

    for error in on_ranks(COOPERATIVE, 3, mlp, body):
        assert isinstance(error, DesyncError)
        assert error.peer == 1
        assert "options of FSDP differ: rank 1 has" in str(error)
        assert said.replace("\\", "") in str(error)


CHANGES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "a shape": (lambda m: m.__setitem__(2, nn.Linear(8, 9)), "2.weight"),
    "a dtype": (lambda m: m[2].double(), "2.weight (float64"),
    "what is frozen": (lambda m: m[0].requires_grad_(False), "0.weight (float32 [8, 6], frozen)"),
    "a layer more": (lambda m: m.append(nn.Linear(3, 3)), "'4', '5'"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_ranks_with_another_model_are_named_and_nothing_is_changed(change: Any):
    alter, said = change

    def body(model: nn.Module, backend: Backend) -> BaseException | None:
        if backend.rank == 2:
            alter(model)
        before = copy.deepcopy(model.state_dict())
        error = outcome_of(lambda: FSDP(model, backend))
        torch.testing.assert_close(model.state_dict(), before)
        assert not any(module._forward_hooks for module in model.modules())
        return error

    for error in on_ranks(COOPERATIVE, 3, mlp, body):
        assert isinstance(error, DesyncError)
        assert "differ" in str(error)
        assert said in str(error)


def test_a_script_module_is_refused_by_name():
    def body(model: nn.Module, backend: Backend) -> None:
        with pytest.raises(MisuseError, match=r"0 is a ScriptModule.* wrap the module that it was"):
            FSDP(nn.Sequential(torch.jit.trace(model, noise(2, 6)), nn.Linear(3, 3)), backend)

    on_ranks(COMMON, 1, mlp, body)


def test_a_branch_that_no_method_of_torch_calls_is_told_to_be_in_one_group():
    """Its hooks are never run, for `forward` is not called through the module."""

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = seeded(Branches), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.inner.forward(x, "left"))

    def body(model: nn.Module, backend: Backend) -> None:
        fsdp = FSDP(model, backend)
        with pytest.raises(
            MisuseError, match=r"inner.trunk.weight was used while its parameter group"
        ):
            fsdp(x_of(0))
        fsdp.unwrap()
        FSDP(model, backend, unit=Calls)(x_of(0)).sum().backward()

    on_ranks(COMMON, RANKS, Calls, body)


def test_a_model_that_is_only_a_hull_may_call_what_is_inside_of_its_child():
    """As peft's models do, which call the base model inside of their LoraModel, and never that."""

    class Hull(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Sequential(mlp())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.child[0](x)

    def body(model: nn.Module, backend: Backend) -> Any:
        fsdp = FSDP(model, backend)
        fsdp(x_of(backend.rank)).pow(2).mean().backward()
        return gradient_pieces(fsdp)

    losses = [lambda model, r=rank: model(x_of(r)).pow(2).mean() for rank in range(RANKS)]
    assert_close(joined(on_ranks(COMMON, RANKS, Hull, body)), alone(Hull, losses))


@pytest.mark.parametrize("wrap", [phalanx.DDP, phalanx.FSDP])
def test_arguments_in_another_order_or_of_another_kind_are_told(wrap: Any):
    with SimulatedBackend.create_group(1)[0] as backend:
        with pytest.raises(TypeError, match="takes a module, then a backend, not SimulatedBackend"):
            wrap(backend, nn.Linear(1, 1))
        with pytest.raises(TypeError, match="is a ShardingStrategy, such as"):
            phalanx.FSDP(nn.Linear(1, 1), backend, strategy=3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="takes a function, then the number of ranks"):
            phalanx.simulate(2, print)  # type: ignore[arg-type]

"""DDP as a module: names, state, modes, and what it must not keep."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ddp_models import TiedTransformer, mlp, noise, seeded
from ddp_runs import assert_same_bits, values
from torch import nn

from phalanx import (
    DDP,
    Backend,
    InvalidRankError,
    LocalSGD,
    UnsupportedOperationError,
    simulate,
)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(6, 3)  # a name that is DDP's, too
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.module(x))


BUILDS = {"mlp": mlp, "tied": lambda: seeded(TiedTransformer), "named": lambda: seeded(Named)}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_names_and_state_are_those_of_the_plain_module(build):
    def run(backend: Backend) -> None:
        model = build()
        ddp = DDP(model, backend)
        assert ddp.module is model
        assert ddp.backend is backend
        assert list(ddp.state_dict()) == list(model.state_dict()) == list(build().state_dict())
        for of in ("named_parameters", "named_buffers"):
            ours, plain = list(getattr(ddp, of)()), list(getattr(model, of)())
            assert [name for name, _ in ours] == [name for name, _ in plain]
            assert all(a is b for (_, a), (_, b) in zip(ours, plain, strict=True))
        assert [id(p) for p in ddp.parameters()] == [id(p) for p in model.parameters()]
        assert [name for name, _ in ddp.named_parameters(prefix="x")] == [
            name for name, _ in model.named_parameters(prefix="x")
        ]

    simulate(run, 2)


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_state_goes_from_plain_to_wrapped_and_back(build):
    def run(backend: Backend):
        ddp = DDP(build(), backend)
        other = build()
        with torch.no_grad():
            for value in other.parameters():
                value.add_(1)
        missing = ddp.load_state_dict(other.state_dict())
        assert missing.missing_keys == missing.unexpected_keys == []
        assert_same_bits([values(other), values(ddp)])
        back = build()
        back.load_state_dict(ddp.state_dict())
        assert_same_bits([values(back), values(ddp)])
        return values(ddp)

    assert_same_bits(list(simulate(run, 2)))


def test_state_that_does_not_fit_is_refused_by_name():
    def run(backend: Backend) -> None:
        ddp = DDP(nn.Linear(2, 2), backend)
        with pytest.raises(RuntimeError, match=r'Missing key.* "bias"'):
            ddp.load_state_dict({"weight": torch.ones(2, 2)})
        found = ddp.load_state_dict(
            {"weight": torch.ones(2, 2), "odd": torch.ones(1)}, strict=False
        )
        assert found.missing_keys == ["bias"]
        assert found.unexpected_keys == ["odd"]

    simulate(run, 1)


def test_a_module_that_holds_a_ddp_saves_and_loads_its_state():
    def run(backend: Backend) -> None:
        class Holder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = DDP(nn.Linear(2, 2), backend)
                self.own = nn.Linear(2, 1)

        holder = Holder()
        state = {name: value + 1 for name, value in holder.state_dict().items()}
        assert set(state) == {"body.weight", "body.bias", "own.weight", "own.bias"}
        holder.load_state_dict(state)
        assert_same_bits([dict(sorted(state.items())), dict(sorted(values(holder).items()))])

    simulate(run, 2)


def test_modes_gradients_and_dtypes_are_set_through_it():
    def run(backend: Backend) -> None:
        ddp = DDP(seeded(Named), backend)
        assert ddp.training
        assert ddp.module.training
        ddp.eval()
        assert not ddp.module.norm.training
        ddp.train()
        assert ddp.module.norm.training
        ddp(noise(4, 6)).pow(2).sum().backward()
        ddp.zero_grad(set_to_none=False)
        assert all((p.grad == 0).all() for p in ddp.module.parameters())
        ddp.zero_grad()
        assert all(p.grad is None for p in ddp.module.parameters())

    simulate(run, 2)


def test_arguments_and_results_pass_through():
    class Echo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, *args, **kwargs):
            return args, kwargs

    def run(backend: Backend) -> None:
        x = torch.ones(1)
        (args, kwargs) = DDP(Echo(), backend)(1, x, key="value", tensor=x)
        assert args[0] == 1
        assert args[1] is x
        assert kwargs == {"key": "value", "tensor": x}

    simulate(run, 1)


def test_hooks_do_not_pile_up_on_a_parameter_that_the_module_returns():
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * self.scale, self.scale

    def run(backend: Backend) -> int:
        ddp = DDP(Returns(), backend)
        counts = []
        for _ in range(3):
            ddp(torch.ones(1))[0].sum().backward()
            counts.append(len(ddp.module.scale._backward_hooks or ()))
        return counts[-1] - counts[0]

    assert list(simulate(run, 2)) == [0, 0]


def test_a_world_of_one_is_plain_training():
    def run(backend: Backend):
        ddp = DDP(mlp(), backend)
        ddp(noise(4, 6)).pow(2).sum().backward()
        ddp.broadcast_parameters(root=0)
        return {name: p.grad.clone() for name, p in ddp.named_parameters()}

    plain = mlp()
    plain(noise(4, 6)).pow(2).sum().backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    assert_same_bits([simulate(run, 1)[0], wanted])


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("root", [-1, 3])
def test_a_root_that_does_not_exist_is_refused(root: int, world_size: int):
    def run(backend: Backend) -> None:
        ddp = DDP(mlp(), backend)
        with pytest.raises(InvalidRankError):
            ddp.broadcast_parameters(root=root)

    simulate(run, world_size)


@pytest.mark.parametrize("wrap", [DDP, partial(LocalSGD, every=2)], ids=["DDP", "LocalSGD"])
def test_a_model_without_values_is_refused_with_what_to_do(wrap):
    """On every rank, and nothing is sent; with values it is taken."""

    def run(backend: Backend):
        with torch.device("meta"):
            module = mlp()
        with pytest.raises(UnsupportedOperationError, match=r"given one on meta.*to_empty.*FSDP"):
            wrap(module, backend)
        module.to_empty(device="cpu").load_state_dict(mlp().state_dict())
        return values(wrap(module, backend).module)

    assert_same_bits([*simulate(run, 2), values(mlp())])

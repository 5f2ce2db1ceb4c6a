"""A backward pass in two parts: together the gradients of one pass, and nothing computed twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import noise, seeded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from phalanx.parallel.gradient_parts import mark_part
from phalanx.pipeline.backward_split import WeightPart, backward_input

SIZE = 6


class Calls(nn.Module):
    """A module whose forward pass is `call(module, x)`."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            self.add_module(name, part)
        self.weight = nn.Parameter(torch.ones(SIZE) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


class Scale(torch.autograd.Function):
    """x * w, both of whose gradients are computed at each pass through it."""

    passes = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        Scale.passes += 1
        return gradient * w, (gradient * x).sum(0)


def linear() -> nn.Linear:
    return nn.Linear(SIZE, SIZE)


def in_two_places() -> nn.Module:
    shared = linear()
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), shared)


def partly_frozen() -> nn.Module:
    model = nn.Sequential(linear(), nn.GELU(), linear(), linear())
    model[0].requires_grad_(False)
    model[3].bias.requires_grad_(False)
    return model


def again(use_reentrant: bool) -> nn.Module:
    def call(module: Any, x: Tensor) -> Tensor:
        return module.last(checkpoint(module.inner, x, use_reentrant=use_reentrant))

    inner = nn.Sequential(linear(), nn.GELU(), linear())
    return Calls(call, inner=inner, last=linear())


# Every parameter of these is left to W.
SPLIT: dict[str, Callable[[], nn.Module]] = {
    "linear and gelu": lambda: nn.Sequential(linear(), nn.GELU(), linear(), nn.GELU(), linear()),
    "a norm, in place": lambda: nn.Sequential(linear(), nn.LayerNorm(SIZE), nn.ReLU(inplace=True)),
    "batch norm": lambda: nn.Sequential(linear(), nn.BatchNorm1d(SIZE)),
    "residual": lambda: Calls(lambda m, x: x + m.a(F.gelu(m.b(x))), a=linear(), b=linear()),
    "two branches": lambda: Calls(lambda m, x: m.a(x) * m.b(x) + m.weight, a=linear(), b=linear()),
    "a gate, of weights alone": lambda: Calls(lambda m, x: x * m.a(m.weight), a=linear()),
    "weight norm": lambda: parametrizations.weight_norm(linear()),
    "convolution": lambda: Calls(
        lambda m, x: m.conv(x[:, None]).sum(1), conv=nn.Conv1d(1, 2, 3, padding=1)
    ),
    "attention": lambda: Calls(
        lambda m, x: m.block(x[None])[0],
        block=nn.TransformerEncoderLayer(SIZE, 2, 8, dropout=0.0, batch_first=True),
    ),
    "recurrent": lambda: Calls(lambda m, x: m.cell(x[None])[0][0], cell=nn.LSTM(SIZE, SIZE)),
    "partly frozen": partly_frozen,
}

# Of these B has to do some; whether that is all.
IN_B: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "in two places": (in_two_places, True),
    "in two places beside others": (lambda: nn.Sequential(linear(), in_two_places()), False),
    "a Python function": (
        lambda: Calls(lambda m, x: Scale.apply(m.a(x), m.weight), a=linear()),
        False,
    ),
    "checkpoint": (lambda: again(use_reentrant=False), False),
    "reentrant checkpoint": (lambda: again(use_reentrant=True), True),
}


class Passes:
    """Two forward and backward passes of a module that has just been built.

    split     in two parts, with all of W at the end
    inputs    the gradient of each input
    in_b      the parameters whose gradients were there before W
    """

    def __init__(self, build: Callable[[], nn.Module], *, split: bool) -> None:
        self.module = seeded(build)
        self.inputs: list[Tensor] = []
        later: list[WeightPart] = []
        for step in range(2):
            start = noise(4, SIZE, seed=step).requires_grad_()
            received = start * 1.0
            received.register_hook(self.inputs.append)
            loss = (self.module(received) * noise(4, SIZE, seed=9)).sum()
            if split:
                later += backward_input(loss, torch.tensor(0.5), start)
                assert len(self.inputs) == step + 1, "B gives the gradient of the input"
            else:
                loss.backward(torch.tensor(0.5))
        self.in_b = {name for name, p in self.module.named_parameters() if p.grad is not None}
        for part in later:
            part.run()

    def assert_same(self, other: Passes) -> None:
        assert all(map(torch.equal, self.inputs, other.inputs))
        expected = {name: p.grad for name, p in other.module.named_parameters()}
        for name, parameter in self.module.named_parameters():
            if expected[name] is None:
                assert parameter.grad is None, name
            else:
                assert torch.equal(parameter.grad, expected[name]), name


@pytest.mark.parametrize("name", [*SPLIT, *IN_B])
def test_b_and_w_together_are_one_backward_pass_to_the_bit(name: str) -> None:
    build = SPLIT[name] if name in SPLIT else IN_B[name][0]
    split, whole = Passes(build, split=True), Passes(build, split=False)
    split.assert_same(whole)
    trained = {key for key, p in split.module.named_parameters() if p.grad is not None}
    if name in SPLIT:
        assert not split.in_b
    else:
        assert split.in_b
        assert (split.in_b == trained) == IN_B[name][1]


class CountsMatmuls(TorchDispatchMode):
    """How often each matrix product is computed, by the shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[Any, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.seen[(str(func), *(tuple(t.shape) for t in args))] += 1
        return func(*args, **(kwargs or {}))


def test_no_product_is_computed_twice() -> None:
    counts = []
    for split in (False, True):
        with CountsMatmuls() as mode:
            Passes(SPLIT["attention"], split=split)
        counts.append(mode.seen)
    assert counts[0] == counts[1]
    assert counts[0].total() > 20


def test_w_frees_what_it_has_used_and_b_what_w_does_not_need() -> None:
    layer, last = linear(), nn.Tanh()
    start = noise(4, SIZE).requires_grad_()
    y = layer(start * 1.0)
    loss = last(y).sum()
    node, freed = y.grad_fn, loss.grad_fn
    assert node is not None
    assert freed is not None
    (part,) = backward_input(loss, torch.tensor(1.0), start)
    assert torch.equal(node._saved_mat1, start), "kept until W"
    part.run()
    with pytest.raises(RuntimeError, match="already been freed"):
        node._saved_mat1  # noqa: B018


def test_a_python_function_has_one_backward_pass() -> None:
    Scale.passes = 0
    Passes(IN_B["a Python function"][0], split=True)
    assert Scale.passes == 2, "one in each of two steps"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_checkpoint_left_out_is_computed_again_once(use_reentrant: bool) -> None:
    calls = []

    def build() -> nn.Module:
        model = again(use_reentrant)
        model.inner.register_forward_pre_hook(lambda *_: calls.append(1))
        return model

    Passes(build, split=True)
    assert len(calls) == 2 * 2, "forward and again, in each of two steps"


def test_hooks_on_parameters_see_whole_gradients_and_may_change_them() -> None:
    seen: list[Tensor] = []

    def build(make: Callable[[], nn.Module] = in_two_places) -> nn.Module:
        model = make()
        for parameter in model.parameters():
            parameter.register_hook(lambda g: seen.append(g.clone()) or g * 2)
        return model

    for make in (in_two_places, SPLIT["linear and gelu"]):
        sizes = []
        for split in (True, False):
            seen.clear()
            passes = Passes(lambda make=make: build(make), split=split)
            sizes.append(sorted(g.norm().item() for g in seen))
            if split:
                first = passes
        first.assert_same(passes)
        assert sizes[0] == sizes[1]


def test_a_module_with_post_accumulate_hooks_has_one_backward_pass_for_all() -> None:
    """As DDP and FSDP count on, which end one with a callback that autograd calls once."""
    ends, accumulated = [], []

    def build() -> nn.Module:
        model = nn.Sequential(linear(), nn.Tanh(), linear())

        def hook(parameter: Tensor) -> None:
            if not accumulated:
                torch.autograd.Variable._execution_engine.queue_callback(
                    lambda: (ends.append(len(accumulated)), accumulated.clear())
                )
            accumulated.append(parameter)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        return model

    assert Passes(build, split=True).in_b == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert ends == [4, 4]


def test_a_mark_on_gradients_that_are_parts_is_no_such_hook() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(linear(), nn.Tanh(), linear())
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(mark_part)
        return model

    assert not Passes(build, split=True).in_b


def test_a_hook_on_an_activation_changes_its_gradient_once() -> None:
    """Also where B and W begin in one node, so that it is called for both."""

    def call(module: Any, x: Tensor) -> Tensor:
        y = module.a(x)
        y.register_hook(lambda gradient: gradient * 3)
        return F.gelu(y)

    def build() -> nn.Module:
        return Calls(call, a=linear())

    Passes(build, split=True).assert_same(Passes(build, split=False))


def test_without_a_gradient_of_the_input_all_is_w() -> None:
    model = SPLIT["linear and gelu"]()
    for start in (None, torch.zeros(4, SIZE, requires_grad=True)):  # none, and one not used
        model.zero_grad()
        loss = model(noise(4, SIZE)).sum()
        (part,) = backward_input(loss, torch.tensor(1.0), start)
        assert all(p.grad is None for p in model.parameters())
        part.run()
        assert all(p.grad is not None for p in model.parameters())


def test_a_weight_that_is_the_loss_and_weights_that_nothing_reaches() -> None:
    weight = nn.Parameter(torch.tensor(3.0))
    (part,) = backward_input(weight, torch.tensor(2.0), None)
    part.run()
    assert weight.grad == 2.0
    start = noise(4, SIZE).requires_grad_()
    left, right = linear()(start), linear()(start)
    gates = torch.where(torch.tensor(True), left, right.detach())
    parts = backward_input(gates.sum(), torch.tensor(1.0), start)
    assert len(parts) == 1

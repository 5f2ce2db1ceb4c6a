"""What torch does not promise, and Phalanx uses: each name does what it is used for.

Groups, devices and futures of torch.distributed have tests of their own beside this one.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import phalanx
from phalanx import torch_internals as internals

PRIVATE = re.compile(
    r"\btorch\._[a-zA-Z]|\b_C\b|_execution_engine|_disable_dynamo\b|\._backward_hooks|"
    r"\._post_accumulate_grad_hooks|\._flat_weights|f_locals|\b_pytree|c10d\._[a-z]"
)
BESIDE = {"torch_internals.py", "instead_of_gloo.py"}


def test_no_other_module_has_a_private_name_of_torch() -> None:
    found = []
    for path in Path(phalanx.__file__).parent.rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.partition("#")[0]
            if path.name not in BESIDE and PRIVATE.search(code) and "_distributed_c10d" not in code:
                found.append(f"{path.name}:{number}: {line.strip()}")
    assert found == [], "it belongs into torch_internals.py"


def test_a_hook_knows_of_the_backward_pass_that_calls_it() -> None:
    said: list[object] = []

    def hook(_: Tensor) -> None:
        said.append((internals.backward_number() >= 0, internals.keeps_graph()))
        said.append(internals.accumulates_everywhere())
        internals.at_end_of_backward(lambda: said.append("the end"))

    x = torch.ones(2, requires_grad=True)
    y = x.sin()
    y.register_hook(hook)
    assert internals.backward_number() < 0
    assert internals.backward_number() == -1
    y.sum().backward(retain_graph=True)
    torch.autograd.grad(y.sum(), x)
    assert said == [(True, True), True, "the end", (True, False), False, "the end"]


def test_hooks_are_listed_and_copied() -> None:
    def first(gradient: Tensor) -> None: ...

    def second(parameter: Tensor) -> None: ...

    def third(parameter: Tensor) -> None: ...

    one, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    assert internals.gradient_hooks(one) == internals.post_accumulate_hooks(one) == []
    one.register_hook(first)
    one.register_post_accumulate_grad_hook(second)
    one.register_post_accumulate_grad_hook(third)
    internals.copy_hooks(one, other, keep=lambda hook: hook is not third)
    assert internals.gradient_hooks(other) == [first]
    assert internals.post_accumulate_hooks(other) == [second]


class Refuses(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[override,no-untyped-def]
        raise ArithmeticError


def test_a_subclass_is_a_plain_tensor() -> None:
    tensor = torch.ones(3).as_subclass(Refuses)
    with pytest.raises(ArithmeticError):
        tensor.sum()
    with internals.as_plain_tensors():
        assert tensor.sum() == 3


@pytest.mark.skipif(not internals.SWAPS_MEMORY, reason="since torch 2.12")
def test_two_storages_exchange_their_memory() -> None:
    one, other, empty = torch.full((3,), 1.0), torch.full((3,), 2.0), torch.UntypedStorage(0)
    internals.swap_memory(one.untyped_storage(), other.untyped_storage())
    assert (one.tolist(), other.tolist()) == ([2.0] * 3, [1.0] * 3)
    internals.swap_memory(empty, one.untyped_storage())
    assert (empty.nbytes(), one.untyped_storage().nbytes()) == (12, 0)


def test_a_recurrent_module_computes_with_what_is_registered() -> None:
    module, other = nn.GRU(2, 3), nn.GRU(2, 3)
    x = torch.ones(4, 2)
    for name, parameter in other.named_parameters():
        module._parameters[name] = parameter
    internals.register_flat_weights(module)
    torch.testing.assert_close(module(x)[0], other(x)[0])


@pytest.mark.parametrize("gradient", [1.0, float("inf")])
def test_a_skipped_step_is_known(gradient: float) -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(parameter * gradient).sum().backward()
    scaler.step(optimizer)
    assert internals.skipped_step(scaler, optimizer) == (gradient == float("inf"))
    assert (parameter.item() == 1) == (gradient == float("inf"))


def test_modes_that_watch_are_known() -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    assert internals.dispatch_modes() == []
    with CommDebugMode() as mode:
        assert internals.dispatch_modes() == [mode]


def test_a_future_is_complete() -> None:
    future = internals.future_in_cpp(lambda: [torch.ones(1)])
    assert future.done()
    assert future.value() == [torch.ones(1)]


def test_without_a_default_group_there_is_none() -> None:
    assert not dist.is_initialized()
    assert internals.default_group() is None
    assert internals.variables_of_group_being_made() is internals.variables_of_batch() is None

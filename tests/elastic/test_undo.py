"""What a block changes before its optimizer's step, and what of that can be put back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from phalanx.elastic.undo import Buffer, Parameters


def set_anew(tensor: Tensor) -> None:
    tensor.data = tensor.data * 0.9


def uncounted(tensor: Tensor) -> None:
    tensor.data.mul_(0.9)


def in_place(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(0.9)


def nothing(tensor: Tensor) -> None:
    """As most models."""


Change = Callable[[Tensor], None]
CHANGES = pytest.mark.parametrize("change", [set_anew, uncounted, in_place])


def block(parameters: Parameters, change: Change) -> None:
    """A block that counts."""
    parameters.begin_block()
    change(parameters.all[1])
    parameters.before_step()
    in_place(parameters.all[0])  # the optimizer
    parameters.end_block()


@CHANGES
@pytest.mark.parametrize("size", [1, 100, 100_000])
def test_parameters_that_a_block_changed_before_its_optimizer_are_put_back_in_the_next(
    change: Change, size: int
) -> None:
    parameters = Parameters([torch.ones(3, requires_grad=True), torch.ones(size)])
    block(parameters, change)
    expected = [each.detach().clone() for each in parameters.all]
    for _ in range(2):
        parameters.begin_block()
        change(parameters.all[1])
        assert parameters.put_back()
        for now, then in zip(parameters.all, expected, strict=True):
            assert torch.equal(now, then)
        parameters.note()


@CHANGES
def test_the_first_change_cannot_be_put_back_and_is_told(change: Change) -> None:
    parameters = Parameters([torch.ones(3, requires_grad=True), torch.ones(5)])
    parameters.begin_block()
    change(parameters.all[1])
    assert not parameters.put_back()


@CHANGES
def test_a_change_that_begins_later_is_found_at_the_next_look(change: Change) -> None:
    parameters = Parameters([torch.ones(3, requires_grad=True), torch.ones(5)])
    for _ in range(2):
        block(parameters, nothing)
    for _ in range(2):  # of which the second is the fourth of all
        block(parameters, change)
    parameters.begin_block()
    change(parameters.all[1])
    assert parameters.put_back()


def test_what_an_optimizer_changes_is_not_copied_and_not_put_back() -> None:
    parameters = Parameters([torch.ones(3, requires_grad=True), torch.ones(5)])
    for _ in range(2):
        block(parameters, nothing)
    parameters.begin_block()
    assert parameters.put_back()
    parameters.before_step()
    in_place(parameters.all[0])
    assert not parameters.put_back()


def test_a_change_between_two_blocks_is_seen() -> None:
    parameters = Parameters([torch.ones(3, requires_grad=True), torch.ones(5)])
    block(parameters, in_place)
    assert not parameters.have_changed()
    set_anew(parameters.all[1])
    assert parameters.have_changed()


@CHANGES
@pytest.mark.parametrize("begins", [1, 3])
@pytest.mark.parametrize("size", [5, 100_000])
def test_a_buffer_is_put_back_after_the_next_look_at_the_latest(
    change: Change, begins: int, size: int
) -> None:
    module = nn.Module()
    module.register_buffer("sum", torch.ones(size))
    buffer = Buffer(module, "sum")
    for number in range(1, 5):
        buffer.note()
        (change if number >= begins else nothing)(module.get_buffer("sum"))
        buffer.end_block()
    expected = module.get_buffer("sum").clone()
    assert buffer.has_moved()
    buffer.note()
    change(module.get_buffer("sum"))
    buffer.put_back()
    assert torch.equal(module.get_buffer("sum"), expected)


def test_a_large_buffer_that_does_not_change_is_not_copied_in_most_blocks() -> None:
    module = nn.Module()
    module.register_buffer("mask", torch.ones(100_000))
    buffer = Buffer(module, "mask")
    copied = []
    for number in range(1, 20):
        before = buffer._noted
        buffer.note()
        buffer.end_block()
        if buffer._noted is not before:
            copied.append(number)
    assert copied == [1, 2, 4, 8, 16]
    assert not buffer.has_moved()

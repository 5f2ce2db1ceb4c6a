"""Residuals, shared out over other numbers of members and back: as much is missing afterwards."""

from __future__ import annotations

from copy import deepcopy

import torch
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx import ErrorFeedback, PowerSGD, Quantized, TopK
from phalanx.compression.error_feedback import OWNED, RESIDUAL, total_residual

MEMBERS = st.integers(1, 6)
State = dict[str, Tensor]


def drawn(members: int, seed: int, *, whole: bool) -> list[State]:
    """A state of each member: of a gradient with owners, and of one that not all of them know."""
    draw = torch.Generator().manual_seed(seed)

    def values(n: int) -> Tensor:
        if whole:
            return torch.randint(-(2**10), 2**10, (n,), generator=draw).float() * 720
        exponents = torch.randint(-30, 30, (n,), generator=draw)
        return torch.randn(n, generator=draw) * 2.0**exponents

    states: list[State] = []
    for member in range(members):
        state = {f"{RESIDUAL}a.weight": values(12)}
        start, stop = 12 * member // members, 12 * (member + 1) // members
        if stop > start:
            state[f"{OWNED}{start}-{stop}.a.weight"] = values(stop - start)
        if member % 2 == 0:
            state[f"{RESIDUAL}b"] = values(3)
        states.append(state)
    return states


def assert_as_much_is_missing(before: list[State], after: list[State], roundings: int) -> None:
    one, other = total_residual(before, len(before)), total_residual(after, len(after))
    assert one.keys() == other.keys()
    for name, missing in one.items():
        # Each rounding: half a unit in the last place of one member's share.
        unit = torch.finfo(torch.float32).eps * missing.abs()
        assert ((other[name] - missing).abs() <= roundings * unit + 1e-300).all(), name


@settings(max_examples=examples(100))
@given(MEMBERS, MEMBERS, st.integers(0, 10**6))
def test_from_p_members_to_q_and_back_as_much_is_missing(p: int, q: int, seed: int):
    feedback, states = ErrorFeedback(TopK(0.1)), drawn(p, seed, whole=False)
    before = deepcopy(states)
    there = feedback.reshard(states, q)
    back = feedback.reshard(there, p)
    assert (len(there), len(back)) == (q, p)
    assert_as_much_is_missing(before, there, 1)
    assert_as_much_is_missing(before, back, 2)
    for state, same in zip(states, before, strict=True):  # which were not written
        assert all(torch.equal(state[key], same[key]) for key in same)
    if p == q:
        for state, same in zip(there, before, strict=True):
            assert all(torch.equal(state[key], same[key]) for key in same)


@settings(max_examples=examples(100))
@given(MEMBERS, MEMBERS, st.integers(0, 10**6))
def test_where_equal_shares_are_numbers_nothing_is_lost_at_all(p: int, q: int, seed: int):
    """Multiples of 720, which all of 1 to 6 divide, even twice."""
    feedback, states = ErrorFeedback(Quantized(1)), drawn(p, seed, whole=True)
    there = feedback.reshard(states, q)
    back = feedback.reshard(there, p)
    missing = total_residual(states, p)
    for other in (total_residual(there, q), total_residual(back, p)):
        assert all(torch.equal(other[name], missing[name]) for name in missing)


@settings(max_examples=examples(60))
@given(MEMBERS, MEMBERS, st.sets(st.integers(0, 5), max_size=5))
def test_known_residuals_are_shared_out_where_members_are_lost(p: int, q: int, lost: set[int]):
    states = drawn(p, 7, whole=False)
    known = [None if member in lost else state for member, state in enumerate(states)]
    there = ErrorFeedback(PowerSGD(1)).reshard(known, q)
    left = [state for state in known if state is not None]
    missing = {name: torch.zeros(n).double() for name, n in (("a.weight", 12), ("b", 3))}
    for state in left:
        for key, value in state.items():
            if key.startswith(RESIDUAL):
                missing[key.removeprefix(RESIDUAL)] += value.double() / p
            else:
                start, stop = map(int, key.removeprefix(OWNED).split(".")[0].split("-"))
                missing["a.weight"][start:stop] += value.double()
    found = total_residual(there, q)
    for name, value in found.items():
        torch.testing.assert_close(value, missing[name], rtol=2**-22, atol=1e-300)

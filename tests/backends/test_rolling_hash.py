"""Rolling hashes: equal where ranks have issued the same, and nowhere else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from phalanx import SimulatedBackend
from phalanx.core.call import UNKNOWN_SITE, Members
from phalanx.core.checker import EMPTY_HASH, Checker

FINGERPRINT = st.sampled_from([0, 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
ISSUED = st.lists(FINGERPRINT, max_size=6)
OPERATIONS = st.lists(st.binary(max_size=3), max_size=6)


def unreachable(*_: object) -> None:
    raise AssertionError("nobody is told anything")


def next_call(checker: Checker, fingerprint: int) -> int:
    return checker.next_call("all_reduce", "", fingerprint, UNKNOWN_SITE, 0.0, 1.0).sequence


def rolling_hash_of(issued: list[int]) -> int:
    checker = Checker(Members(0, (0,), 0), lambda: 0.0, unreachable, unreachable)
    for fingerprint in issued:
        next_call(checker, fingerprint)
    return checker.rolling_hash


@given(OPERATIONS, OPERATIONS)
def test_ranks_that_did_not_issue_the_same_have_different_rolling_hashes(
    ours: list[bytes], theirs: list[bytes]
) -> None:
    """Fingerprints are hashes: of chosen ones, such as 0 and 2**63 in both orders, some collide."""
    one, other = ([xxh3_64_intdigest(each) for each in issued] for issued in (ours, theirs))
    assert (rolling_hash_of(one) == rolling_hash_of(other)) == (ours == theirs)


@given(ISSUED, st.lists(FINGERPRINT, min_size=2, max_size=2, unique=True), ISSUED)
def test_ranks_that_have_diverged_once_stay_diverged(
    before: list[int], now: list[int], after: list[int]
) -> None:
    """One collective that differs, at whatever distance: a step is a bijection."""
    hashes = [rolling_hash_of([*before, each, *after]) for each in now]
    assert hashes[0] != hashes[1]
    assert 0 <= min(hashes) <= max(hashes) < 2**64


def test_a_group_has_a_rolling_hash_of_its_own() -> None:
    with SimulatedBackend.create_group(1)[0] as backend:
        checker = backend.subgroup([0]).group.checker
        next_call(backend.group.checker, 5)
        assert checker.rolling_hash == EMPTY_HASH
        assert [next_call(checker, 5), next_call(checker, 6)] == [0, 1]
        assert checker.rolling_hash == rolling_hash_of([5, 6])

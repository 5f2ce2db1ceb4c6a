"""Rolling hashes: equal where ranks have issued the same, and nowhere else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx import SimulatedBackend
from phalanx.core.checker import EMPTY_HASH, extend_hash

FINGERPRINT = st.sampled_from([0, 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
ISSUED = st.lists(FINGERPRINT, max_size=6)


def trail_of(issued: list[int]) -> int:
    rolling_hash = EMPTY_HASH
    for fingerprint in issued:
        rolling_hash = extend_hash(rolling_hash, fingerprint)
    return rolling_hash


@given(ISSUED, ISSUED)
def test_two_that_did_not_issue_the_same_have_different_trails(
    ours: list[int], theirs: list[int]
) -> None:
    assert (trail_of(ours) == trail_of(theirs)) == (ours == theirs)


@given(ISSUED, st.lists(FINGERPRINT, min_size=2, max_size=2, unique=True), ISSUED)
def test_who_has_parted_once_never_meets_again(
    before: list[int], now: list[int], after: list[int]
) -> None:
    """One collective that differs, at whatever distance: a step is a bijection."""
    trails = [trail_of([*before, each, *after]) for each in now]
    assert trails[0] != trails[1]
    assert 0 <= min(trails) <= max(trails) < 2**64


def test_a_group_has_a_trail_of_its_own() -> None:
    with SimulatedBackend.create_group(1)[0] as backend:
        group = backend.subgroup([0]).group
        backend.group.next_collective(5)
        assert group.rolling_hash == EMPTY_HASH
        assert [group.next_collective(5), group.next_collective(6)] == [0, 1]
        assert group.rolling_hash == trail_of([5, 6])

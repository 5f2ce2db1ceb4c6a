"""What each algorithm costs, and which one `auto` picks.

The model is Hockney's (1994) with a cost for each message that a rank has to handle, since a
Python program feels those:

    seconds = rounds * latency + messages * overhead + bytes / bandwidth

counted along the critical path of the busiest rank, for p ranks and n bytes (Thakur, Rabenseifner
& Gropp 2005, table 1). Every rank computes the same choice, from numbers that are the same on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from phalanx.backends.base import Backend, LinkCost


class Work(NamedTuple):
    """What the busiest rank does in one collective."""

    rounds: float
    messages: float
    bytes: float


Formula = Callable[[int, float], Work]


class Choice(NamedTuple):
    """The algorithm that `auto` picked, and why: the estimated seconds of each."""

    algorithm: str
    estimates: Mapping[str, float]

    def __str__(self) -> str:
        ordered = sorted(self.estimates.items(), key=lambda item: item[1])
        listed = ", ".join(f"{name} {seconds * 1e6:,.0f} us" for name, seconds in ordered)
        return f"{self.algorithm}: estimated {listed}"


def _log(p: int) -> int:
    return (p - 1).bit_length()


def _core(p: int) -> tuple[int, int]:
    """For halving and doubling: the ranks in the core, and its rounds."""
    rounds = p.bit_length() - 1
    return 1 << rounds, rounds


def _halving_doubling(p: int, n: float) -> Work:
    q, rounds = _core(p)
    extra = 2 if q != p else 0  # ranks outside the core hand everything in and get it back
    return Work(2 * rounds + extra, 2 * rounds + extra, 2 * n * (q - 1) / q + extra * n)


def _halving(p: int, n: float) -> Work:
    q, rounds = _core(p)
    extra = q != p
    return Work(rounds + 2 * extra, rounds + 2 * extra, n * (q - 1) / q + extra * n * (1 + 1 / p))


def _doubling(p: int, n: float) -> Work:
    q, rounds = _core(p)
    extra = q != p
    return Work(rounds + 2 * extra, rounds + 2 * extra, n * (q - 1) / q + extra * n)


FORMULAS: Mapping[str, Mapping[str, Formula]] = {
    "all_reduce": {
        "ring": lambda p, n: Work(2 * (p - 1), 2 * (p - 1), 2 * n * (p - 1) / p),
        # Holds what comes aside and folds it afterwards, at about a quarter of a message's cost.
        "direct": lambda p, n: Work(2, 2 * (p - 1), 2.25 * n * (p - 1) / p),
        "tree": lambda p, n: Work(2 * _log(p), 2 * _log(p), 2 * n * _log(p)),
        "halving_doubling": _halving_doubling,
        "star": lambda p, n: Work(2, 2 * (p - 1), 2.25 * n * (p - 1)),
    },
    "reduce_scatter": {
        "ring": lambda p, n: Work(p - 1, p - 1, n * (p - 1) / p),
        "direct": lambda p, n: Work(1, p - 1, 1.25 * n * (p - 1) / p),
        "tree": lambda p, n: Work(2 * _log(p), 2 * _log(p), n * _log(p) + n * (p - 1) / p),
        "halving_doubling": _halving,
        "star": lambda p, n: Work(2, 2 * (p - 1), n * (p - 1) * (1.25 + 1 / p)),
    },
    "all_gather": {
        "ring": lambda p, n: Work(p - 1, p - 1, n * (p - 1) / p),
        "direct": lambda p, n: Work(1, p - 1, n * (p - 1) / p),
        "tree": lambda p, n: Work(2 * _log(p), 2 * _log(p), n * _log(p) + n * (p - 1) / p),
        "halving_doubling": _doubling,
        "star": lambda p, n: Work(2, 2 * (p - 1), n * (p - 1) * (1 + 1 / p)),
    },
    "broadcast": {
        "ring": lambda p, n: Work(2 * p - 2, 2 * p - 2, n * (2 * p - 2) / p),
        "direct": lambda p, n: Work(2, 2 * p - 2, n * 2 * (p - 1) / p),
        "tree": lambda p, n: Work(_log(p), _log(p), n * _log(p)),
        "halving_doubling": lambda p, n: Work(
            _log(p) + _doubling(p, n).rounds,
            _log(p) + _doubling(p, n).messages,
            n * (p - 1) / p + _doubling(p, n).bytes,
        ),
        "star": lambda p, n: Work(1, p - 1, n * (p - 1)),
    },
}


def seconds(work: Work, link: LinkCost) -> float:
    """How long that takes on such links."""
    return work.rounds * link.latency + work.messages * link.overhead + work.bytes / link.bandwidth


def choose(collective: str, count: int, backend: Backend) -> Choice:
    """The cheapest algorithm for a tensor of `count` bytes in this group."""
    key = ("choice", collective, count)
    choice = backend.plans.get(key)
    if choice is None:
        estimates = {
            name: seconds(formula(backend.world_size, count), backend.link_cost)
            for name, formula in FORMULAS[collective].items()
        }
        choice = Choice(min(estimates, key=estimates.__getitem__), estimates)
        backend.plans[key] = choice
    assert isinstance(choice, Choice)
    return choice

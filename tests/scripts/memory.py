"""The most memory that a rank needs in a step, by strategy, and the time to send its gradients.

    python tests/scripts/memory.py

It prints the tables of docs/choose.md, whose letters these are. Activations are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

BUCKET = 25 << 20  # DDP(bucket_size=), by default


class Job(NamedTuple):
    """A model in bytes, on some ranks.

    n   of all parameters
    m   of the largest parameter
    u   of the largest unit
    r   of the parameters that are in no unit
    k   elements of the optimizer's state for each parameter
    p   ranks
    g   ranks that cut a copy, with `hybrid`
    c   of a bucket of `DDP`
    d   of a bucket of an average of parameters
    """

    n: float
    m: float
    u: float
    r: float
    p: int
    k: int = 2
    g: int = 1
    c: float = BUCKET
    d: float = BUCKET

    @property
    def moment(self) -> float:
        """What a step of the optimizer, or an average of gradients, needs for a moment."""
        return max(3 * self.m, self.c)


class Held(NamedTuple):
    """Bytes of a rank: what it keeps, and what comes and goes in a step."""

    parameters: float
    gradients: float
    state: float
    flight: float


Formula = Callable[[Job], Held]

FORMULAS: Mapping[str, Formula] = MappingProxyType(
    {
        "one process": lambda x: Held(x.n, x.n, x.k * x.n, 3 * x.m),
        "`DDP`": lambda x: Held(x.n, x.n, x.k * x.n, x.moment),
        "`DDP`, `ShardedOptimizer`": lambda x: Held(x.n, x.n, x.k * x.n / x.p, x.moment),
        "`no_shard`": lambda x: Held(x.n, x.n, x.k * x.n, x.moment),
        "`shard_grad_op`": lambda x: Held(x.n, x.n / x.p, x.k * x.n / x.p, 3 * x.u + x.r),
        "`full_shard`": lambda x: Held(x.n / x.p, x.n / x.p, x.k * x.n / x.p, 5 * x.u + 2 * x.r),
        "`hybrid`": lambda x: Held(x.n / x.g, x.n / x.g, x.k * x.n / x.g, 5 * x.u + 2 * x.r),
        "shared memory": lambda x: Held(x.n / x.p, x.n / x.p, x.k * x.n / x.p, 3 * x.u + x.r),
        "`LocalSGD`": lambda x: Held(x.n, x.n, x.k * x.n, x.n + max(x.d, x.m)),
        "`DiLoCo`": lambda x: Held(2 * x.n, x.n, (x.k + 1) * x.n, x.n + max(x.d, x.m)),
        "`ErrorFeedback`": lambda x: Held(x.n, x.n, x.k * x.n, 2 * x.n + x.moment),
    }
)
"""Rows of the page's table of formulas, by their names."""


def peak(strategy: str, job: Job) -> float:
    """The most bytes that a rank holds in a step."""
    return sum(FORMULAS[strategy](job))


# The worked examples ----------------------------------------------------------------------------

RANKS, FLOAT32 = 8, 4


def example(parameters: int, largest: int, unit: int, rest: int) -> Job:
    """A model of so many elements in float32, with AdamW, on eight ranks; `hybrid` cuts over 4."""
    n, m, u, r = (FLOAT32 * count for count in (parameters, largest, unit, rest))
    return Job(n, m, u, r, p=RANKS, g=RANKS // 2)


def gpt2() -> Job:
    """GPT-2 small: 12 blocks of width 768, 50257 words, 1024 places, the head tied to the words."""
    width, words = 768, 50257
    block = 12 * width * width + 13 * width
    rest = (words + 1024 + 2) * width
    return example(12 * block + rest, words * width, block, rest)


def llama() -> Job:
    """Llama 2 7B: 32 blocks of width 4096, 32000 words, the head apart from the words."""
    width, inner, words = 4096, 11008, 32000
    block = 4 * width * width + 3 * width * inner + 2 * width
    rest = 2 * words * width + width
    return example(32 * block + rest, words * width, block, rest)


def rows() -> list[str]:
    """The rows of the table of worked examples: GB of a rank."""
    models = gpt2(), llama()
    return [
        f"| {name} | " + " | ".join(f"{peak(name, job) / 1e9:.1f}" for job in models) + " |"
        for name in FORMULAS
    ]


def sizes() -> list[str]:
    """The rows of the table of these models: GB of n, u, r and m."""
    models = {"124M": gpt2(), "7B": llama()}
    return [
        f"| {name} | " + " | ".join(f"{x / 1e9:.2f}" for x in (job.n, job.u, job.r, job.m)) + " |"
        for name, job in models.items()
    ]


# The network ------------------------------------------------------------------------------------

LINKS = (100, 25, 10, 1, 0.1)  # Gbit/s
BACKWARD, STEP = 0.5, 0.75  # seconds
TIMES_FEWER: Mapping[str, float] = MappingProxyType(
    {"all": 1, "`Quantized(8)`": 3.9, "`Quantized(4)`": 7.8, "`PowerSGD(4)`": 22}
)
"""How many times fewer bytes travel: the table of docs/compression.md."""
SHOWN = ("all", "`Quantized(8)`", "`Quantized(4)`")


def sending(n: float, p: int, link: float, times: float = 1.0) -> float:
    """Seconds for the gradients of a step in a ring over links of so many Gbit/s, if a compressor
    makes them `times` fewer bytes.
    """
    return 2 * (p - 1) / p * n / times / (link * 1e9 / 8)


def crossing(n: float, p: int, seconds: float, times: float = 1.0) -> float:
    """The Gbit/s of links over which that takes so many seconds."""
    return sending(n, p, 1.0, times) / seconds


def links() -> list[str]:
    """The rows of the table of links: seconds to send, what hides it, and DiLoCo's steps."""
    job, found = gpt2(), []
    for link in LINKS:
        seconds = {name: sending(job.n, job.p, link, TIMES_FEWER[name]) for name in SHOWN}
        hidden = next((name for name, each in seconds.items() if each <= BACKWARD), "none of them")
        every = math.ceil(seconds["all"] / (STEP / 10))
        cells = [f"{link}", *(f"{each:.2f}" for each in seconds.values()), hidden, f"{every}"]
        found.append(f"| {' | '.join(cells)} |")
    return found


def crossings() -> list[str]:
    """The rows of the table of crossings."""
    job = gpt2()
    return [
        f"| {name} | {crossing(job.n, job.p, BACKWARD, times):.1f} |"
        for name, times in TIMES_FEWER.items()
    ]


if __name__ == "__main__":
    for table in (rows, sizes, links, crossings):
        print(*table(), "", sep="\n")

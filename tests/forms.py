"""The tests' forms: the short one, at every change, and the long one, which tries more.

    make test                          the short form
    PHALANX_TESTS_LONG=1 make test     the long form
    make test-quick                    while editing: a minute, in one process

The short and the long one check the same promises; the long form tries them on more examples, at
larger sizes, and in every combination. Of a test that is marked `checkered` the short form has
every value of every parameter and, if it has three parameters or more, every pair of values. What
goes wrong only where certain values meet, three or the two of two parameters, is left to the long
form.

The quick one checks fewer: what runs in one process, on simulated ranks, and of each test the first
of its cases.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

LONG = os.environ.get("PHALANX_TESTS_LONG", "0") not in ("", "0")
QUICK = os.environ.get("PHALANX_TESTS_QUICK", "0") not in ("", "0")
FEWER = 4  # times fewer examples in the short form
LEAST = 15  # examples
FEWEST = 4  # examples of the quick form


def examples(count: int) -> int:
    """How many examples hypothesis tries: so many in the long form."""
    if QUICK:
        return min(count, FEWEST)
    return count if LONG else min(count, max(LEAST, count // FEWER))


def sizes(short: T, long: T) -> T:
    """That of the two which belongs to the form of this run."""
    return long if LONG else short


# Parts of the names of files that take seconds, wait, or use sockets: not in the quick form.
SLOW = """
agreement arena batch_norm blame checkpoint_a checkpoint_d clip common_fails compile compression_
copies cost_model cross_entropy desync_ends device_staging diloco drift elastic_n elastic_p failures
forks fuzz grad_scaler hostile interrupts join kept_messages kills large learned_types linear local_
mesh native_steps object_messages own_stage pace passes pipeline_schedules pipeline_training
pipeline_wrapped programs property random_k rank_order resharding retries service_ shm_bits
shm_control sparse stress tcp timeouts torch torn two_level waits whole_model wide
"""


def is_slow(file: str) -> bool:
    """Whether the quick form leaves out this file of tests, by its name."""
    return file.startswith("test_") and any(part in file for part in SLOW.split())


def quick(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Those of the quick form, the first case of each test, and the others."""
    first: dict[str, pytest.Item] = {}
    for item in items:
        first.setdefault(item.nodeid.partition("[")[0], item)
    stay = set(first.values())
    return list(first.values()), [item for item in items if item not in stay]

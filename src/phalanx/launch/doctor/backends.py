"""Which backends there are, whether they work here, and how fast two ranks of this host are.

Each backend is tried as a user would: `spawn` starts two ranks, which meet, and what an all_reduce
gives them is checked.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING

from phalanx.errors import BackendUnavailableError, DistributedError
from phalanx.launch.doctor.finding import Checks, Finding, fail, info, ok
from phalanx.launch.factories import BACKENDS
from phalanx.launch.spawn import spawn

if TYPE_CHECKING:
    from phalanx.backends.base import Backend

__all__ = ["BACKEND_CHECKS", "try_backend"]

_SMALL, _LARGE = 2, 4 << 20  # float32 elements: 8 B, 16 MiB
_TIMEOUT = 20.0
_PROCESS_GROUPS = ("gloo", "nccl", "ucc", "mpi")


def _two_ranks(backend: Backend) -> list[float]:
    """One rank's part: median seconds of a barrier, and of a small and a large all_reduce."""
    import torch  # noqa: PLC0415

    from phalanx.collectives import all_reduce_, barrier  # noqa: PLC0415

    torch.set_num_threads(1)
    expected = float(sum(range(1, backend.world_size + 1)))
    times = [_median(partial(barrier, backend), 200)]
    for count, calls in ((_SMALL, 200), (_LARGE, 5)):
        tensor = torch.full((count,), float(backend.rank + 1))
        all_reduce_(tensor, backend)
        if not bool((tensor == expected).all()):
            raise ArithmeticError(
                f"all_reduce of {count} elements gave {tensor[0]}, not {expected}"
            )
        times.append(_median(partial(all_reduce_, tensor, backend), calls))
    return times


def _median(call: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(calls):
        begin = perf_counter()
        call()
        times.append(perf_counter() - begin)
    return statistics.median(times)


def try_backend(name: str) -> Finding:
    """Return whether two ranks of this host can work with the backend `name`, and how fast."""
    try:
        results = spawn(_two_ranks, 2, name, timeout=_TIMEOUT)
    except BackendUnavailableError as error:
        return info(f"cannot run here: {error}")
    except (DistributedError, ArithmeticError, OSError) as error:
        return fail(
            f"{type(error).__name__}: {error}",
            "a bug, or something between two processes of this host: please report it with all "
            "of this",
        )
    barrier, small, large = (max(times) for times in zip(*results, strict=True))
    rate = 4 * _LARGE / large / 1e9
    return ok(
        f"2 ranks: barrier {barrier * 1e6:.0f} us, all_reduce of 8 B {small * 1e6:.0f} us, of "
        f"16 MiB {large * 1e3:.1f} ms ({rate:.1f} GB/s)"
    )


def _process_groups() -> Finding:
    import torch.distributed as dist  # noqa: PLC0415

    if not dist.is_available():
        return info("this build of torch has no torch.distributed: torchrun does not work")
    has = [name for name in _PROCESS_GROUPS if getattr(dist, f"is_{name}_available")()]
    lacks = [name for name in _PROCESS_GROUPS if name not in has]
    return info(f"torch has {', '.join(has) or 'none'}; it lacks {', '.join(lacks) or 'none'}")


def _tried() -> dict[str, Callable[[], Finding]]:
    """Return a check for each backend; `auto` is one of the others."""
    return {name: partial(try_backend, name) for name in sorted(BACKENDS) if name != "auto"}


BACKEND_CHECKS: Checks = MappingProxyType({**_tried(), "process groups": _process_groups})

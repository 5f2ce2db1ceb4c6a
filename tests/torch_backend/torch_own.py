"""torch's own tests of its backends (`DistributedTest`), on "phalanx", in three processes.

torch decides by the name of the backend which tests are run. Here they are those of Gloo, and those
of all_to_all on CPUs, which torch runs with MPI only. `torch_own_passes.txt` lists what passes with
the newest torch; older ones have all of these tests, but for those in `BY_NAME`:

    python tests/torch_backend/torch_own.py > tests/torch_backend/torch_own_passes.txt

The arguments are the name, or a part of it, of the tests to run, and another backend: gloo.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import random
import sys
import tempfile
import unittest
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import jobs
import torch
import torch.distributed as dist
from waiting import wait_until

from phalanx.torch_backend.process_group import CONTAINS_BACKENDS, VERSION

SIZE = 3
LIMIT = 60.0  # seconds of one test: then the stacks are printed, which name it, and all ends
PASSES = Path(__file__).with_name("torch_own_passes.txt")
TESTS = "torch.testing._internal.distributed.distributed_test"
ALL_TO_ALL = "test_all_to_all"
BY_NAME = {"test_get_backend"}  # refused, unless it is Gloo
if VERSION < CONTAINS_BACKENDS:  # by torch itself
    BY_NAME |= {
        "test_monitored_barrier_failure_order",
        "test_monitored_barrier_gloo",
        "test_monitored_barrier_gloo_subgroup",
        "test_monitored_barrier_wait_all_ranks",
    }


def tests_for(backend: str) -> Any:
    """torch's module of tests, which looks at the name of the backend when it is imported."""
    os.environ["BACKEND"] = backend
    sys.modules.pop(TESTS, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(TESTS)
    os.environ["BACKEND"] = "mpi"  # at run time: or groups of two ranks are left out
    return module


def outcomes(rank: int, folder: str, pattern: str, tested: str) -> dict[str, str]:
    """What became of each test on this rank: "" if it passed; "skipped"; or why it failed."""
    warnings.simplefilter("ignore")  # of torch's tests, about torch's names
    dist.destroy_process_group()
    os.environ["RANK"] = str(rank)
    found: dict[str, str] = {}
    shared = store_of_all(rank, folder)
    for backend in ("gloo", "mpi"):
        module = tests_for(backend)
        bases = (module.DistributedTest._DistTestBase, module.MultiProcessTestCase)
        tests: Any = type("Tests", bases, {"world_size": property(lambda _: str(SIZE))})
        tests._barrier = lambda *_, **__: dist.barrier()
        for name in sorted(dir(tests)):
            asked = name.startswith("test_") and pattern in name and name not in BY_NAME
            if asked and (backend == "mpi") == name.startswith(ALL_TO_ALL):
                faulthandler.dump_traceback_later(LIMIT, exit=True)
                seconds = module.CUSTOM_PG_TIMEOUT.get(name, LIMIT)
                store = dist.PrefixStore(name, shared)
                path = f"{folder}/{name}.file"
                found[name] = _one(tests, name, rank, path, store, seconds, tested)
    faulthandler.cancel_dump_traceback_later()
    shared.add("over", 1)
    if rank == 0:  # it holds the store
        wait_until(lambda: shared.add("over", 0) == SIZE, patience=2 * LIMIT, pause=0.002)
    return found


def store_of_all(rank: int, folder: str) -> dist.TCPStore:
    """A store of these ranks. One in a file looks for news every 10 ms only."""
    told = dist.FileStore(f"{folder}/port", SIZE)
    port = 0 if rank == 0 else int(told.get("port"))
    store = dist.TCPStore("127.0.0.1", port, SIZE, rank == 0, wait_for_workers=False)
    if rank == 0:
        told.set("port", str(store.port))
    return store


def _one(
    tests: Any, name: str, rank: int, path: str, store: dist.Store, seconds: float, tested: str
) -> str:
    function = getattr(tests, name)
    if getattr(function, "__unittest_skip__", False):
        return "skipped"
    test = tests(name)
    test.rank, test.file_name = rank, path
    Path(test.file_name).touch()
    torch.manual_seed(1)
    random.seed(1)
    timeout = timedelta(seconds=seconds)
    dist.init_process_group(tested, store=store, rank=rank, world_size=SIZE, timeout=timeout)
    try:
        function(test)
    except SystemExit as end:
        return "skipped" if end.code else ""
    except unittest.SkipTest:
        return "skipped"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500]
    finally:
        store.add("ended", 1)
        ended = lambda: store.add("ended", 0) == SIZE  # noqa: E731
        wait_until(ended, patience=2 * LIMIT, pause=0.002)  # others may still be in the group
        dist.destroy_process_group()
        sys.excepthook = sys.__excepthook__
    return ""


def run(pattern: str = "", backend: str = "phalanx") -> dict[str, str]:
    """What became of each test: "" if it passed on all ranks, "skipped", or why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_dir").mkdir()  # where some of torch's tests keep files
        environment = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(SIZE), "TEMP_DIR": folder}
        found = jobs.run(outcomes, SIZE, folder, pattern, backend, **environment)
    results: dict[str, str] = {}
    for rank, outcome in found.items():
        if outcome.how != "returned":
            raise RuntimeError(f"rank {rank} of torch's tests: {outcome}")
        for name, result in outcome.value.items():
            failed = result not in ("", "skipped")
            if failed or not results.get(name):
                results[name] = f"rank {rank}: {result}" if failed else result
    return results


if __name__ == "__main__":
    results = run(*sys.argv[1:])
    print("\n".join(sorted(name for name, result in results.items() if not result)))
    for name, result in results.items():
        if result not in ("", "skipped"):
            print(f"{name}: {result}", file=sys.stderr)

"""torch's own tests of its backends (`DistributedTest`), on "phalanx", in three processes.

torch decides by the name of the backend which tests are run. Here they are those of Gloo, and those
of all_to_all on CPUs, which torch runs with MPI only. `torch_own_passes.txt` lists what passes:

    python tests/torch_backend/torch_own.py > tests/torch_backend/torch_own_passes.txt
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import tempfile
import time
import unittest
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import jobs
import torch
import torch.distributed as dist

SIZE = 3
PASSES = Path(__file__).with_name("torch_own_passes.txt")
ALL_TO_ALL = "test_all_to_all"
# They give the name of the backend as the reason, where they do not refuse it by themselves.
BY_NAME = ("test_get_backend", "test_monitored_barrier_gloo", "test_monitored_barrier_gloo_subgroup")


@contextmanager
def torch_takes_it_for(backend: str, folder: str) -> Iterator[Any]:
    """torch's module of tests, which looks at the name of the backend when it is imported."""
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(SIZE), TEMP_DIR=folder)
    sys.modules.pop("torch.testing._internal.distributed.distributed_test", None)
    with warnings.catch_warnings(action="ignore"):
        module = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    os.environ["BACKEND"] = "mpi"  # at run time: or groups of two ranks are left out
    yield module


def outcomes(rank: int, folder: str, pattern: str = "") -> dict[str, str]:
    """What became of each test on this rank: "" if it passed; "skipped"; or why it failed."""
    warnings.simplefilter("ignore")  # of torch's tests, about torch's names
    dist.destroy_process_group()
    os.environ["RANK"] = str(rank)
    Path(folder, "test_dir").mkdir(exist_ok=True)
    found: dict[str, str] = {}
    for backend in ("gloo", "mpi"):
        with torch_takes_it_for(backend, folder) as module:
            tests = type("Tests", (module.DistributedTest._DistTestBase, module.MultiProcessTestCase), {})
            tests.world_size = property(lambda self: str(SIZE))
            tests._barrier = lambda self, *args, **kwargs: dist.barrier()
            for name in sorted(dir(tests)):
                if not name.startswith("test_") or pattern not in name:
                    continue
                if (backend == "mpi") == name.startswith(ALL_TO_ALL) and name not in BY_NAME:
                    found[name] = _one(tests, name, rank, f"{folder}/{name}", module)
    return found


def _one(tests: Any, name: str, rank: int, path: str, module: Any) -> str:
    function = getattr(tests, name)
    if getattr(function, "__unittest_skip__", False):
        return "skipped"
    test = tests(name)
    test.rank, test.file_name = rank, f"{path}.file"
    Path(test.file_name).touch()
    torch.manual_seed(1)
    random.seed(1)
    store = dist.FileStore(f"{path}.store", SIZE)
    seconds = module.CUSTOM_PG_TIMEOUT.get(name, 40)
    dist.init_process_group(
        "phalanx", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=seconds)
    )
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
        while store.add("ended", 0) < SIZE:  # others may still be in the group
            time.sleep(0.002)
        dist.destroy_process_group()
        sys.excepthook = sys.__excepthook__
    return ""


def run(pattern: str = "") -> dict[str, str]:
    """What became of each test: "" if it passed on all ranks, "skipped", or why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        found = jobs.run(outcomes, SIZE, folder, pattern, MASTER_ADDR="127.0.0.1")
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
    print("\n".join(name for name, result in results.items() if not result))
    for name, result in results.items():
        if result not in ("", "skipped"):
            print(f"{name}: {result}", file=sys.stderr)

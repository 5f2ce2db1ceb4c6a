"""The programs of torch_training.py between two hosts, with the numbers of one process.

`python tests/torch_backend/torch_two_hosts.py`. The hosts are network namespaces of this machine,
with one or two ranks each, which meet at MASTER_ADDR. Needs root.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import torch
import torch.distributed as dist
from linked_hosts import LinkedHosts, NoLinkError
from torch_training import PROGRAMS, check

PATIENCE = 200.0  # seconds for a job


def rank() -> None:
    """One rank's part: all programs, in one world."""
    torch.set_num_threads(1)
    dist.init_process_group("phalanx")
    me, size = dist.get_rank(), dist.get_world_size()
    names = [name for name, program in PROGRAMS.items() if size in program.sizes]
    for name in names:
        check(name, me, size, PROGRAMS[name].expected(size)[me])
    backend = dist.group.WORLD.backend  # type: ignore[union-attr]
    if me == 0:
        kind = type(backend).__name__
        print(f"{size} ranks on 2 hosts, {kind}: {len(names)} programs as one process", flush=True)
    dist.destroy_process_group()


def main() -> None:
    right = True
    for ranks in (1, 2):
        try:
            with (
                LinkedHosts(None, ranks=ranks) as hosts,
                hosts.job(sys.executable, __file__, "rank") as processes,
            ):
                ended = [process.wait(PATIENCE) for process in processes]
        except NoLinkError as error:
            raise SystemExit(str(error)) from None
        right = right and not any(ended)
    sys.exit(not right)


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()

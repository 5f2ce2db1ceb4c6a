"""What Slurm says that is not one number in one variable."""

from __future__ import annotations

import re
from collections.abc import Mapping

from phalanx.errors import MisuseError
from phalanx.launch.hostlist import expand_hosts

__all__ = ["first_node", "is_step", "tasks_on_this_node"]

_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_INTERACTIVE_NAMES = ("bash", "interactive")
_INTERACTIVE_STEP = 0xFFFFFFFA
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def is_step(environ: Mapping[str, str]) -> bool:
    """Return whether `srun` started this process, rather than a person in an allocation.

    The shell of an interactive allocation may carry SLURM_PROCID too; its job is named after
    the shell, and its step has no number of its own.
    """
    if "SLURM_PROCID" not in environ or "SLURM_NTASKS" not in environ:
        return False
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    numbered = step.isdigit() and int(step) < _INTERACTIVE_STEP
    return numbered or environ.get("SLURM_JOB_NAME") not in _INTERACTIVE_NAMES


def first_node(environ: Mapping[str, str]) -> str:
    """Return the host of rank 0: the first of the step's nodes, or "" where none are named."""
    for name in _NODE_LISTS:
        if environ.get(name):
            try:
                return expand_hosts(environ[name])[0]
            except ValueError as error:
                raise MisuseError(
                    f"{name}={environ[name]!r}: {error}; set MASTER_ADDR to the host of rank 0"
                ) from None
    return ""


def tasks_on_this_node(environ: Mapping[str, str]) -> int | None:
    """Return how many ranks run on this host, from a list such as `4(x2),3`; None if unsaid."""
    text = next((environ[name] for name in _TASKS if environ.get(name)), "")
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = environ.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None

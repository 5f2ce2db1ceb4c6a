"""A pod's environment: the default options of `phalanx run` in Kubernetes.

A pod is a host. Its controller sets its number: an indexed Job or a JobSet sets
JOB_COMPLETION_INDEX, a TrainJob of Kubeflow PET_* (sources: `ops/clusters/kubernetes.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from phalanx.errors import MisuseError
from phalanx.wire.control import parse_address


class PodOptions(NamedTuple):
    """This node's number, and the common options of the nodes: those of `phalanx run`."""

    ranks: int
    nodes: int
    node_rank: int
    master: str


def read_pod(
    environ: Mapping[str, str],
    *,
    ranks: int | None = None,
    nodes: int | None = None,
    node_rank: int | None = None,
    master: str = "",
) -> PodOptions:
    """Return the options; those that were not given are taken from the pod's controller.

        -n            PET_NPROC_PER_NODE                     else 1
        --nnodes      PET_NNODES                             else 1
        --node-rank   PET_NODE_RANK, JOB_COMPLETION_INDEX    else 0
        --master      PET_MASTER_ADDR and PET_MASTER_PORT

    One node is node 0: the pods of an indexed Job may be jobs of their own. `MisuseError` for a
    value that is no number or no address.
    """
    if ranks is None:
        ranks = _number(environ, "PET_NPROC_PER_NODE", "-n", least=1)
    if nodes is None:
        nodes = _number(environ, "PET_NNODES", "--nnodes", least=1)
    if nodes > 1 and node_rank is None:
        set_one = "PET_NODE_RANK" if environ.get("PET_NODE_RANK") else "JOB_COMPLETION_INDEX"
        node_rank = _number(environ, set_one, "--node-rank", least=0)
    if nodes > 1 and not master:
        master = _master(environ)
    return PodOptions(ranks, nodes, node_rank or 0, master)


def _number(environ: Mapping[str, str], name: str, option: str, *, least: int) -> int:
    text = environ.get(name) or str(least)
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise MisuseError(
            f"{name}={text} in the environment is no whole number from {least}, as {option} has to "
            f"be: set it to one, or give {option}, which goes before it"
        )
    return int(text)


def _master(environ: Mapping[str, str]) -> str:
    host, port = environ.get("PET_MASTER_ADDR", ""), environ.get("PET_MASTER_PORT", "")
    if not host and not port:
        return ""
    text = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return str(parse_address(text))
    except ValueError as error:
        raise MisuseError(
            f"PET_MASTER_ADDR={host} and PET_MASTER_PORT={port} in the environment: {error}; set "
            "both, or give --master, which goes before them"
        ) from None

"""The options of `phalanx run`, which are those of `python -m phalanx.launch`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from phalanx.errors import DistributedError

_RANKS = re.compile(r"(-np?|--ranks|--nproc[-_]per[-_]node)(=.*)?|-n\d+")

Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, or with -m the module.")]
Args = Annotated[
    list[str] | None, typer.Argument(metavar="[ARGS]...", help="For the script, untouched.")
]
Module = Annotated[
    bool, typer.Option("-m", "--module", help="SCRIPT is a module's name, as in python -m.")
]


def run_app(app: typer.Typer, name: str) -> None:
    """Run a command line of this process, and end that with the exit code. After an error of
    Phalanx stderr has its text, and the code is 2.
    """
    try:
        app(prog_name=name)
    except DistributedError as error:
        sys.stderr.write(f"phalanx: {error}\n")
        raise SystemExit(2) from None


def run_command(
    *,
    script: Script,
    args: Args = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--ranks",
            metavar="N",
            help="How many ranks on this host; also -np, --nproc-per-node.",
            show_default="PET_NPROC_PER_NODE, or 1",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option("-np", "--nproc-per-node", "--nproc_per_node", metavar="N", hidden=True),
    ] = None,
    module: Module = False,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nnodes",
            metavar="N",
            help="How many hosts, each with N ranks.",
            show_default="PET_NNODES, or 1",
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            "--node-rank",
            metavar="K",
            help="Which of them this is, from 0.",
            show_default="PET_NODE_RANK, JOB_COMPLETION_INDEX, or 0",
        ),
    ] = None,
    master: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="A name of node 0 and a free port on it, for several hosts.",
            show_default="PET_MASTER_ADDR:PET_MASTER_PORT",
        ),
    ] = "",
    max_restarts: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="How often to start all ranks again when one has failed; with --min that one "
            "alone.",
        ),
    ] = 0,
    grace: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="How long ranks may take to end after a signal (30 after SIGTERM, else 2).",
        ),
    ] = None,
    bind: Annotated[
        str,
        typer.Option(
            metavar="cores|numa",
            help="Where each rank runs (Linux). cores: on cores of its own, as many for each rank; "
            "more ranks than cores are refused. numa: on a memory node, whose cores its ranks "
            "share; if there are more nodes than ranks, on as many for each. OMP_NUM_THREADS, if "
            "unset, follows.",
        ),
    ] = "",
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Run on several hosts without a token: everybody who reaches them can read what "
            "ranks send, join the job, and end it.",
        ),
    ] = False,
    min_ranks: Annotated[
        int | None,
        typer.Option(
            "--min",
            metavar="N",
            help="An elastic job: ranks may come and go, and at least N train. SCRIPT calls "
            "phalanx.Elastic().",
        ),
    ] = None,
    max_ranks: Annotated[
        int | None,
        typer.Option(
            "--max",
            metavar="N",
            help="With --min: at most N train, on all hosts.",
            show_default="that of -n; no limit with --store",
        ),
    ] = None,
    store: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="With --min: where several hosts meet, in any order: etcd://HOST:PORT,... They "
            "have one token.",
        ),
    ] = "",
    job_name: Annotated[
        str,
        typer.Option(
            "--job",
            metavar="NAME",
            help="With --min: the job's name, the same on every host, and another for each job.",
        ),
    ] = "",
) -> None:
    """Run a Python script on several ranks, on one host or on many.

    Each rank calls `phalanx.init()` and finds its place. Every line of output is shown behind its
    rank. When a rank fails the others are stopped, and its traceback comes last. Ctrl-C ends them
    all, which may take two seconds; a second Ctrl-C does not wait.

    One host, four ranks:

        phalanx run -n 4 train.py --lr 0.1

    Two hosts, the same on both but for the node rank, with a token that both have:

        phalanx token > job.token

        export PHALANX_TOKEN_FILE=job.token

        phalanx run -n 4 --nnodes 2 --node-rank 0 --master node1:29500 train.py

    An elastic job, in which a failed rank is replaced while the others train on:

        phalanx run -n 4 --min 2 --max-restarts 20 train.py

    In a pod of Kubernetes, options that are not given are what its controller has set: the
    variables that stand below as defaults.
    """
    words = tuple(args or ())
    # Here, for other commands and --help need none of it.
    from phalanx.launch.elastic_run import elastic_options  # noqa: PLC0415
    from phalanx.launch.pod import read_pod  # noqa: PLC0415
    from phalanx.launch.run import Job, run  # noqa: PLC0415

    ranks = processes if ranks is None else ranks
    pod = read_pod(os.environ, ranks=ranks, nodes=nodes, node_rank=node_rank, master=master)
    alone = ranks is None and pod.ranks == pod.nodes == 1
    job = Job(
        *(pod.ranks, script, words, module, pod.nodes, pod.node_rank, pod.master),
        *(max_restarts, grace, bind, insecure),
        _about_one_rank(script, words, module=module) if alone else "",
        elastic_options(min_ranks, max_ranks, store, job_name),
    )
    raise typer.Exit(run(job))


def _about_one_rank(script: str, words: Sequence[str], *, module: bool) -> str:
    """Return a line for a job of one rank, for which nobody has asked."""
    more = f"phalanx run -n 2 {'-m ' if module else ''}{script}"
    behind = next(filter(_RANKS.fullmatch, words), "")
    if behind:
        return f"1 rank: {behind} behind {script} is the script's own. Before it: {more}"
    return f"1 rank, for -n was not given. Two: {more}"

"""`phalanx run`."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.launch.job import Job
from phalanx.launch.run import run

__all__ = ["run_command"]


def run_command(
    *,
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The script, or with -m the module.")
    ],
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="For the script, untouched."),
    ] = None,
    ranks: Annotated[
        int, typer.Option("-n", "--ranks", metavar="N", help="How many ranks on this host.")
    ] = 1,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module's name, as in python -m.")
    ] = False,
    nodes: Annotated[
        int, typer.Option("--nnodes", metavar="N", help="How many hosts, each with N ranks.")
    ] = 1,
    node_rank: Annotated[
        int, typer.Option("--node-rank", metavar="K", help="Which of them this is, from 0.")
    ] = 0,
    master: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="A name of node 0 and a free port on it, for several hosts."
        ),
    ] = "",
    max_restarts: Annotated[
        int,
        typer.Option(metavar="N", help="How often to start all ranks again when one has failed."),
    ] = 0,
) -> None:
    """Run a Python script on several ranks, on one host or on many.

    Each rank calls `phalanx.init()` and finds its place. Every line of output is shown behind its
    rank. When a rank fails the others are stopped, and its traceback comes last. Ctrl-C ends them
    all, which may take two seconds; a second Ctrl-C does not wait.

    One host, four ranks:

        phalanx run -n 4 train.py --lr 0.1

    Two hosts, the same on both but for the node rank:

        phalanx run -n 4 --nnodes 2 --node-rank 0 --master node1:29500 train.py
    """
    job = Job(
        ranks=ranks,
        target=script,
        args=tuple(args or ()),
        module=module,
        nodes=nodes,
        node_rank=node_rank,
        master=master,
        max_restarts=max_restarts,
    )
    raise typer.Exit(run(job))

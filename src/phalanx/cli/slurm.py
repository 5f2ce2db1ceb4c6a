"""Give Slurm a job that runs a Python script on several ranks of each of its nodes.

Run this in a folder that the nodes see, too. The job gets a folder of its own here: the script for
sbatch, the job's token, one log for each rank. Before its time is over the ranks get SIGTERM; if
they then end with exit code 75, the job goes back into the queue and starts again.

    phalanx slurm --nodes 2 -n 4 --time 1:00:00 train.py --lr 0.1

    phalanx slurm --nodes 2 -n 4 --sbatch=--account=physics --sbatch=--gres=gpu:4 train.py

    phalanx slurm --nodes 2 -n 4 --dry-run train.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.launch.command import Args, Module, Script


def slurm_command(
    *,
    script: Script,
    args: Args = None,
    nodes: Annotated[int, typer.Option(metavar="N", help="How many nodes.")] = 1,
    ranks: Annotated[
        int, typer.Option("-n", "--ranks", metavar="N", help="How many ranks on each node.")
    ] = 1,
    module: Module = False,
    time: Annotated[
        str, typer.Option(metavar="H:M:S", help="How long the job may run; as sbatch has it.")
    ] = "",
    partition: Annotated[
        str, typer.Option(metavar="NAME", help="Of which nodes; as sbatch has it.")
    ] = "",
    grace: Annotated[
        int,
        typer.Option(metavar="SECONDS", help="How long before its end the ranks get SIGTERM."),
    ] = 60,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="One more option of sbatch, such as --account=x."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The job's folder, instead of ./phalanx-SCRIPT-1."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the script for sbatch, and do nothing.")
    ] = False,
) -> None:
    """Run `phalanx slurm`, whose help is this module's docstring."""
    from phalanx.launch.run import Job  # noqa: PLC0415
    from phalanx.ops.clusters.slurm import BatchJob  # noqa: PLC0415 -- other commands need none of it

    run = Job(ranks, script, tuple(args or ()), module, nodes)
    job = BatchJob(run, time, partition, grace, tuple(sbatch or ()), folder)
    job.check()
    if dry_run:
        typer.echo(job.dry_run(), nl=False)
        return
    said, place = job.submit()
    typer.echo(f"{said}; its folder: {place}")

"""`phalanx slurm` and `phalanx kubernetes`: a job for a cluster.

Every word after the script is the script's, even one that looks like an option.
"""

from __future__ import annotations

import secrets
import sys
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
        int, typer.Option(metavar="SECONDS", help="How long before its end the ranks get SIGTERM.")
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
    """Give Slurm a job that runs a Python script on several ranks of each of its nodes.

    Run this in a folder that the nodes see, too. The job gets a folder of its own here: the script
    for sbatch, the job's token, one log for each rank. Before its time is over the ranks get
    SIGTERM; if they then end with exit code 75, the job goes back into the queue and starts again.

        phalanx slurm --nodes 2 -n 4 --time 1:00:00 train.py --lr 0.1

        phalanx slurm --nodes 2 -n 4 --sbatch=--account=physics --sbatch=--gres=gpu:4 train.py

        phalanx slurm --nodes 2 -n 4 --dry-run train.py
    """
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


def kubernetes_command(
    context: typer.Context,
    *,
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The script in the image, or with -m a module.")
    ],
    args: Args = None,
    image: Annotated[str, typer.Option(metavar="IMAGE", help="The container image.")],
    nodes: Annotated[int, typer.Option(metavar="N", help="How many pods.")] = 1,
    ranks: Annotated[
        int, typer.Option("-n", "--ranks", metavar="N", help="How many ranks in each pod.")
    ] = 1,
    kind: Annotated[
        str,
        typer.Option(
            metavar="job|jobset|trainjob",
            help="job: an indexed Job and a headless Service, as every cluster has them. jobset: a "
            "JobSet (jobset.x-k8s.io/v1alpha2). trainjob: Kubeflow's TrainJob "
            "(trainer.kubeflow.org/v1alpha1) with the runtime torch-distributed.",
        ),
    ] = "job",
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Of the job.", show_default="the script's")
    ] = "",
    module: Module = False,
    memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="What a rank needs, such as 4Gi, with its part of what ranks share. The limit of "
            "a pod is that of its ranks, and --shm.",
            show_default="no limit",
        ),
    ] = "",
    shm: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Room in a pod's /dev/shm, such as 1Gi, for NCCL and torch's data loaders with "
            "workers; Phalanx needs none.",
            show_default="the cluster's",
        ),
    ] = "",
    volumes: Annotated[
        list[str] | None,
        typer.Option(
            "--volume",
            metavar="CLAIM:PATH",
            help="A PersistentVolumeClaim, and where the ranks see it: checkpoints belong on one "
            "that all nodes may write (ReadWriteMany). Can be given several times.",
        ),
    ] = None,
    user: Annotated[
        int | None,
        typer.Option(
            metavar="UID",
            help="The user and group of the ranks; volumes are given to this group.",
            show_default="the image's",
        ),
    ] = None,
    grace: Annotated[
        int,
        typer.Option(
            metavar="SECONDS", help="From SIGTERM, when a pod has to go, until it is killed."
        ),
    ] = 120,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="How often pods that have failed are started again (not for a TrainJob).",
            show_default="3",
        ),
    ] = None,
) -> None:
    """Print the manifest of a job for Kubernetes: a pod for each node, which runs `phalanx run`.

    The script is one of the image, which has Phalanx installed. The token by which ranks prove
    themselves is a fresh one each time, in a Secret. Nothing is sent: give the output to kubectl.

        phalanx kubernetes --nodes 2 -n 4 --image i train.py | kubectl apply -f -

        phalanx kubernetes --kind jobset --nodes 2 -n 4 --image i --volume saved:/saved train.py

    A script that ends with exit code 75 is started again, and that is not counted.
    """
    from phalanx.ops.clusters import kubernetes  # noqa: PLC0415 -- other commands need none of it

    options = {**context.params, "args": tuple(args or ()), "volumes": tuple(volumes or ())}
    options["target"] = options.pop("script")  # the others are those of a job, by the same names
    options["name"] = name or kubernetes.name_of(script.rpartition(".")[2] if module else script)
    job = kubernetes.KubernetesJob(**options)
    text = kubernetes.as_yaml(kubernetes.make_manifest(job, secrets.token_hex(32)))
    if not volumes:
        sys.stderr.write(
            "phalanx: no --volume: what the ranks save is lost when their pods are started again\n"
        )
    typer.echo(text, nl=False)

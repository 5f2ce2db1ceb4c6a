"""Kubernetes: a pod's environment, and the manifest of a job.

A pod is a host: its command is `phalanx run`, which starts the pod's ranks. Three kinds of objects
start one pod for each node:

    kind       the pods' place comes from   node 0 is               started again
    job        JOB_COMPLETION_INDEX         NAME-0.NAME             each pod, by its Job
    jobset     JOB_COMPLETION_INDEX         NAME-node-0-0.NAME      all pods, by the JobSet
    trainjob   PET_*, JOB_COMPLETION_INDEX  (PET_MASTER_ADDR)       each container, in its pod

The pods of a job have in common:

    token         a Secret, as a file that PHALANX_TOKEN_FILE names
    memory        shared memory of ranks has no name in the file system: it counts as the pod's
                  memory. Only torch's data loaders, and NCCL, need room in /dev/shm, which counts
                  as the pod's memory, too
    checkpoints   on volumes of claims
    exit code 75  "end, and start me again": a failure that is not counted, as is a pod that the
                  cluster has moved. Of a TrainJob, the runtime decides

Sources: kubernetes.io/docs/concepts/workloads/controllers/job (indexed completion, pod failure
policy), jobset.sigs.k8s.io (failure policy), github.com/kubeflow/trainer at v2.3.0 (PET_* are set
in pkg/runtime/framework/plugins/torch; a grace period in runtimePatches is new in that version).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from phalanx.errors import BackendUnavailableError, MisuseError
from phalanx.launch.report import AGAIN, STOPPED
from phalanx.wire.control import Endpoint

# ------------------------------------------------------------------------------
# The manifest.

PORT = 29500  # of the launcher's store on node 0; a pod has all ports for itself
_TO_END = 5  # seconds of a pod's grace that are the launcher's, when its ranks have ended
TOKEN_FOLDER = "/var/run/secrets/phalanx"
SHM = "/dev/shm"
_CONTAINER = "node"  # also of Kubeflow's runtimes
_JOB = "node"  # of a JobSet, whose only one it is
_RESTARTS = 3  # unless --max-restarts says

Object = dict[str, Any]  # an object of Kubernetes, as JSON has it


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """A script on `nodes` pods with `ranks` ranks each, as the options of `phalanx kubernetes`."""

    target: str
    args: tuple[str, ...] = ()
    module: bool = False
    kind: str = "job"
    name: str
    image: str
    nodes: int = 1
    ranks: int = 1
    memory: str = ""  # of a rank; "": no limit
    shm: str = ""  # of a pod, in /dev/shm
    volumes: tuple[str, ...] = ()  # CLAIM:PATH
    user: int | None = None
    grace: int = 120  # seconds from SIGTERM to SIGKILL
    max_restarts: int | None = None

    def check(self) -> None:
        """Raise `MisuseError` for options that the cluster would refuse, or misunderstand."""
        if self.kind not in KINDS:
            raise MisuseError(f"--kind {self.kind}: it is one of {', '.join(KINDS)}")
        if self.ranks < 1 or self.nodes < 1:
            raise MisuseError(
                f"--nodes {self.nodes} -n {self.ranks}: it takes at least one pod, and one rank"
            )
        if not _NAME.fullmatch(self.name):
            raise MisuseError(
                f"--name {self.name}: pods and their addresses are called by it, so it has at most "
                "40 characters: lower-case letters, digits and hyphens, the first a letter, the "
                "last no hyphen"
            )
        if not self.image or self.image.split() != [self.image]:
            raise MisuseError(f"--image {self.image!r}: it is the name of a container image")
        if self.user is not None and self.user < 1:
            raise MisuseError(f"--user {self.user}: it is the number of a user who is not root")
        if self.grace < 1:
            raise MisuseError(f"--grace {self.grace}: it is a number of seconds, at least 1")
        if self.max_restarts is not None and self.max_restarts < 0:
            raise MisuseError(f"--max-restarts {self.max_restarts}: it is 0 or more")
        if self.max_restarts is not None and self.kind == "trainjob":
            raise MisuseError(
                "--max-restarts with --kind trainjob: how often pods are started again is in the "
                "runtime (backoffLimit and failurePolicy of torch-distributed), not in a TrainJob; "
                "leave it out, or take --kind jobset"
            )
        for option, text in (("--memory", self.memory), ("--shm", self.shm)):
            if text:
                parse_quantity(text, option)
        paths = [_split_volume(volume)[1] for volume in self.volumes]
        taken = {TOKEN_FOLDER, *([SHM] if self.shm else [])}
        for number, path in enumerate(paths):
            if path in taken or path in paths[:number]:
                raise MisuseError(f"--volume {self.volumes[number]}: {path} is taken already")


_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,38}[a-z0-9])?")
_CLAIM = re.compile(r"[a-z0-9](?:[-.a-z0-9]{0,251}[a-z0-9])?")
_QUANTITY = re.compile(r"(\d+)([KMGT]i|[kMGT])?")
_UNITS: Mapping[str, int] = MappingProxyType(
    {f"{letter}i": 1024 ** (at + 1) for at, letter in enumerate("KMGT")}
    | {letter: 1000 ** (at + 1) for at, letter in enumerate("kMGT")}
)


def name_of(target: str) -> str:
    """Return a job's name, made of its script's: `my_package/Train_2.py` is `train-2`."""
    stem = re.sub(r"\.py$", "", target.rstrip("/").rpartition("/")[2]).lower()
    return re.sub(r"[^a-z0-9]+", "-", stem).lstrip("-0123456789")[:40].rstrip("-") or "phalanx"


def parse_quantity(text: str, option: str) -> int:
    """Return the bytes of a quantity such as `512Mi`; `MisuseError` if it is none."""
    match = _QUANTITY.fullmatch(text)
    if match is None or not int(match[1]):
        raise MisuseError(
            f"{option} {text}: it is a number of bytes as Kubernetes writes it: 512Mi, or 4Gi"
        )
    return int(match[1]) * _UNITS.get(match[2] or "", 1)


def _as_quantity(size: int) -> str:
    """Return a number of bytes in the largest unit that loses none."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)


def _split_volume(volume: str) -> tuple[str, str]:
    claim, _, path = volume.partition(":")
    if not _CLAIM.fullmatch(claim) or not re.fullmatch(r"/[^:]*[^:/]", path):
        raise MisuseError(
            f"--volume {volume}: it is CLAIM:PATH, the name of a PersistentVolumeClaim and the "
            "folder at which the ranks see it, such as checkpoints:/checkpoints"
        )
    return claim, path


def make_manifest(job: KubernetesJob, token: str) -> list[Object]:
    """Return the objects of `job`, whose ranks prove themselves with `token`.

    Raises as `job.check()` does.
    """
    job.check()
    # Immutable: the pods of one job hold one token.
    secret = {"type": "Opaque", "immutable": True, "stringData": {"token": token}}
    return [_object("v1", "Secret", _secret_name(job), **secret), *KINDS[job.kind](job)]


def as_yaml(objects: list[Object]) -> str:
    """Return the objects as one YAML document each; takes PyYAML, the extra `kubernetes`."""
    try:
        import yaml  # noqa: PLC0415
    except ImportError:
        raise BackendUnavailableError(
            "phalanx kubernetes writes YAML by PyYAML, which is not installed: "
            "pip install 'phalanx[kubernetes]'"
        ) from None
    return str(yaml.safe_dump_all(objects, sort_keys=False, explicit_start=True, width=100))


def _object(version: str, kind: str, name: str, **content: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **content}


def _secret_name(job: KubernetesJob) -> str:
    return f"{job.name}-token"


def _command(job: KubernetesJob, *options: str) -> list[str]:
    """Return a pod's command. Kubernetes replaces $(NAME) by a variable, $$ by a dollar sign."""
    module = ["-m"] if job.module else []
    grace = ["--grace", str(max(job.grace - _TO_END, 1))]
    words = ["phalanx", "run", *grace, *options, *module, job.target, *job.args]
    return [word.replace("$", "$$") for word in words]


def _container(job: KubernetesJob) -> Object:
    """Return the common part of a TrainJob's trainer and of the container of other pods."""
    return {
        "image": job.image,
        "env": [{"name": "PHALANX_TOKEN_FILE", "value": f"{TOKEN_FOLDER}/token"}],
    }


def _resources(job: KubernetesJob) -> Object:
    """Return the memory of a pod: that of its ranks with their shared memory, and /dev/shm."""
    if not job.memory:
        return {}
    size = job.ranks * parse_quantity(job.memory, "--memory")
    size += parse_quantity(job.shm, "--shm") if job.shm else 0
    memory = {"memory": _as_quantity(size)}
    return {"requests": memory, "limits": dict(memory)}


def _volumes(job: KubernetesJob) -> dict[str, tuple[str, Object]]:
    """Return each volume's mount and its source, by its name."""
    secret = {"secretName": _secret_name(job), "defaultMode": 0o400}
    volumes: dict[str, tuple[str, Object]] = {"token": (TOKEN_FOLDER, {"secret": secret})}
    if job.shm:
        room = {"medium": "Memory", "sizeLimit": job.shm}
        volumes["shm"] = SHM, {"emptyDir": room}
    for number, volume in enumerate(job.volumes):
        claim, path = _split_volume(volume)
        volumes[f"volume-{number}"] = path, {"persistentVolumeClaim": {"claimName": claim}}
    return volumes


def _pod(job: KubernetesJob) -> Object:
    """Return the common part of pods of all kinds: all but the container's command."""
    mounts = [
        {"name": name, "mountPath": path} | ({"readOnly": True} if name == "token" else {})
        for name, (path, _) in _volumes(job).items()
    ]
    pod: Object = {
        "terminationGracePeriodSeconds": job.grace,
        "containers": [{"name": _CONTAINER, "volumeMounts": mounts}],
        "volumes": [{"name": name, **what} for name, (_, what) in _volumes(job).items()],
    }
    if job.user is not None:
        ids = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), job.user)
        pod["securityContext"] = {"runAsNonRoot": True, **ids}
    return pod


def _indexed_job(job: KubernetesJob, subdomain: str, master: str, action: str) -> Object:
    """Return the spec of a Job with a pod for each node.

    `action` is applied to a pod that ends with "again", or that the cluster has moved: SIGTERM to
    one of the pods ends all of them with `STOPPED`.
    """
    endpoint = str(Endpoint(master, PORT))
    options = ["--nnodes", str(job.nodes), "-n", str(job.ranks), "--master", endpoint]
    pod = _pod(job)
    pod["containers"][0] |= {**_container(job), "command": _command(job, *options)}
    if resources := _resources(job):
        pod["containers"][0]["resources"] = resources
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    again = {"operator": "In", "values": [AGAIN, STOPPED]}
    return {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": action, "onPodConditions": disrupted},
                {"action": action, "onExitCodes": again},
            ]
        },
        "template": {
            "spec": {
                "restartPolicy": "Never",  # as a podFailurePolicy wants
                **({"subdomain": subdomain} if subdomain else {}),
                **pod,
            }
        },
    }


def _restarts(job: KubernetesJob) -> int:
    return _RESTARTS if job.max_restarts is None else job.max_restarts


def _job(job: KubernetesJob) -> list[Object]:
    headless = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # the ranks meet before their pods are ready
        "selector": {"batch.kubernetes.io/job-name": job.name},
    }
    spec = _indexed_job(job, job.name, f"{job.name}-0.{job.name}", "Ignore")
    spec["backoffLimit"] = _restarts(job) * job.nodes  # when a pod fails, all pods do
    return [
        _object("v1", "Service", job.name, spec=headless),
        _object("batch/v1", "Job", job.name, spec=spec),
    ]


def _jobset(job: KubernetesJob) -> list[Object]:
    # A Job that its policy fails has the reason PodFailurePolicy; any other failure counts.
    spec = _indexed_job(job, "", f"{job.name}-{_JOB}-0-0.{job.name}", "FailJob")
    again = {
        "name": "again",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    jobs = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": _restarts(job), "rules": [again]},
        "replicatedJobs": [{"name": _JOB, "replicas": 1, "template": {"spec": spec}}],
    }
    return [_object("jobset.x-k8s.io/v1alpha2", "JobSet", job.name, spec=jobs)]


def _trainjob(job: KubernetesJob) -> list[Object]:
    trainer = {
        **_container(job),
        "command": _command(job),  # its options are in PET_*
        "numNodes": job.nodes,
        "numProcPerNode": job.ranks,
    }
    if resources := _resources(job):
        trainer["resourcesPerNode"] = resources
    pod = {"template": {"spec": {"template": {"spec": _pod(job)}}}}
    patch = {"template": {"spec": {"replicatedJobs": [{"name": _JOB, **pod}]}}}
    spec = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "ClusterTrainingRuntime",
            "name": "torch-distributed",
        },
        "trainer": trainer,
        "runtimePatches": [{"manager": "phalanx/kubernetes", "trainingRuntimeSpec": patch}],
    }
    return [_object("trainer.kubeflow.org/v1alpha1", "TrainJob", job.name, spec=spec)]


KINDS: Mapping[str, Callable[[KubernetesJob], list[Object]]] = MappingProxyType(
    {"job": _job, "jobset": _jobset, "trainjob": _trainjob}
)
"""Kind -> what makes its objects, beside the Secret."""

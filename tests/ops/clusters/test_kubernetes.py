"""What pods are told, and the manifests; tests/clients holds them beside the real schemas."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.errors import BackendUnavailableError, MisuseError
from phalanx.ops.clusters.kubernetes import (
    KINDS,
    KubernetesJob,
    as_yaml,
    make_manifest,
    name_of,
)

TOKEN = "0123456789abcdef" * 4


# Manifests -------------------------------------------------------------------------------------


@pytest.fixture(params=KINDS)
def job(request: pytest.FixtureRequest) -> KubernetesJob:
    """A job of each kind."""
    return KubernetesJob(
        target="train.py", kind=request.param, name="train", image="i", nodes=3, ranks=4
    )


def pod_of(job: KubernetesJob) -> dict[str, Any]:
    """The specification of the pods; of a TrainJob, its runtime and its trainer put together."""
    spec = make_manifest(job, TOKEN)[-1]["spec"]
    if job.kind == "trainjob":
        [patch] = spec["runtimePatches"]
        spec = {**patch["trainingRuntimeSpec"]["template"]["spec"], "trainer": spec["trainer"]}
    trainer = dict(spec.get("trainer", {}))
    if "replicatedJobs" in spec:
        [replicated] = spec["replicatedJobs"]
        spec = replicated["template"]["spec"]
    pod: dict[str, Any] = spec["template"]["spec"]
    if "resourcesPerNode" in trainer:
        trainer["resources"] = trainer.pop("resourcesPerNode")
    [container] = pod["containers"]
    return {**pod, "containers": [{**container, **trainer}]}


def volumes_of(job: KubernetesJob) -> dict[str, dict[str, Any]]:
    """What is mounted where."""
    pod = pod_of(job)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = pod["containers"][0]["volumeMounts"]
    assert sorted(volumes) == sorted(mount["name"] for mount in mounts)
    return {mount["mountPath"]: volumes[mount["name"]] for mount in mounts}


def test_a_pod_runs_the_script_with_its_arguments(job: KubernetesJob) -> None:
    [container] = pod_of(replace(job, target="pkg.train", module=True, args=("-n", "7")))[
        "containers"
    ]
    assert container["image"] == "i"
    assert container["command"][:2] == ["phalanx", "run"]
    assert container["command"][-4:] == ["-m", "pkg.train", "-n", "7"]


def test_kubernetes_puts_no_variables_into_the_arguments(job: KubernetesJob) -> None:
    """It takes $$ for a plain dollar sign."""
    [container] = pod_of(replace(job, args=("$(HOME)", "$HOME", "$$")))["containers"]
    assert container["command"][-3:] == ["$$(HOME)", "$$HOME", "$$$$"]


def test_the_token_is_a_file_that_only_the_ranks_can_read(job: KubernetesJob) -> None:
    secret = make_manifest(job, TOKEN)[0]
    assert (secret["kind"], secret["stringData"]) == ("Secret", {"token": TOKEN})
    [container] = pod_of(job)["containers"]
    assert TOKEN not in str(pod_of(job))
    folder, _, name = container["env"][0]["value"].rpartition("/")
    assert (container["env"][0]["name"], name) == ("PHALANX_TOKEN_FILE", "token")
    mounted = volumes_of(job)[folder]["secret"]
    assert mounted == {"secretName": secret["metadata"]["name"], "defaultMode": 0o400}


def test_a_user_who_is_not_root_has_a_group_that_may_read_the_token(job: KubernetesJob) -> None:
    assert "securityContext" not in pod_of(job)
    ids = {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}
    assert pod_of(replace(job, user=1000))["securityContext"] == {"runAsNonRoot": True, **ids}


def test_the_memory_of_a_pod_is_that_of_its_ranks_and_its_dev_shm(job: KubernetesJob) -> None:
    def limit(**options: str) -> str | None:
        [container] = pod_of(replace(job, **options))["containers"]  # type: ignore[arg-type]
        resources = container.get("resources")
        assert resources is None or resources["limits"] == resources["requests"]
        return resources and resources["limits"]["memory"]

    assert limit() is limit(shm="1Gi") is None
    assert limit(memory="4Gi") == "16Gi"
    assert limit(memory="4Gi", shm="512Mi") == "16896Mi"
    assert limit(memory="1G") == "3906250Ki"


def test_there_is_a_dev_shm_only_where_it_is_asked_for(job: KubernetesJob) -> None:
    assert "/dev/shm" not in volumes_of(job)
    in_memory = {"medium": "Memory", "sizeLimit": "1Gi"}
    assert volumes_of(replace(job, shm="1Gi"))["/dev/shm"]["emptyDir"] == in_memory


def test_volumes_are_those_of_claims(job: KubernetesJob) -> None:
    volumes = volumes_of(replace(job, volumes=("saved:/saved", "data.v2:/in/data")))
    claims = {path: volumes[path]["persistentVolumeClaim"] for path in ("/saved", "/in/data")}
    assert claims == {"/saved": {"claimName": "saved"}, "/in/data": {"claimName": "data.v2"}}


def test_a_pod_that_has_to_go_has_time_to_save(job: KubernetesJob) -> None:
    """And its launcher ends before the pod is killed."""
    pod = pod_of(replace(job, grace=600))
    assert pod["terminationGracePeriodSeconds"] == 600
    assert pod["containers"][0]["command"][2:4] == ["--grace", "595"]


INDEX_OF_0 = {"job": "train-0.train", "jobset": "train-node-0-0.train"}


@pytest.mark.parametrize("kind", INDEX_OF_0)
def test_the_pods_of_a_job_meet_at_the_one_with_index_0(kind: str) -> None:
    job = KubernetesJob(target="t.py", kind=kind, name="train", image="i", nodes=3, ranks=4)
    [container] = pod_of(job)["containers"]
    words = ["--nnodes", "3", "-n", "4", "--master", f"{INDEX_OF_0[kind]}:29500"]
    assert container["command"][4:-1] == words


def test_the_pods_of_a_job_have_names_before_they_are_ready() -> None:
    _, service, made = make_manifest(KubernetesJob(target="t.py", name="train", image="i"), TOKEN)
    assert service["spec"]["clusterIP"] == "None"  # a name for each pod
    assert service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "train"}
    assert made["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]


def test_a_trainjob_says_how_many_and_its_runtime_where() -> None:
    job = KubernetesJob(target="t.py", kind="trainjob", name="train", image="i", nodes=3, ranks=4)
    spec = make_manifest(job, TOKEN)[-1]["spec"]
    assert spec["runtimeRef"]["name"] == "torch-distributed"
    assert (spec["trainer"]["numNodes"], spec["trainer"]["numProcPerNode"]) == (3, 4)
    assert spec["trainer"]["command"] == ["phalanx", "run", "--grace", "115", "t.py"]


# A pod that ends, and what is started again -----------------------------------------------------


def test_of_a_job_each_pod_is_started_again_and_leaving_is_not_counted() -> None:
    job = KubernetesJob(target="t.py", name="t", image="i", nodes=3, max_restarts=2)
    spec = make_manifest(job, TOKEN)[-1]["spec"]
    moved, again = spec["podFailurePolicy"]["rules"]
    assert moved["action"] == again["action"] == "Ignore"
    assert moved["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert again["onExitCodes"] == {"operator": "In", "values": [75, 143]}
    assert spec["backoffLimit"] == 2 * 3, "every failure is one of each pod"


def test_of_a_jobset_all_pods_are_started_again_and_leaving_is_not_counted() -> None:
    job = KubernetesJob(target="t.py", kind="jobset", name="t", image="i", nodes=3, max_restarts=2)
    spec = make_manifest(job, TOKEN)[-1]["spec"]
    inner = spec["replicatedJobs"][0]["template"]["spec"]
    assert inner["backoffLimit"] == 0
    assert {rule["action"] for rule in inner["podFailurePolicy"]["rules"]} == {"FailJob"}
    [rule] = spec["failurePolicy"]["rules"]
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert spec["failurePolicy"]["maxRestarts"] == 2


# What cannot be asked for ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "pod"}, "--kind pod: it is one of job, jobset, trainjob"),
        ({"nodes": 0}, "--nodes 0"),
        ({"ranks": 0}, "-n 0"),
        ({"name": "My_Job"}, "--name My_Job"),
        ({"name": "a" * 41}, "at most 40 characters"),
        ({"image": ""}, "--image ''"),
        ({"image": "a b"}, "--image 'a b'"),
        ({"memory": "4GB"}, "--memory 4GB.*512Mi"),
        ({"memory": "0"}, "--memory 0"),
        ({"shm": "lots"}, "--shm lots"),
        ({"volumes": ("saved",)}, "--volume saved: it is CLAIM:PATH"),
        ({"volumes": ("saved:here",)}, "--volume saved:here"),
        ({"volumes": ("Saved:/a",)}, "--volume Saved:/a"),
        ({"volumes": ("a:/a", "b:/a")}, "--volume b:/a: /a is taken"),
        ({"volumes": ("a:/dev/shm",), "shm": "1Gi"}, "/dev/shm is taken"),
        ({"user": 0}, "--user 0"),
        ({"grace": 0}, "--grace 0"),
        ({"max_restarts": -1}, "--max-restarts -1"),
        ({"max_restarts": 1, "kind": "trainjob"}, "torch-distributed.*--kind jobset"),
    ],
)
def test_what_a_cluster_would_refuse_is_refused(changes: dict[str, Any], words: str) -> None:
    job = KubernetesJob(target="t.py", name="train", image="i")
    with pytest.raises(MisuseError, match=words):
        make_manifest(replace(job, **changes), TOKEN)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("train.py", "train"),
        ("/opt/my_package/Train_2.py", "train-2"),
        ("examples/", "examples"),
        ("2nd.py", "nd"),
        ("_.py", "phalanx"),
        ("x" * 50, "x" * 40),
    ],
)
def test_a_job_is_called_after_its_script(target: str, name: str) -> None:
    assert name_of(target) == name
    KubernetesJob(target=target, name=name, image="i").check()


def test_without_pyyaml_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'phalanx\[kubernetes\]'"):
        as_yaml([])
    words = ["kubernetes", "--image", "i", "train.py"]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, BackendUnavailableError)
    assert not result.output

"""The manifests beside the schemas of what they are for: every field is known there, and fits.

Core objects are checked by kubernetes-validate; JobSets and TrainJobs by kubeflow-trainer-api, the
models that Kubeflow generates from its API and JobSet's. What such a model does not know it leaves
out: an object has to come back whole.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.ops.clusters.kubernetes import KINDS, KubernetesJob, as_yaml, make_manifest

validate = pytest.importorskip("kubernetes_validate")
models = pytest.importorskip("kubeflow_trainer_api.models")
yaml = pytest.importorskip("yaml")

TOKEN = "0123456789abcdef" * 4
CLUSTERS = ("1.31", "1.34", "1.37")  # the first has podFailurePolicy in its final form
MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}
DOCUMENT = Path(__file__).parents[2] / "docs" / "clusters.md"


def check(objects: Iterable[dict[str, Any]]) -> None:
    for one in objects:
        model = MODELS.get(one["kind"])
        if model is None:
            for cluster in CLUSTERS:
                validate.validate(one, cluster, strict=True)
        else:
            assert model.from_dict(one).to_dict() == one


@pytest.fixture(params=KINDS)
def job(request: pytest.FixtureRequest) -> KubernetesJob:
    return KubernetesJob(target="train.py", kind=request.param, name="train", image="i", nodes=2)


def test_the_smallest_manifest_fits(job: KubernetesJob) -> None:
    check(make_manifest(job, TOKEN))


def test_the_largest_manifest_fits(job: KubernetesJob) -> None:
    largest = replace(
        job,
        args=("--lr", "0.1"),
        ranks=4,
        memory="4Gi",
        shm="1Gi",
        volumes=("saved:/saved", "data:/data"),
        user=1000,
        grace=600,
        max_restarts=None if job.kind == "trainjob" else 5,
    )
    check(make_manifest(largest, TOKEN))


def test_the_pods_of_a_jobset_are_those_of_a_job() -> None:
    """Whose schema is stricter than that of JobSet's models, which look no further than the Job."""
    job = KubernetesJob(target="t.py", kind="jobset", name="train", image="i", user=1000)
    [_, jobset] = make_manifest(job, TOKEN)
    [replicated] = jobset["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    check([{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "t"}, "spec": spec}])


def test_a_field_that_is_not_in_a_schema_is_noticed(job: KubernetesJob) -> None:
    [*_, made] = make_manifest(job, TOKEN)
    made["spec"]["unheardOf"] = 1
    with pytest.raises((AssertionError, validate.ValidationError)):
        check([made])


def test_the_yaml_holds_the_objects(job: KubernetesJob) -> None:
    odd = replace(job, args=("no", "1e3", "2026-01-01", "# x", "a: b", "\u00e9\n", "'", "0x10"))
    objects = make_manifest(odd, TOKEN)
    assert list(yaml.safe_load_all(as_yaml(objects))) == objects


def test_each_manifest_has_a_token_of_its_own() -> None:
    words = ["kubernetes", "--image", "i", "train.py"]
    first, second = (CliRunner().invoke(app, words).stdout for _ in "ab")
    tokens = [next(yaml.safe_load_all(text))["stringData"]["token"] for text in (first, second)]
    assert tokens[0] != tokens[1]
    assert [len(token) for token in tokens] == [64, 64]


def test_the_job_for_elastic_training_fits() -> None:
    page = (DOCUMENT.parent / "elastic.md").read_text()
    (manifest,) = re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)
    check(yaml.safe_load_all(manifest))


COMMANDS = re.findall(r"^(phalanx kubernetes .*?train\.py[^|\n]*)", DOCUMENT.read_text(), re.M)


@pytest.mark.parametrize("words", COMMANDS)
def test_the_commands_in_the_document_print_manifests_that_fit(words: str) -> None:
    result = CliRunner().invoke(app, shlex.split(words)[1:])
    assert result.exit_code == 0, result.output
    check(yaml.safe_load_all(result.stdout))


def test_the_document_has_a_command_for_each_kind() -> None:
    kinds = {"job" if "--kind" not in words else words.split("--kind ")[1] for words in COMMANDS}
    assert {kind.split()[0] for kind in kinds} == set(KINDS)

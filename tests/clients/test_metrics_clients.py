"""The metrics as OpenTelemetry's SDK collects them, and as prometheus_client reads the text."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

for needed in ("opentelemetry.sdk", "prometheus_client"):
    pytest.importorskip(needed, reason=f"{needed} is not installed: make test-clients")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

import phalanx  # noqa: E402
from phalanx import Backend, simulate  # noqa: E402
from phalanx.core.counters import Counts, LoggedStep  # noqa: E402
from phalanx.ops.observe.metrics import METRICS, exposition  # noqa: E402

# The provider is global, and set once: each program is a process of its own.
PROGRAM = """
import os
os.environ["PHALANX_METRICS"] = "otel"
import torch, phalanx
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

reader = InMemoryMetricReader()

def set_up():
    metrics.set_meter_provider(MeterProvider([reader]))

def collected():
    data, found = reader.get_metrics_data(), {}
    for resource in data.resource_metrics if data else ():
        for scope in resource.scope_metrics:
            assert scope.scope.name == "phalanx"
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    found[metric.name, *sorted(point.attributes.items())] = point.value
    return found

if WHEN == "before":
    set_up()
backend = phalanx.init()
if WHEN == "after":
    set_up()
assert not [name for name in collected() if name[0] == "phalanx.step"]
for step in range(3):
    phalanx.all_reduce_(torch.ones(100), backend)
    backend.progress.log(step, loss=0.5)
rank = ("rank", "0")
operations = ("phalanx.operations", ("operation", "all_reduce"), rank)
found = collected()
assert found[operations] == 3, found
assert found["phalanx.step", rank] == 2, found
assert found["phalanx.logged", ("name", "loss"), rank] == 0.5, found
assert 0 < found["phalanx.operation_seconds", ("operation", "all_reduce"), rank], found
backend.close()
assert collected()[operations] == 3  # what is exported last is not lost
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_opentelemetry_collects_the_numbers_of_the_moment(when: str) -> None:
    """The program sets up its provider before it is a rank, or afterwards."""
    subprocess.run([sys.executable, "-c", f"WHEN = {when!r}{PROGRAM}"], check=True, timeout=120)


def test_prometheus_reads_the_text_as_it_was_meant() -> None:
    def train(backend: Backend) -> tuple[Counts, LoggedStep]:
        backend.counters()
        phalanx.all_reduce_(torch.ones(100), backend)
        backend.progress.log(7, **{'odd "name"\\\n': 0.5})
        backend.progress.log(8)
        return backend.counters(), backend.progress.latest

    for rank, (counts, step) in enumerate(simulate(train, 3)):
        families = {
            family.name: family
            for family in text_string_to_metric_families(exposition(counts, step))
        }
        for metric in METRICS:  # of a counter's name the parser takes the end off
            family = families[f"phalanx_{metric.name}"]
            assert (family.type, family.documentation) == (metric.kind, metric.help)
            told = [
                ({"rank": str(rank), **labels}, value)
                for labels, value in metric.read(counts, step)
            ]
            assert [(sample.labels, sample.value) for sample in family.samples] == told
            assert told or metric.name == "failures"

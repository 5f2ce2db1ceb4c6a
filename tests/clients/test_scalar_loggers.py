"""What `Scalars` writes, read back with the loggers: on 2 ranks, and by a run that resumes.

The first run is killed after it has logged steps 0 to 7, say; the second goes on at step 5.
"""

from __future__ import annotations

import math
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import needs, start

RESUMED_AT = 5
EXPECTED = {step: (step + 0.5 if step != 2 else math.nan) for step in range(RESUMED_AT)}
EXPECTED |= {step: step + 100.5 for step in range(RESUMED_AT, 8)}
"""By step the mean over the ranks: the second run logs 100 more; in step 2 there was a NaN."""


def assert_expected(found: list[tuple[int, float]]) -> None:
    assert [step for step, _ in sorted(found)] == list(EXPECTED), found
    for step, value in found:
        assert value == pytest.approx(EXPECTED[step], nan_ok=True), found


def log_twice(to: str, **environ: str) -> None:
    for first in (0, RESUMED_AT):
        out = start("phalanx run", "scalars_program.py", to, first, 8, **environ)
        assert "cannot write" not in out


@needs("tensorboard")
def test_tensorboards_event_accumulator_reads_each_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_twice(f"tensorboard:{tmp_path}")
    found = EventAccumulator(str(tmp_path)).Reload()
    assert found.Tags()["scalars"] == ["loss"]
    assert_expected([(event.step, event.value) for event in found.Scalars("loss")])


@needs("mlflow")
@pytest.mark.filterwarnings("ignore")  # of MLflow's own use of SQLAlchemy
def test_mlflows_client_reads_each_step_once_in_one_run(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/runs.db"
    log_twice(f"mlflow:{uri}")
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("phalanx")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "scalars_program"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert_expected([(metric.step, metric.value) for metric in history])


def contents(log: bytes) -> Iterator[bytes]:
    """The records of a file of wandb's: after 7 bytes, each has a checksum, a length and a type."""
    at = 7
    while at < len(log):
        _, length, kind = struct.unpack_from("<IHB", log, at)
        assert kind == 1, "a whole record: these are in one block of 32 KiB"
        yield log[at + 7 : at + 7 + length]
        at += 7 + length


@needs("wandb")
def test_wandbs_files_have_a_run_for_each_start(tmp_path: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    log_twice("wandb:offline", WANDB_DIR=str(tmp_path))
    files = sorted(tmp_path.rglob("*.wandb"))
    assert len(files) == 2
    runs = []
    for file in files:
        steps, group = {}, ""
        for content in contents(file.read_bytes()):
            record = Record()
            record.ParseFromString(content)
            group = record.run.run_group or group
            row = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            if row:
                steps[int(row["_step"])] = row["loss"]
        assert group == "scalars_program"
        runs.append(steps)
    first, second = sorted(runs, key=min)
    assert list(first) == list(range(8))
    assert "NaN" in first[2]
    assert {step: float(value) for step, value in second.items()} == {
        step: EXPECTED[step] for step in range(RESUMED_AT, 8)
    }


@needs("trackio")
def test_trackios_database_has_each_step_once_in_one_run(tmp_path: Path) -> None:
    log_twice("trackio", TRACKIO_DIR=str(tmp_path))
    (path,) = tmp_path.glob("*.db")
    with sqlite3.connect(path) as database:
        rows: list[tuple[Any, ...]] = list(
            database.execute("SELECT step, json_extract(metrics, '$.loss'), run_id FROM metrics")
        )
    assert len({row[2] for row in rows}) == 1
    found = [(step, math.nan if loss == "NaN" else loss) for step, loss, _ in rows]
    assert_expected(found)


@needs("tensorboard")
def test_what_cannot_be_written_is_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.touch()
    out = start("phalanx run", "scalars_program.py", f"tensorboard:{file}/folder", 0, 8)
    assert "trained to step 8" in out

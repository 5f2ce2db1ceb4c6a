"""The targets of `Scalars`: files and loggers of other packages, each in a few lines.

    jsonl:runs/a.jsonl           a line a record: {"step": 9, "time": 1.7e9, "loss": 2.3}
    tensorboard:runs/a           an event file in that folder
    mlflow:sqlite:///runs.db     a run of the experiment "phalanx" there, or on a server
    wandb:offline                a run of the project "phalanx" (or wandb:online)
    trackio                      a run of the project "phalanx" in Trackio's folder

A writer is made in rank 0's thread for it (`training/scalars.py`), when the first record comes,
with the first step that this process logs. Earlier records of that step, and of later ones, go:

    jsonl         is truncated
    tensorboard   gets a session start at that step; readers drop later records
    mlflow,       whose records cannot be removed one by one, copy those before it into a new run;
    trackio       the old run is deleted (MLflow can restore it)
    wandb         begins a new run of the same group; the old run stays as it is
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

from phalanx import files
from phalanx.training.scalars import Writer, WriterFactory

PROJECT = "phalanx"


class JsonLines:
    """A line of JSON for each record. NaN and infinity are NaN and Infinity, as Python's json does.

    Raises ValueError for a file whose lines are not records: it is left as it is.
    """

    def __init__(self, path: str, name: str, first: int) -> None:
        path = os.path.realpath(path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._descriptor = files.own_file(path)
        try:
            self._size = _bytes_before(path, first)
            os.ftruncate(self._descriptor, self._size)
        except BaseException:
            os.close(self._descriptor)
            raise

    def write(self, step: int, means: Mapping[str, float]) -> None:
        """Append a line: all of it, or nothing."""
        line = memoryview(json.dumps({"step": step, "time": time.time(), **means}).encode() + b"\n")
        written = 0
        try:
            while written < len(line):
                at = self._size + written
                written += os.pwrite(self._descriptor, line[written:], at)
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += written

    def close(self) -> None:
        os.close(self._descriptor)


_START = b'{"step": '  # of every line
_LONGEST = 16 << 20  # bytes of a line


def _bytes_before(path: str, first: int) -> int:
    """Return the number of bytes in lines of earlier steps; the last line may be half a line."""
    size = 0
    with files.reading(path) as file, open(file, "rb", closefd=False) as lines:
        for number, line in enumerate(iter(partial(lines.readline, _LONGEST), b""), 1):
            try:
                step = json.loads(line)["step"]
            except (ValueError, TypeError, KeyError, RecursionError):
                step = None
            cut_off = not line.endswith(b"\n") and len(line) < _LONGEST
            if cut_off and _START.startswith(line[: len(_START)]):
                break  # half a record, whose writer was killed
            if type(step) is not int:
                raise ValueError(
                    f"line {number} of {path} is no record of Scalars: give another file"
                )
            if step >= first:
                break
            size += len(line)
    return size


class TensorBoard:
    """An event file, by TensorBoard's own writer."""

    def __init__(self, folder: str, name: str, first: int) -> None:
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._writer = writer.EventFileWriter(folder)
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(
            self._events.Event(step=first, wall_time=time.time(), session_log=start)
        )

    def write(self, step: int, means: Mapping[str, float]) -> None:
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=mean)
            for name, mean in means.items()
        ]
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(
            self._events.Event(step=step, wall_time=time.time(), summary=summary)
        )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """A run in an MLflow store; one that resumes takes the newest run of its name."""

    def __init__(self, uri: str, name: str, first: int) -> None:
        mlflow = importlib.import_module("mlflow")
        self._metric = importlib.import_module("mlflow.entities").Metric
        self._client = client = mlflow.MlflowClient(tracking_uri=uri)
        name = name.replace("'", "")  # the quote of its search
        experiment = client.get_experiment_by_name(PROJECT)
        number = experiment.experiment_id if experiment else client.create_experiment(PROJECT)
        found = []
        if first > 0:
            where = f"attributes.run_name = '{name}'"
            newest = ["attributes.start_time DESC"]
            found = client.search_runs([number], where, max_results=1, order_by=newest)
        kept = [
            metric
            for run in found
            for key in run.data.metrics
            for metric in client.get_metric_history(run.info.run_id, key)
            if metric.step < first
        ]
        self._run = client.create_run(number, run_name=name).info.run_id
        for at in range(0, len(kept), 1000):  # the most that a request takes
            client.log_batch(self._run, kept[at : at + 1000])
        for run in found:
            client.delete_run(run.info.run_id)

    def write(self, step: int, means: Mapping[str, float]) -> None:
        """Log the metrics in one request."""
        now = int(1000 * time.time())
        metrics = [self._metric(name, mean, now, step) for name, mean in means.items()]
        self._client.log_batch(self._run, metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class WandB:
    """A run of Weights & Biases; one that resumes is another run of the same group."""

    def __init__(self, mode: str, name: str, first: int) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=PROJECT,
            group=name,
            name=f"{name} from step {first}" if first else name,
            mode=mode,
            reinit="create_new",
            settings=wandb.Settings(silent=True),
        )

    def write(self, step: int, means: Mapping[str, float]) -> None:
        self._run.log(dict(means), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run in Trackio's database; one that resumes takes the newest run of its name."""

    def __init__(self, target: str, name: str, first: int) -> None:
        self._storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        self._name = name
        self._id = os.urandom(16).hex()
        found = self._storage.get_latest_run_record_by_name(PROJECT, name) if first else None
        if found is not None:
            logged = self._storage.get_logs(PROJECT, name, run_id=found["id"])
            kept = [row for row in logged if row["step"] < first]
            if kept:
                self._log(
                    [{k: v for k, v in r.items() if k not in {"step", "timestamp"}} for r in kept],
                    [row["step"] for row in kept],
                    [row["timestamp"] for row in kept],
                )
            self._storage.delete_run(PROJECT, name, run_id=found["id"])

    def _log(
        self, rows: list[dict[str, Any]], steps: list[int], times: list[str] | None = None
    ) -> None:
        self._storage.bulk_log(
            PROJECT, self._name, rows, steps=steps, timestamps=times, run_id=self._id
        )

    def write(self, step: int, means: Mapping[str, float]) -> None:
        self._log([dict(means)], [step])

    def close(self) -> None:
        """Do nothing: all records are in the database."""


# ------------------------------------------------------------------------------
# The targets that `to` may name


class TargetKind(NamedTuple):
    """A kind of target: its writer, its package and extra, and the part after the colon."""

    make: Callable[[str, str, int], Writer]
    package: str
    target: str  # in words; empty: nothing
    allowed: tuple[str, ...] = ()


KINDS: Mapping[str, TargetKind] = {
    "jsonl": TargetKind(JsonLines, "", "a file"),
    "tensorboard": TargetKind(TensorBoard, "tensorboard", "a folder"),
    "mlflow": TargetKind(MLflow, "mlflow", "a tracking URI, such as sqlite:///runs.db"),
    "wandb": TargetKind(WandB, "wandb", "offline or online", ("offline", "online")),
    "trackio": TargetKind(Trackio, "trackio", ""),
}


def parse(to: object) -> WriterFactory:
    """Return a function that makes the writer of one of `to`.

    Raises ValueError for an unknown name, ModuleNotFoundError for a missing package. Imports none.
    """
    name, colon, target = to.partition(":") if isinstance(to, str) else ("", "", "")
    kind = KINDS.get(name)
    if kind is None:
        forms = ", ".join(f"{each}:..." if KINDS[each].target else each for each in KINDS)
        raise ValueError(f"Scalars writes to {forms}; not to {to!r}")
    if bool(target) != bool(kind.target) or (colon and not kind.target):
        form = f"{name}:TARGET, {kind.target}" if kind.target else name
        raise ValueError(f"Scalars writes to {form}; not to {to!r}")
    if kind.allowed and target not in kind.allowed:
        raise ValueError(f"{name}: takes {kind.target}, not {target!r}")
    found = None
    with suppress(ValueError):  # of a module that was made without a spec
        found = find_spec(kind.package) if kind.package else None
    if kind.package and found is None:
        raise ModuleNotFoundError(
            f"{to!r} needs the package {kind.package}: pip install 'phalanx[{name}]'"
        )
    return partial(kind.make, target)

"""`Scalars`: means over ranks and steps, in files, of which each step is in there once."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from clusters import Tcp
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import phalanx
from phalanx import Backend, DesyncError, MisuseError, Scalars, simulate
from phalanx.ops.loggers import JsonLines


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def log_steps(path: Path, steps: range, *, every: int = 1, **options: Any) -> Any:
    def run(backend: Backend) -> None:
        with Scalars(backend, [f"jsonl:{path}"], every=every, **options) as scalars:
            for step in steps:
                scalars.log(step, loss=float(step), rank=backend.rank)

    return run


NUMBERS = st.floats(-1e6, 1e6, width=32)
NAMES = st.sets(st.sampled_from(["loss", "lr", "norm"]))


@settings(max_examples=examples(80), deadline=None)
@given(ranks=st.integers(1, 4), every=st.integers(1, 5), data=st.data())
def test_a_record_is_the_plain_mean_of_what_all_ranks_logged_in_its_steps(
    ranks: int, every: int, data: st.DataObject
) -> None:
    """In any steps, under any names, in any order of the names, as numbers or tensors."""
    steps = sorted(data.draw(st.sets(st.integers(0, 99), max_size=12)))
    names = {step: data.draw(NAMES) for step in steps}
    logged = [
        {step: {name: data.draw(NUMBERS) for name in names[step]} for step in steps}
        for _ in range(ranks)
    ]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a" / "b.jsonl"

        def run(backend: Backend) -> None:
            with Scalars(backend, [f"jsonl:{path}"], every=every) as scalars:
                for step in steps:
                    values = logged[backend.rank][step].items()
                    for_rank = sorted(values, reverse=backend.rank % 2 == 0)
                    tensors = {name: torch.tensor(value) for name, value in for_rank}
                    scalars.log(step, **(tensors if step % 2 else dict(for_rank)))

        simulate(run, ranks)
        found = records(path) if path.exists() else []
    windows = [steps[at : at + every] for at in range(0, len(steps), every)]
    assert [record["step"] for record in found] == [window[-1] for window in windows]
    for record, window in zip(found, windows, strict=True):
        for name in ("loss", "lr", "norm"):
            of_name = [
                of_rank[step][name]
                for of_rank in logged
                for step in window
                if name in of_rank[step]
            ]
            if not of_name:
                assert name not in record
                continue
            assert record[name] == pytest.approx(math.fsum(of_name) / len(of_name), abs=1e-6)


@settings(max_examples=examples(60), deadline=None)
@given(
    every=st.integers(1, 4),
    starts=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 12)), min_size=1, max_size=4),
)
def test_no_step_is_there_twice_however_often_a_run_resumes(
    every: int, starts: list[tuple[int, int]]
) -> None:
    """Each start begins at some step, takes some, and is followed by another."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.touch()
        expected: list[int] = []
        for first, count in starts:
            steps = range(first, first + count)
            simulate(log_steps(path, steps, every=every), 2)
            if count:
                ends = [steps[min(at + every, count) - 1] for at in range(0, count, every)]
                expected = [step for step in expected if step < first] + ends
            assert [record["step"] for record in records(path)] == expected


def test_ranks_over_tcp_write_one_record_for_all(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    Tcp().run(log_steps(path, range(10), every=5), 3)
    found = [(record["step"], record["loss"], record["rank"]) for record in records(path)]
    assert found == [(4, 2.0, 1.0), (9, 7.0, 1.0)]


def test_a_half_written_line_goes_and_a_foreign_file_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    simulate(log_steps(path, range(2)), 1)
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    simulate(log_steps(path, range(2, 4)), 1)
    assert [record["step"] for record in records(path)] == [0, 1, 2, 3]
    foreign = tmp_path / "notes.txt"
    for count, notes in enumerate(("what I did\n", "no end of a line"), 1):
        foreign.write_text(notes)
        simulate(log_steps(foreign, range(3)), 1)
        assert foreign.read_text() == notes
        assert caplog.text.count("cannot write") == count
    assert "line 1 of" in caplog.text


def test_nan_and_infinity_are_written_as_such(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"

    def run(backend: Backend) -> None:
        with Scalars(backend, [f"jsonl:{path}"], every=2) as scalars:
            scalars.log(0, loss=math.nan if backend.rank else 1.0, norm=1.0)
            scalars.log(1, loss=1.0, norm=math.inf)

    simulate(run, 2)
    (record,) = records(path)
    assert math.isnan(record["loss"])
    assert record["norm"] == math.inf
    assert '"loss": NaN, "norm": Infinity' in path.read_text()


def test_a_tensor_may_be_changed_after_it_was_logged(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"

    def run(backend: Backend) -> None:
        loss = torch.zeros(1, requires_grad=True)
        with Scalars(backend, [f"jsonl:{path}"], every=3) as scalars:
            for step in range(3):
                scalars.log(step, loss=loss)
                loss.data += 3

    simulate(run, 1)
    assert records(path)[0]["loss"] == 3.0


@pytest.mark.parametrize(
    "odd", [{"loss": 1.0, "norm": 1.0}, {"lr": 1.0}, {}], ids=["more", "other", "none"]
)
def test_ranks_that_log_other_names_are_told_of_both(odd: dict[str, float]) -> None:
    def run(backend: Backend) -> None:
        values = odd if backend.rank == 1 else {"loss": 1.0}
        with Scalars(backend, every=2) as scalars:
            for step in range(8):
                scalars.log(step, **values)

    names = ", ".join(sorted(odd)) or "nothing"
    with pytest.raises(DesyncError) as raised:
        simulate(run, 2)
    assert "Scalars.log(1) of loss" in str(raised.value)
    assert f"Scalars.log(1) of {names}" in str(raised.value)


def test_what_is_no_number_is_refused_and_named() -> None:
    def run(backend: Backend) -> None:
        with Scalars(backend) as scalars:
            with pytest.raises(TypeError, match=r"rank 0: log\(1\) .* loss is 'much'"):
                scalars.log(1, lr=1.0, loss="much")  # type: ignore[arg-type]
            for number in ("1.5", 10**400, torch.tensor(1j)):
                with pytest.raises(TypeError, match=r"rank 0: log\(1\) .* loss is "):
                    scalars.log(1, loss=number)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=r"loss has shape \[2\]"):
                scalars.log(1, loss=torch.ones(2))
            with pytest.raises(ValueError, match="cannot take the name 'time'"):
                scalars.log(1, time=1.0)
            scalars.log(1, loss=1.0)
            with pytest.raises(ValueError, match=r"log\(1\) after log\(1\): steps grow"):
                scalars.log(1, accuracy=1.0)
        with pytest.raises(MisuseError, match="closed"):
            scalars.log(2, loss=1.0)
        scalars.close()

    simulate(run, 1)


@pytest.mark.parametrize(
    ("to", "problem"),
    [
        (["csv:a"], "Scalars writes to jsonl:..., tensorboard:.*; not to 'csv:a'"),
        (["jsonl"], "Scalars writes to jsonl:TARGET, a file; not to 'jsonl'"),
        (["jsonl:"], "jsonl:TARGET"),
        (["mlflow:"], "mlflow:TARGET, a tracking URI"),
        (["trackio:here"], "Scalars writes to trackio; not to 'trackio:here'"),
        (["wandb:somewhere"], "wandb: takes offline or online, not 'somewhere'"),
        (["jsonl:a", "jsonl:a"], "has a target twice"),
        ([7], "not to 7"),
    ],
)
def test_what_is_no_target_is_refused_before_training(to: list[Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        simulate(lambda backend: Scalars(backend, to), 2)


def test_other_arguments_are_checked_on_every_rank() -> None:
    with pytest.raises(ValueError, match="every=0"):
        simulate(lambda backend: Scalars(backend, every=0), 2)
    with pytest.raises(TypeError, match="it takes a list"):
        simulate(lambda backend: Scalars(backend, "jsonl:a"), 2)
    with pytest.raises(DesyncError, match=r"rank 1 has every=2, rank 0 has every=1"):
        simulate(lambda backend: Scalars(backend, every=1 + (backend.rank == 1)), 3)


def test_a_full_disk_is_a_warning_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has room again later: then the next records are there, each a whole line."""
    path, room, real = tmp_path / "a.jsonl", iter([True, False, False, True]), os.pwrite

    def pwrite(descriptor: int, content: Any, at: int) -> int:
        if next(room):
            return real(descriptor, content, at)
        real(descriptor, content[:5], at)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    simulate(log_steps(path, range(4)), 2)
    assert [record["step"] for record in records(path)] == [0, 3]
    assert caplog.text.count("cannot write the record of step 1") == 1
    assert caplog.text.count("cannot write") == 1


def test_the_progress_of_every_rank_is_what_it_logged() -> None:
    def run(backend: Backend) -> None:
        with Scalars(backend) as scalars:
            scalars.log(3, loss=torch.tensor(backend.rank + 0.5), lr=0.1)
        latest = backend.progress.latest
        assert (latest.number, latest.values) == (3, {"loss": backend.rank + 0.5, "lr": 0.1})

    simulate(run, 2)


def test_an_error_of_the_program_passes_through_and_what_was_exchanged_is_written(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.jsonl"

    def run(backend: Backend) -> None:
        with Scalars(backend, [f"jsonl:{path}"], every=1) as scalars:
            for step in range(5):
                scalars.log(step, loss=1.0)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        simulate(run, 1)
    assert [record["step"] for record in records(path)] == [0, 1, 2]


def test_a_rank_that_dies_is_named_as_by_any_collective() -> None:
    def run(backend: Backend) -> None:
        with Scalars(backend, every=1) as scalars:
            for step in range(6):
                scalars.log(step, loss=1.0)
                if backend.rank == 1 and step == 2:
                    return

    with pytest.raises(phalanx.DistributedError):
        simulate(run, 2)


def test_a_file_with_two_names_is_written_into_under_this_one_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    simulate(log_steps(path, range(3)), 1)
    os.link(path, tmp_path / "victim")
    before = path.read_text()
    simulate(log_steps(path, range(2, 5)), 1)
    assert [record["step"] for record in records(path)] == [0, 1, 2, 3, 4]
    assert (tmp_path / "victim").read_text() == before


def test_a_line_of_any_length_is_not_taken_for_half_a_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 0, "loss": "' + "x" * (17 << 20) + '"}\n')
    with pytest.raises(ValueError, match=r"line 1 .* is no record"):
        JsonLines(str(path), "", 0)
    assert path.stat().st_size > 17 << 20

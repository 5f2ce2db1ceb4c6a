"""The benchmarks of compression: what they train, count, compare, keep, and complain of."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import phalanx as px

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import slow_link
from compressed_training.pictures import draw
from compressed_training.rows import DENSE, chosen, rows
from compressed_training.runs import OtherRunsError, Run, Runs
from compressed_training.summary import complaints, curve, summarize, verdicts
from compressed_training.tables import markdown_of, table_of
from compressed_training.timing import in_one_process, time_all, times_faster
from compressed_training.training import plain_losses, read_lesson, settings_of, train
from language_model.options import Options
from loss_against_bytes import check, make_missing

FEW = ("4 bits + ef", "top 1 %", "power 4 bf16 + ef")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("one two three four five six seven eight nine ten\n" * 60)
    small = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch_size": 2}
    return Options(data=str(path), steps=4, eval_every=3, **small)


@pytest.fixture(scope="module")
def made(options: Options) -> dict[str, Run]:
    """A run of each of all rows, on two simulated ranks."""
    lesson, table = read_lesson(options), rows()

    def train_all(backend: px.Backend) -> dict[str, Run]:
        return {name: train(name, row, options, lesson, backend) for name, row in table.items()}

    return px.simulate(train_all, 2)[0]


def run(row: str, seed: int, loss: float, nbytes: float, what: str = "so") -> Run:
    return Run(row, what, seed, [0, 9], [5.0, loss], [0.0, nbytes], [3.0], 0.1, 8, 8, True)


def test_all_ways_train_alike_and_count_what_is_sent(made: dict[str, Run], options: Options):
    table = rows()
    for one in made.values():
        assert complaints(one, []) == []
        assert one.steps == [0, 3, 4]
        assert one.training[0] == made[DENSE].training[0]  # the same model, on the same batch
        assert one.bytes_sent[0] == 0 <= one.bytes_sent[1] < one.bytes_sent[-1]
        hashes = 16 * 4 if table[one.row].syncs else 0  # by which ranks compare copies
        assert one.counted <= one.wire <= one.counted + hashes


def test_dense_training_is_that_of_one_process_with_the_joined_batch(
    made: dict[str, Run], options: Options
):
    lesson = read_lesson(options)
    plain = plain_losses(options, lesson, 2, 4)
    assert made[DENSE].training == pytest.approx(plain, rel=1e-5)
    assert complaints(made[DENSE], plain) == []
    (complaint,) = complaints(made[DENSE], [plain[0], plain[1] * 1.01])
    assert "dense, seed 0: the loss of step 1 is" in complaint


def test_what_is_wrong_with_a_run_is_said(made: dict[str, Run]):
    one = made["top 1 %"]
    (parted,) = complaints(replace(one, identical=False), [])
    assert parted == "top 1 %, seed 0: the ranks ended with other parameters"
    (miscounted,) = complaints(replace(one, counted=0.5 * one.wire), [])
    assert "bytes were counted" in miscounted


def test_a_loss_that_is_no_number_is_no_match_for_one_process(made: dict[str, Run]):
    broken = replace(made[DENSE], training=[float("nan")])
    assert len(complaints(broken, [3.0])) == 1


def test_rows_are_compared_with_dense_of_the_same_seed_by_their_medians():
    runs = Runs({})
    for seed, (dense, other) in enumerate([(2.0, 2.02), (4.0, 4.4), (1.0, 1.02)]):
        runs.put(run(DENSE, seed, dense, 9_000.0))
        runs.put(run("top 1 % kept", seed, other, 100.0))
    runs.put(run("half", 7, 2.5, 4_500.0))  # no dense one has this seed
    plain, half, top = summarize(runs, rows())
    assert plain.above == (0, 0, 0)
    assert (half.above, half.fewer) == (None, None)
    assert top.above == pytest.approx((0.01, 0.02, 0.10))
    assert top.fewer == 90
    assert top.loss == (1.02, 2.02, 4.4)
    assert curve(runs.of(DENSE)) == ([0, 9], [5.0, 2.0])
    assert verdicts([plain, half, top], rows()) == [
        (
            True,
            "top 1 % kept: +2.0% of the dense loss with 90 times fewer bytes: reaches the target "
            "of +3% with 30",
        )
    ]


@pytest.mark.parametrize(("loss", "nbytes"), [(2.07, 100.0), (2.0, 1_000.0), (float("nan"), 1.0)])
def test_a_target_is_missed_by_too_much_loss_or_too_many_bytes(loss: float, nbytes: float):
    runs = Runs({}, [run(DENSE, 0, 2.0, 9_000.0), run("top 1 % kept", 0, loss, nbytes)])
    ((reached, said),) = verdicts(summarize(runs, rows()), rows())
    assert not reached
    assert "MISSES" in said


def test_runs_survive_their_file_and_one_made_in_another_way_is_made_again(tmp_path: Path):
    path = tmp_path / "runs.json"
    runs = Runs({"steps": 9, "ranks": 2}, [run("half", 0, 2.0, 1.0), run("half", 1, 2.5, 1.0)])
    runs.save(path)
    again = Runs.load(path, {"steps": 9, "ranks": 2})
    assert again == runs
    assert again.find("half", "so", 1) == runs.runs[1]
    assert again.find("half", "otherwise", 1) is None
    again.put(run("half", 1, 2.2, 1.0, "otherwise"))
    assert [one.held_out[-1] for one in again.of("half")] == [2.0, 2.2]
    with pytest.raises(OtherRunsError, match=r"has runs with steps 9, not 10: ask for the same"):
        Runs.load(path, {"steps": 10, "ranks": 2})


def test_what_is_missing_is_made_and_kept_run_by_run(tmp_path: Path, options: Options):
    path, known = tmp_path / "runs.json", Runs(settings_of(options, 2))
    short = replace(options, steps=2)

    def make(*wanted: tuple[str, int]) -> None:
        px.simulate(lambda backend: make_missing(backend, short, list(wanted), path, known), 2)

    make((DENSE, 0), (DENSE, 1))
    assert [one.seed for one in Runs.load(path, known.settings).runs] == [0, 1]
    make(("top 1 %", 0))
    again = Runs.load(path, settings_of(options, 2))
    assert [(one.row, one.seed) for one in again.runs] == [(DENSE, 0), (DENSE, 1), ("top 1 %", 0)]
    assert again.runs[0].training != again.runs[1].training
    assert check(again, short) == []


def test_a_row_says_all_of_itself_and_a_name_of_none_is_refused():
    assert str(rows()["top 1 % + ef"]).startswith("DDP(compression=ErrorFeedback(TopK(0.01)))")
    assert len({str(row) for row in rows().values()}) == len(rows())
    assert list(chosen(["half"])) == [DENSE, "half"]
    assert chosen([]).keys() == rows().keys()
    with pytest.raises(ValueError, match=r"no row is called 'nothing'; there are: dense; half"):
        chosen(["nothing"])


def test_tables_and_the_picture_have_every_row(made: dict[str, Run], tmp_path: Path):
    diverged = replace(made["half"], row="top 1 % + ef", held_out=[5.0, 9.0, float("nan")])
    runs = Runs({}, [*made.values(), replace(diverged, seed=1)])
    summaries = summarize(runs, rows())
    console = Console(width=200, record=True, quiet=False, file=(tmp_path / "out").open("w"))
    console.print(table_of(summaries, title="rows", steps=4))
    console.file.close()
    shown, document = console.export_text(), markdown_of(summaries, 4)
    for name in rows():
        assert name in shown
        assert f"| {name} |" in document
    assert draw(tmp_path / "a.png", runs, summaries, "rows")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_steps_are_timed_in_turn_and_have_the_bits_of_one_process(options: Options):
    lesson, table = read_lesson(options), slow_link.ways(",".join(FEW))
    how = {"rounds": 2, "steps": 1, "first": 2, "bytes_out": lambda: 0}
    timed = px.simulate(lambda backend: time_all(table, options, lesson, backend, **how), 2)[0]
    assert list(timed) == [slow_link.ALONE, DENSE, "dense, 1 MiB buckets", *FEW]
    for name, one in timed.items():
        assert len(one.seconds) == 2
        assert one.begun == in_one_process(table[name], options, lesson, 2, 2)
        assert (len(set(one.ended)) == 1) == (name != slow_link.ALONE)


def test_how_much_faster_is_the_median_of_the_rounds_ratios():
    assert times_faster([10.0, 10.0, 30.0], [2.0, 5.0, 3.0]) == 5

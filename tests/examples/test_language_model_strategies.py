"""The example with every strategy: the same losses, and checkpoints that all of them load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from language_model.progress import TrainingProgress
from language_model.setup import Run, prepare
from language_model_runs import TINY, checkpoints, losses, parameters, train_on, write_text
from train_language_model import distribute, evaluate, train

import phalanx as px

STEPS = 5
BATCH = 12  # windows a step, over all ranks


def arguments(folder: Path, ranks: int, strategy: str, *more: str) -> list[str]:
    return [
        *(f"--data={folder / 'text.txt'}", f"--out={folder / 'out'}", f"--steps={STEPS}"),
        *(f"--batch-size={BATCH // ranks}", f"--strategy={strategy}", *more),
    ]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """On one rank, with DDP: what plain training gives."""
    folder = tmp_path_factory.mktemp("reference")
    write_text(folder)
    return train_on(1, arguments(folder, 1, "ddp"))[0]


def assert_same(run: Run, reference: Run) -> None:
    assert losses(run.history) == pytest.approx(losses(reference.history), abs=1e-4)
    held_out = [point.loss for point in run.history.held_out]
    assert held_out == pytest.approx([point.loss for point in reference.history.held_out], abs=1e-4)
    torch.testing.assert_close(parameters(run), parameters(reference), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [(1, "full_shard"), (2, "full_shard"), (3, "shard_grad_op"), (2, "no_shard"), (4, "hybrid:2")],
)
def test_every_strategy_trains_as_one_rank_does(
    ranks: int, strategy: str, tmp_path: Path, reference: Run
) -> None:
    write_text(tmp_path)
    runs = train_on(ranks, arguments(tmp_path, ranks, strategy))
    for run in runs:
        assert_same(run, reference)
        assert torch.equal(parameters(run), parameters(runs[0]))


class KilledAfter(TrainingProgress):
    """As if the process were gone after so many steps."""

    def __init__(self, steps: int) -> None:
        super().__init__(0, done=0, visible=False)
        self._left = steps

    def advance(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


def test_a_run_goes_on_with_other_ranks_and_another_strategy_where_it_was_last_saved(
    tmp_path: Path, reference: Run
) -> None:
    write_text(tmp_path)
    legs = [(2, "full_shard", 2), (3, "shard_grad_op", 1), (1, "ddp", 1), (4, "hybrid", 2)]
    for number, (ranks, strategy, steps) in enumerate(legs):
        again = arguments(tmp_path, ranks, strategy, "--checkpoint-every=1", "--eval-every=0")
        if number:
            again.append("--resume")
        if number == len(legs) - 1:
            runs = train_on(ranks, again)
            break

        def killed(backend: px.Backend, again: list[str] = again, steps: int = steps) -> None:
            train(prepare([*TINY, *again], backend), backend, KilledAfter(steps + 1))

        with pytest.raises(KeyboardInterrupt):
            px.simulate(killed, ranks)
    assert checkpoints(tmp_path / "out") == ["000003-step-3", "000004-step-4", "000005-step-5"]
    for run in runs:
        assert [point.step for point in run.history.steps] == [1, 2, 3, 4, 5]
        assert_same(run, reference)


def test_ranks_that_have_fewer_held_out_windows_compute_as_often_as_the_others(
    tmp_path: Path,
) -> None:
    """65 windows on 2 ranks are two batches on rank 0, and one on rank 1."""
    write_text(tmp_path, repeat=400)

    def held_out(backend: px.Backend) -> tuple[int, float]:
        run = prepare([*TINY, *arguments(tmp_path, backend.world_size, "full_shard")], backend)
        some = replace(run.held_out, starts=run.held_out.starts[:65])
        model = distribute(run.model, "full_shard", backend)
        passes: list[None] = []
        model.register_forward_hook(lambda *_: passes.append(None))
        loss = evaluate(replace(run, held_out=some), model).loss
        return len(passes), loss

    ((_, alone),) = px.simulate(held_out, 1)
    found = px.simulate(held_out, 2)
    assert [passes for passes, _ in found] == [2, 2]
    assert [loss for _, loss in found] == pytest.approx([alone, alone], abs=1e-5)


@pytest.mark.parametrize("strategy", ["local_sgd:2", "diloco:2"])
def test_ranks_that_train_by_themselves_end_with_one_model_and_resume_as_if_uninterrupted(
    strategy: str, tmp_path: Path
) -> None:
    """Held-out losses are looked at, and a checkpoint is written, between two meetings."""
    write_text(tmp_path)
    common = ["--checkpoint-every=3", "--eval-every=1"]
    whole = train_on(2, arguments(tmp_path, 2, strategy, *common, f"--out={tmp_path / 'whole'}"))
    again = arguments(tmp_path, 2, strategy, *common)

    def killed(backend: px.Backend) -> None:
        train(prepare([*TINY, *again], backend), backend, KilledAfter(4))

    with pytest.raises(KeyboardInterrupt):
        px.simulate(killed, 2)
    resumed = train_on(2, [*again, "--resume"])
    for rank in range(2):
        assert losses(resumed[rank].history) == losses(whole[rank].history)
        assert resumed[rank].history.held_out == whole[rank].history.held_out
        assert torch.equal(parameters(resumed[rank]), parameters(whole[0]))
    assert whole[0].history.held_out[-1].loss < whole[0].history.held_out[0].loss


class ToldAfter(TrainingProgress):
    """Rank 1 is given notice after so many steps."""

    def __init__(self, steps: int, notice: px.Notice, rank: int) -> None:
        super().__init__(0, done=0, visible=False)
        self._left, self._notice, self._rank = steps, notice, rank

    def advance(self) -> None:
        self._left -= 1
        if self._left == 0 and self._rank == 1:
            self._notice.give()


@pytest.mark.parametrize("strategy", ["ddp", "full_shard"])
def test_ranks_that_are_told_to_leave_save_and_go_on_later_bit_for_bit(
    strategy: str, tmp_path: Path
) -> None:
    write_text(tmp_path)
    common = ["--checkpoint-every=0", "--eval-every=0"]
    whole = train_on(2, arguments(tmp_path, 2, strategy, *common, f"--out={tmp_path / 'whole'}"))
    again = arguments(tmp_path, 2, strategy, *common)

    def told(backend: px.Backend) -> int:
        with px.Notice(backend, signals=(), every=0.0) as notice:
            run = prepare([*TINY, *again], backend)
            train(run, backend, ToldAfter(1, notice, backend.rank), notice)
        return notice.exit_code

    assert px.simulate(told, 2) == [75, 75]
    assert checkpoints(tmp_path / "out") == ["000001-step-3"]
    for run in train_on(2, [*again, "--resume"]):
        assert losses(run.history) == losses(whole[0].history)
        assert torch.equal(parameters(run), parameters(whole[0]))


def test_a_run_that_has_met_seldom_goes_on_with_other_ranks_and_strategies(tmp_path: Path) -> None:
    write_text(tmp_path)
    for number, (ranks, strategy) in enumerate(
        [(2, "diloco:3"), (3, "local_sgd:2"), (2, "full_shard"), (4, "diloco:3"), (1, "ddp")]
    ):
        more = [f"--steps={number + 1}", *(["--resume"] if number else [])]
        runs = train_on(ranks, arguments(tmp_path, ranks, strategy, *more))
        for run in runs:
            assert [point.step for point in run.history.steps] == [*range(1, number + 2)]
            assert torch.equal(parameters(run), parameters(runs[0]))


@pytest.mark.parametrize(
    ("a_step", "said"), [(0.5, "94 steps to go: about 47 s on this machine\n"), (0.1, "")]
)
def test_after_a_few_steps_it_says_how_long_the_others_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], a_step: float, said: str
) -> None:
    times = iter([20.0 + a_step * number for number in range(6)])
    monkeypatch.setattr("language_model.progress.monotonic", lambda: next(times))
    progress = TrainingProgress(100, done=0, visible=True)
    for _ in range(7):
        progress.advance()
    assert capsys.readouterr().out == said

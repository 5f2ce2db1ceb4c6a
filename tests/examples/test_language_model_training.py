from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from language_model.progress import TrainingProgress
from language_model.setup import Run, prepare
from language_model_runs import TINY, checkpoints, losses, parameters, train_on, write_text
from matplotlib import image
from train_language_model import train

import phalanx as px


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path)


def arguments(text: Path, out: Path, **options: object) -> list[str]:
    named = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return [f"--data={text}", f"--out={out}", *named]


def test_the_loss_falls_and_the_files_are_there(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "out"
    train_on(2, arguments(text, out, steps=40, batch_size=8, learning_rate=0.02, eval_every=20))

    log = json.loads((out / "log.json").read_text())
    assert log["world_size"] == 2
    assert [point["step"] for point in log["steps"]] == list(range(1, 41))
    assert [point["step"] for point in log["held_out"]] == [0, 20, 40]
    assert log["final"]["held_out_before"] == pytest.approx(5.5, abs=0.3)
    assert log["final"]["held_out_after"] < 3.0
    for point in log["steps"]:
        assert point["tokens_per_second"] > 0
        assert 0 <= point["communication"] <= 1
    assert log["options"]["steps"] == 40
    assert log["sample"].startswith("def ")
    height, width, channels = image.imread(out / "loss.png").shape
    assert width > height > 400
    assert channels in (3, 4)
    assert sorted(path.name for path in out.iterdir()) == ["checkpoints", "log.json", "loss.png"]
    assert checkpoints(out) == ["000001-step-40"]

    shown = capsys.readouterr().out
    assert "2 ranks x 8 windows x 16 bytes = 256 tokens a step" in shown
    assert "step 40/40  loss " in shown
    assert "held-out loss  5." in shown
    assert shown.count("A GPT of") == 1
    assert "000001-step-40" in shown


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_many_ranks_train_as_one_rank_with_the_batch_of_all(
    ranks: int, text: Path, tmp_path: Path
) -> None:
    (one,) = train_on(1, arguments(text, tmp_path / "one", steps=12, batch_size=12))
    many = train_on(ranks, arguments(text, tmp_path / "many", steps=12, batch_size=12 // ranks))
    assert losses(many[0].history) == pytest.approx(losses(one.history), abs=1e-4)
    for ours, theirs in zip(many[0].history.held_out, one.history.held_out, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-4)
    for other in many[1:]:
        assert torch.equal(parameters(other), parameters(many[0]))
        assert other.history == many[0].history


class InterruptedAt(TrainingProgress):
    """Ctrl-C after so many steps."""

    def __init__(self, step: int) -> None:
        super().__init__(0, done=0, visible=False)
        self._left = step

    def advance(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


def test_a_resumed_run_ends_as_if_it_had_not_been_interrupted(text: Path, tmp_path: Path) -> None:
    options = {"steps": 14, "batch_size": 4, "eval_every": 4, "checkpoint_every": 6}
    whole = train_on(2, arguments(text, tmp_path / "whole", **options))

    def interrupted(backend: px.Backend) -> None:
        train(prepare([*TINY, *again], backend), backend, InterruptedAt(10))

    again = arguments(text, tmp_path / "again", **options)
    with pytest.raises(KeyboardInterrupt):
        px.simulate(interrupted, 2)
    assert len(json.loads((tmp_path / "again" / "log.json").read_text())["steps"]) == 6

    resumed = train_on(2, [*again, "--resume"])
    for rank in range(2):
        assert losses(resumed[rank].history) == losses(whole[rank].history)
        assert resumed[rank].history.held_out == whole[rank].history.held_out
        assert torch.equal(parameters(resumed[rank]), parameters(whole[rank]))


def test_a_finished_run_can_be_resumed_and_stays_as_it_is(text: Path, tmp_path: Path) -> None:
    again = arguments(text, tmp_path, steps=3)
    (before,) = train_on(1, again)
    (after,) = train_on(1, [*again, "--resume"])
    assert after.history == before.history
    assert torch.equal(parameters(after), parameters(before))


def test_a_run_that_begins_anew_beside_checkpoints_says_what_resume_would_take(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_on(1, arguments(text, tmp_path, steps=1))
    assert "begins anew" not in capsys.readouterr().out
    train_on(2, arguments(text, tmp_path, steps=1))
    said = capsys.readouterr().out
    assert said.count("It begins anew") == 1
    assert "--resume would go on from " in said
    assert checkpoints(tmp_path) == ["000001-step-1", "000002-step-1"]


def test_the_same_seed_gives_the_same_run(text: Path, tmp_path: Path) -> None:
    def run(seed: int) -> Run:
        return train_on(1, arguments(text, tmp_path, steps=3, seed=seed))[0]

    first, again, other = run(1), run(1), run(2)
    assert losses(first.history) == losses(again.history) != losses(other.history)
    assert replace(first.options) == again.options

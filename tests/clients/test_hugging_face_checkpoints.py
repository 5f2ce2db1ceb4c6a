"""Models of Hugging Face's, trained on two ranks and exported: `from_pretrained` has the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))

import pytest
import torch
from programs import needs
from typer.testing import CliRunner

import phalanx
from phalanx import FSDP, Backend, save_checkpoint
from phalanx.cli.app import app

pytestmark = needs("transformers")
TOKENS = torch.arange(60).reshape(4, 15) % 37


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=37, n_positions=32, n_embd=16, n_layer=3, n_head=2)
    )


def llama(*, tied: bool = False) -> Any:
    from transformers_program import tiny_llama

    # The config of a model that is trained in float32 may say bfloat16.
    return tiny_llama(layers=11, tie_word_embeddings=tied, dtype="bfloat16").float()


def tied_llama() -> Any:
    return llama(tied=True)


def train(make: Callable[[], Any], folder: Path) -> torch.Tensor:
    """Some steps of FSDP on two ranks, saved; the logits that the model then has."""
    models = [make() for _ in range(2)]

    def run(backend: Backend) -> torch.Tensor:
        model = FSDP(models[backend.rank], backend)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        mine = TOKENS[backend.rank :: 2]
        for _ in range(3):
            model(input_ids=mine, labels=mine).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        save_checkpoint(folder / "runs", model=model, optimizer=optimizer, step=3)
        with torch.no_grad():
            return model.eval()(input_ids=TOKENS).logits

    logits, others = phalanx.simulate(run, 2)
    assert torch.equal(logits, others)
    models[0].config.save_pretrained(folder / "config")
    return logits


@pytest.mark.parametrize("shard_size", ["5GB", "20kB"])
@pytest.mark.parametrize("make", [gpt2, llama, tied_llama])
def test_from_pretrained_gives_the_same_logits_bit_for_bit(
    tmp_path: Path, make: Callable[[], Any], shard_size: str
) -> None:
    from transformers import AutoModelForCausalLM

    expected = train(make, tmp_path)
    words = ["export", tmp_path / "runs", tmp_path / "out", "--format", "hf"]
    words += ["--config", tmp_path / "config", "--shard-size", shard_size]
    result = CliRunner().invoke(app, ["checkpoint", *map(str, words)])
    assert result.exit_code == 0, (result.output, result.exception)
    assert (tmp_path / "out" / "model.safetensors").exists() == (shard_size == "5GB")
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=TOKENS).logits, expected)


def test_the_files_have_what_save_pretrained_writes(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    train(gpt2, tmp_path)
    words = ["export", tmp_path / "runs", tmp_path / "out", "--format", "hf"]
    result = CliRunner().invoke(
        app, ["checkpoint", *map(str, words), "--config", str(tmp_path / "config")]
    )
    assert result.exit_code == 0, result.output
    AutoModelForCausalLM.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_what_save_pretrained_wrote_loads_into_fsdp_on_two_ranks(
    tmp_path: Path, make: Callable[[], Any]
) -> None:
    theirs = make()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    with torch.no_grad():
        expected = theirs.eval()(input_ids=TOKENS).logits
    models = [make() for _ in range(2)]
    with torch.no_grad():
        for parameter in (p for model in models for p in model.parameters()):
            parameter.zero_()

    def load(backend: Backend) -> torch.Tensor:
        model = FSDP(models[backend.rank], backend)
        phalanx.load_pretrained(tmp_path, model)
        with torch.no_grad():
            return model.eval()(input_ids=TOKENS).logits

    for logits in phalanx.simulate(load, 2):
        assert torch.equal(logits, expected)

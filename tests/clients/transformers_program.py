"""A program for Hugging Face's Trainer as its users write them; nothing here knows of Phalanx.

    transformers_program.py FOLDER [BACKEND]

With BACKEND the process group is there before the Trainer, which takes it as it is; else the
Trainer makes its own, over Gloo. A tiny Llama learns to count: nothing is downloaded. Rank 0 prints
the log.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.distributed as dist
from transformers import (
    EvalPrediction,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

WORDS, LENGTH, SAMPLES = 64, 16, 36


class Counting(torch.utils.data.Dataset):
    """Sequences that begin anywhere and count."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(LENGTH) + 7 * index) % WORDS
        return {"input_ids": words, "labels": words}


def hits(found: EvalPrediction) -> dict[str, float]:
    guessed = found.predictions.argmax(-1)[:, :-1]
    return {"hits": float(np.sum(guessed == found.label_ids[:, 1:])), "of": float(guessed.size)}


def tiny_llama(*, layers: int = 2, **more: object) -> LlamaForCausalLM:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        **more,
    )
    return LlamaForCausalLM(config)


def new_trainer(folder: str, steps: int) -> Trainer:
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=5,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        disable_tqdm=True,
        report_to=[],
    )
    return Trainer(
        tiny_llama(),
        arguments,
        train_dataset=Counting(),
        eval_dataset=Counting(),
        compute_metrics=hits,
    )


def show(name: str, trainer: Trainer) -> None:
    for line in trainer.state.log_history:
        numbers = {key: line[key] for key in sorted(line) if "runtime" not in key}
        timeless = {key: value for key, value in numbers.items() if "_per_second" not in key}
        if trainer.is_world_process_zero():
            print("result", name, timeless, flush=True)


def main(folder: str, backend: str | None = None) -> None:
    if backend:
        dist.init_process_group(backend)
    trainer = new_trainer(folder, steps=4)
    if trainer.is_world_process_zero():
        print("result backend", dist.get_backend(), trainer.args.world_size)
    trainer.train()
    show("first", trainer)
    trainer = new_trainer(folder, steps=8)
    trainer.train(resume_from_checkpoint=True)
    show("resumed", trainer)
    found = trainer.predict(Counting())
    trainer.save_model()
    if trainer.is_world_process_zero():
        print("result predicted", found.predictions.shape, float(found.predictions.sum()))


if __name__ == "__main__":
    main(*sys.argv[1:])

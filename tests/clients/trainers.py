"""The table of trainers: what their programs prove, and what they refuse.

docs/clusters.md shows it. What works is named in the program, which `test_trainers.py` runs.
"""

from __future__ import annotations

from typing import NamedTuple

from tables import tried


class Refused(NamedTuple):
    """An expression that raises, after these imports, and the error."""

    imports: str
    expression: str
    error: str


class Trainer(NamedTuple):
    """One trainer: how it is told of Phalanx, and what is known of it."""

    name: str
    package: str  # its version is in constraints.txt
    program: str
    how: str
    works: tuple[str, ...]
    refused: Refused


FIXED = "ValueError: Your assigned backend phalanx is not available, please use gloo"
BEFORE = '`PHALANX_INSTEAD_OF_GLOO=1`, or `init_process_group("phalanx")` before it'
STRATEGY = '`{}(process_group_backend="phalanx")`, or `PHALANX_INSTEAD_OF_GLOO=1`'
TRAINERS = (
    Trainer(
        "Accelerate",
        "accelerate",
        "accelerate_program.py",
        BEFORE,
        (
            *("prepare", "accumulate", "clip_grad_norm_", "gather_for_metrics", "save_state"),
            *("load_state", "save_model", "reduce", "gather", "pad_across_processes"),
            *("split_between_processes", "gather_object", "broadcast_object_list"),
        ),
        Refused(
            "from accelerate import Accelerator, InitProcessGroupKwargs",
            'Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="phalanx")])',
            FIXED,
        ),
    ),
    Trainer(
        "Hugging Face Trainer",
        "transformers",
        "transformers_program.py",
        BEFORE,
        (
            *("train", "gradient_accumulation_steps", "max_grad_norm", "eval_strategy"),
            *("compute_metrics", "predict", "save_steps", "train(resume_from_checkpoint=True)"),
        ),
        Refused(
            "from transformers import TrainingArguments",
            'TrainingArguments(use_cpu=True, ddp_backend="phalanx")',
            FIXED,
        ),
    ),
    Trainer(
        "Lightning Fabric",
        "lightning",
        "fabric_program.py",
        STRATEGY.format("DDPStrategy"),
        (
            *("DDPStrategy", "ModelParallelStrategy", "fully_shard", "setup_module"),
            *("setup_dataloaders", "no_backward_sync", "clip_gradients", "save", "load"),
            *("all_reduce", "all_gather", "broadcast", "barrier"),
        ),
        Refused(
            "from lightning.fabric import Fabric\n"
            "from lightning.fabric.strategies import FSDPStrategy",
            'Fabric(accelerator="cpu", strategy=FSDPStrategy(process_group_backend="phalanx"))',
            "ValueError: You selected the FSDP strategy but FSDP is only available on GPU.",
        ),
    ),
    Trainer(
        "Lightning",
        "lightning",
        "lightning_program.py",
        STRATEGY.format("DDPStrategy"),
        (
            *("DDPStrategy", "ModelParallelStrategy", "fully_shard", "parallelize_module"),
            *("sync_dist=True", 'reduce_fx="max"', "MulticlassAccuracy", "ModelCheckpoint"),
            *("ckpt_path", "accumulate_grad_batches", "gradient_clip_val"),
        ),
        Refused(
            "from lightning.pytorch import Trainer\n"
            "from lightning.pytorch.strategies import FSDPStrategy",
            'Trainer(accelerator="cpu", strategy=FSDPStrategy(process_group_backend="phalanx"))',
            "ValueError: The strategy `fsdp` requires a GPU accelerator, but received "
            "`accelerator='cpu'`.",
        ),
    ),
)


def cells(trainer: Trainer) -> tuple[str, ...]:
    """Its row of the table."""
    return (
        tried(trainer.name, trainer.package),
        trainer.how,
        ", ".join(f"`{name}`" for name in trainer.works),
        f"`{trainer.refused.expression}`: `{trainer.refused.error.replace('`', '')}`",
    )

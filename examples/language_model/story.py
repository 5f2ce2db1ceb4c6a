"""What people are told before and after training, and the files that are left for them."""

from __future__ import annotations

from dataclasses import asdict

import phalanx as px
from language_model.history import write_log
from language_model.model import write_on
from language_model.plot import draw_loss
from language_model.setup import Run
from language_model.strategies import DDP, Distributed


def introduce(run: Run, model: Distributed) -> str:
    """What is about to happen, for people."""
    options, ranks = run.options, model.backend.world_size
    windows = options.batch_size * ranks
    lines = [
        f"A GPT of {run.parameters:,} parameters: "
        f"{_count(options.layers, 'layer')} of width {options.width}, "
        f"{_count(options.heads, 'head')}, {options.context} bytes of context.",
        f"It learns from {run.text.source}: {len(run.text.content):,} bytes, a tenth held out.",
        f"{_count(ranks, 'rank')} x {_count(options.batch_size, 'window')} x "
        f"{options.context} bytes = {windows * options.context:,} tokens a step; {options.steps} "
        f"steps, {options.steps * windows / len(run.training):.2g} times through the text.",
    ]
    if isinstance(model, px.FSDP):
        mine = sum(parameter.numel() for parameter in model.parameters())
        lines.append(
            f"FSDP, {model.strategy}: rank {model.backend.rank} keeps gradients and optimizer "
            f"state of {mine:,} parameters."
        )
    if run.checkpoint is not None:
        lines.append(f"It goes on after step {len(run.history.steps)}, from {run.checkpoint}.")
    elif (earlier := px.latest_checkpoint(options.checkpoints)) is not None:
        lines.append(f"It begins anew; until it has saved, --resume would go on from {earlier}.")
    return "\n".join(lines)


def save_log(run: Run, backend: px.Backend, sample: str = "") -> None:
    """The log so far."""
    about = {
        "options": asdict(run.options),
        "world_size": backend.world_size,
        "parameters": run.parameters,
        "text": {"source": run.text.source, "bytes": len(run.text.content)},
        "sample": sample,
    }
    write_log(run.options.folder / "log.json", about, run.history)


def draw_curve(run: Run, backend: px.Backend) -> bool:
    """The loss curve; False where there is no matplotlib."""
    ranks = _count(backend.world_size, "rank")
    strategy = "" if run.options.strategy == DDP else f" ({run.options.strategy})"
    title = f"A GPT of {run.parameters:,} parameters, trained on {ranks}{strategy}"
    return draw_loss(run.options.folder / "loss.png", run.history, title)


def conclude(run: Run, backend: px.Backend) -> str:
    """Write a sample and the files; return what has come of it all, for people."""
    options, history = run.options, run.history
    written = write_on(
        run.model,
        options.prompt.encode(),
        options.sample_bytes,
        temperature=options.temperature,
        seed=options.seed,
    ).decode(errors="replace")
    readable = "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in written
    )
    save_log(run, backend, written)
    drawn = draw_curve(run, backend)
    before, after, whole = history.held_out[0], history.held_out[-1], history.last(options.steps)
    return "\n".join(
        [
            "",
            f"It writes, from {options.prompt!r} on:",
            *(f"  | {line}".rstrip() for line in readable.split("\n")),
            "",
            f"held-out loss  {before.loss:.2f} -> {after.loss:.2f} nats a byte "
            f"({before.bits:.2f} -> {after.bits:.2f} bits)",
            f"training       {history.seconds:.1f} s, {whole.tokens_per_second:,.0f} tokens/s, "
            f"{whole.communication:.0%} of the time communicating",
            f"loss curve     {options.folder / 'loss.png' if drawn else 'needs matplotlib'}",
            f"log            {options.folder / 'log.json'}",
            f"checkpoint     {px.latest_checkpoint(options.checkpoints)}",
        ]
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"

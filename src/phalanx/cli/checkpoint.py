"""Look at checkpoints, and turn them into those of others, and back.

    phalanx checkpoint inspect runs/a

    phalanx checkpoint verify runs/a

    phalanx checkpoint export runs/a out --format hf --config gpt2

    phalanx checkpoint import x.dcp runs/b --trust-pickle

FOLDER is the folder that `save_checkpoint` was given, whose newest checkpoint is taken, or that of
one checkpoint, such as runs/a/000007-step-6000.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.filesize import decimal as _size

from phalanx.errors import plain

if TYPE_CHECKING:
    from phalanx.checkpoint.stored import Advance, Exported

checkpoint_app = typer.Typer(help=__doc__, no_args_is_help=True)
_T = TypeVar("_T")
_SHOWN = 40  # rows of a table
_LONGEST_LINE = 4000  # characters

Folder = Annotated[
    Path,
    typer.Argument(metavar="FOLDER", help="What save_checkpoint was given, or a checkpoint's own."),
]
Step = Annotated[
    int | None,
    typer.Option(metavar="N", help="The checkpoint of this step.", show_default="the newest"),
]


class Format(str, Enum):
    """The format of an exported checkpoint."""

    hf = "hf"
    dcp = "dcp"


@checkpoint_app.command("inspect")
def inspect_command(
    *,
    folder: Folder,
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", help="Show every tensor, however many.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: one object, with every tensor.")
    ] = False,
) -> None:
    """Say what is in a checkpoint: step, ranks, tensors, optimizer. Reads the manifest only.

    phalanx checkpoint inspect runs/a

    phalanx checkpoint inspect runs/a --step 5000 --json
    """
    from phalanx.checkpoint.stored import describe, open_checkpoint  # noqa: PLC0415

    found = _done("inspect", lambda: describe(open_checkpoint(folder, step)))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _show(found, len(found["model"]) if every else _SHOWN)


def _show(found: dict[str, Any], shown: int) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    model, state, optimizer = found["model"], found["state"], found["optimizer"]
    elements = sum(prod(tensor["shape"]) for tensor in model)
    _say(f"{found['folder']}: step {found['step']}, saved by {_count(found['ranks'], 'rank')}")
    _say(f"with      phalanx {found['phalanx']}, torch {found['torch']}")
    _say(f"files     {len(found['files'])}, {_size(found['bytes'])}")
    _say(f"model     {len(model)} tensors, {elements:,} elements, {_size(_bytes(model))}")
    if found["part"]:
        part, count = found["part"]
        _say(f"part      {part} of {count}, counted from 0, of a tensor-parallel model")
    if found["aliases"]:
        tied = (f"{other} = {name}" for other, name in found["aliases"].items())
        _say(f"tied      {_some(list(tied))}")
    if found["values"]:
        _say(f"values    {_some(found['values'])}")
    if optimizer:
        keys = ", ".join(f"{key} of {n}" for key, n in optimizer["state"].items()) or "no state"
        _say(f"optimizer {optimizer['kind']}: {keys} parameters")
        for number, group in enumerate(optimizer["groups"]):
            options = ", ".join(
                f"{k}={plain(str(_untagged(v)))}" for k, v in group["options"].items()
            )
            _say(f"  group {number}: {group['parameters']} parameters, {options}")
    _say(f"state     {len(state)} tensors, {_size(_bytes(state))}")
    _say(f"extra     {_some(found['extra']) or 'none'}")
    typer.echo()
    table = Table(box=None, pad_edge=False)
    for name in ("tensor", "dtype", "shape", "size", "written by"):
        table.add_column(name, justify="right" if name == "size" else "left", no_wrap=True)
    for tensor in model[:shown]:
        ranks = tensor["ranks"]
        who = f"rank {ranks[0]}" if len(ranks) == 1 else _count(len(ranks), "rank")
        shape = " x ".join(map(str, tensor["shape"])) or "-"
        table.add_row(plain(tensor["name"]), tensor["dtype"], shape, _size(tensor["bytes"]), who)
    Console(highlight=False, soft_wrap=True, markup=False).print(table)
    if len(model) > shown:
        _say(f"and {len(model) - shown} more: --all shows them")


@checkpoint_app.command("verify")
def verify_command(*, folder: Folder, step: Step = None) -> None:
    """Read every byte of all checkpoints in FOLDER, and compare it with the checksums.

    Names the first file, and the bytes in it, that are not as they were written. The exit code is
    1 if a checkpoint is damaged.

        phalanx checkpoint verify runs/a
    """
    from phalanx.checkpoint.stored import checkpoints_in, nbytes_in, verify  # noqa: PLC0415
    from phalanx.errors import CheckpointDamagedError, CheckpointIOError  # noqa: PLC0415

    paths = _done("verify", lambda: checkpoints_in(folder, step))
    damaged: list[str] = []
    fine: list[str] = []
    with _progress("verify") as begin:
        advance = begin(sum(map(nbytes_in, paths)))
        for path in paths:
            try:
                nbytes = _done("verify", partial(verify, path, advance))
                fine.append(f"ok       {path}: {_size(nbytes)}")
            except (CheckpointDamagedError, CheckpointIOError) as error:
                damaged.append(f"damaged  {error}")
    for line in (*damaged, *fine):
        _say(line)
    raise typer.Exit(1 if damaged else 0)


@checkpoint_app.command("export")
def export_command(
    *,
    folder: Folder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder, or an empty one.")],
    kind: Annotated[
        Format,
        typer.Option(
            "--format",
            help="hf: safetensors, as Hugging Face's libraries have them. dcp: as torch's dcp.load "
            "reads it, model and optimizer.",
        ),
    ],
    step: Step = None,
    part: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER", help="hf: that of another part of a tensor-parallel model; once each."
        ),
    ] = None,
    shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="hf: the most in one file.")
    ] = "5GB",
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="hf: a config.json, or a folder with one, of which the tokenizer is copied, too.",
        ),
    ] = None,
    model_only: Annotated[
        bool, typer.Option("--model-only", help="dcp: without optimizer and extra.")
    ] = False,
) -> None:
    """Write a checkpoint as Hugging Face or torch have it. OUT is there whole, or not at all.

    phalanx checkpoint export runs/a out --format hf --config gpt2

    phalanx checkpoint export runs/a out --format dcp --step 5000

    phalanx checkpoint export runs/a/0 out --format hf --part runs/a/1
    """
    from phalanx.checkpoint.stored import open_checkpoint  # noqa: PLC0415
    from phalanx.errors import MisuseError  # noqa: PLC0415
    from phalanx.ops.interop.hugging_face import export_hugging_face, parse_size  # noqa: PLC0415

    if kind is Format.dcp and (config is not None or part or shard_size != "5GB"):
        raise MisuseError("--config, --part and --shard-size are of --format hf")
    if kind is Format.hf and model_only:
        raise MisuseError("--model-only is of --format dcp: hf has no optimizer")
    most = parse_size(shard_size)
    checkpoint, *parts = (
        _done("export", partial(open_checkpoint, each, step)) for each in (folder, *(part or ()))
    )
    convert: Callable[..., Exported] = partial(
        export_hugging_face, parts=parts, shard_size=most, config=config
    )
    if kind is Format.dcp:
        from phalanx.ops.interop.dcp_export import export_dcp  # noqa: PLC0415

        convert = partial(export_dcp, model_only=model_only)
    with _progress(f"export {kind.value}") as begin:
        exported = _done("export", partial(convert, checkpoint, out, begin=begin))
    for note in exported.notes:
        _say(f"Note: {note}")
    if kind is Format.hf and config is None:
        _say("Note: from_pretrained needs a config.json beside them: --config copies one")
    files = _count(len(exported.files), "file")
    _say(f"{out}: step {checkpoint.manifest.step}, {files}, {_size(exported.nbytes)}")


@checkpoint_app.command("import")
def import_command(
    context: typer.Context,
    *,
    source: Annotated[Path, typer.Argument(metavar="DCP", help="What dcp.save has written.")],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where the new checkpoint is added.")
    ],
    trust_pickle: Annotated[
        bool,
        typer.Option(
            "--trust-pickle", help="Unpickle DCP/.metadata, which runs what its author put there."
        ),
    ] = False,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", help="Of the new checkpoint.", show_default="the entry step"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="KEY", help="Where the model is.", show_default="found")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Where the optimizer is.", show_default="found"),
    ] = None,
    optimizer_class: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Such as AdamW.", show_default="by its options"),
    ] = None,
) -> None:
    """Add a checkpoint of torch's (DCP) to FOLDER as one that `load_checkpoint` reads.

    phalanx checkpoint import x.dcp runs/b --trust-pickle

    phalanx checkpoint import x.dcp runs/b --trust-pickle --model app.model --step 100
    """
    from phalanx.ops.interop.dcp_import import import_dcp  # noqa: PLC0415

    with _progress("import") as begin:
        imported = _done("import", partial(import_dcp, **context.params, begin=begin))
    for note in imported.notes:
        _say(f"Note: {note}")
    _say(f"{imported.path}: step {imported.step}, {imported.tensors} tensors")


# ------------------------------------------------------------------------------
# Common parts of the commands


def _done(what: str, attempt: Callable[[], _T]) -> _T:
    """Call `attempt`; raise an OSError in it as a Phalanx error that names the file."""
    from phalanx.checkpoint.group import CheckpointGroup  # noqa: PLC0415

    return CheckpointGroup(None, what, None).on_all(attempt)[0]


def _say(text: str) -> None:
    """Print a line, which may have names and texts of others."""
    typer.echo(plain(text, _LONGEST_LINE))


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int], Advance]]:
    """Show progress on a terminal; called with the bytes in all, yield a counter of bytes."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn  # noqa: PLC0415

    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:

        def begin(nbytes: int) -> Advance:
            task = bar.add_task(what, total=nbytes)
            return lambda more: bar.advance(task, more)

        yield begin


def _bytes(tensors: list[dict[str, Any]]) -> int:
    return sum(tensor["bytes"] for tensor in tensors)


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(map(plain, names[:8])) + more


def _untagged(option: object) -> object:
    """Return an option without the tag that JSON needs for it."""
    if isinstance(option, dict) and len(option) == 1:
        return next(iter(option.values()))
    return option

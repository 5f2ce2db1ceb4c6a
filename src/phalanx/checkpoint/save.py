"""`save_checkpoint`: the model and its training, as files that a kill cannot spoil."""

from __future__ import annotations

import importlib.metadata
import logging
import operator
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from phalanx.checkpoint import training_state as rng
from phalanx.checkpoint.manifest import FORMAT, VERSION, FileRecord, Manifest, commit_of, encode
from phalanx.checkpoint.model_parts import backend_of, check_parts_are_apart, means_of, parts_of
from phalanx.checkpoint.pending import Background, PendingSave
from phalanx.checkpoint.plan import (
    Description,
    File,
    Holdings,
    PlannedFile,
    merge_optimizers,
    plan_files,
    records_of,
)
from phalanx.checkpoint.ranks import Ranks
from phalanx.checkpoint.safetensors_file import write_tensors
from phalanx.checkpoint.storage import (
    BEGUN,
    COMMIT,
    MANIFEST,
    UNFINISHED,
    FolderLock,
    Numbered,
    committed,
    make_next,
    make_parents,
    numbered,
    read_file,
    remove,
    size_of,
    sync_folder,
    write_file,
)
from phalanx.checkpoint.training_state import describe_optimizer
from phalanx.core.backend import Backend
from phalanx.errors import CheckpointError, CheckpointIOError, MisuseError
from phalanx.wire.memory import copy_bits, plain, tensor_bytes


def save_checkpoint(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module,
    step: int,
    optimizer: torch.optim.Optimizer | None = None,
    extra: object = None,
    backend: Backend | None = None,
    keep: int | None = 3,
    async_save: bool = False,
    timeout: float | None = None,
) -> PendingSave:
    """Write a new checkpoint into `folder`, in a numbered folder of its own; every rank calls it.

    folder      one that all ranks see; made if it is not there
    model       a plain module, DDP, FSDP, or a module with such in it. Each rank writes what it
                holds; what several ranks hold one of them writes, so that all write about as much.
                Parameters, and the buffers and extra state that a state dict has, those as rank 0
                has them; what each rank has of its own (DDP's compression), as it has it. Of
                LocalSGD and DiLoCo, where ranks have different parameters: the means, and each
                rank's own, with its optimizer's state
    step        how far training is, 0 or more
    optimizer   of these parameters
    extra       rank 0's is kept: None, bool, int, float, str, bytes, tensors, and lists, tuples
                and dicts of them, such as the state of a learning rate schedule
    backend     the ranks that save together; by default the model's, or this one by itself. With
                layers that are cut over ranks (`parallelize`), those that have the same part of
                them, in a folder of their own
    keep        afterwards only the last so many checkpoints are left; None: all
    async_save  return when this rank's part is copied, and write in the background. The copy takes
                as much memory as the rank writes. A later save waits for an earlier one; before the
                backend is closed, `wait()` has to be called. Under `phalanx.simulate`, where one
                thread runs at a time, it is written at once
    timeout     seconds that a rank waits for the others at a time; by default 600, or the
                backend's if that is more

    Random states (torch, Python, NumPy if it is imported, the current GPU) are kept for each rank.

    Blocks until the checkpoint is committed: all files and folders are safe on disk (fsync), and
    the commit record with them, which was written last. Killed at any moment, or without room, or
    with a disk that fails, what was committed before stays as it is, and is what `load_checkpoint`
    finds; what is left of the new one is removed, at the latest by the next save. Nothing is ever
    overwritten. Messages: descriptions of the tensors, not their values.

    If it fails, it fails on every rank. Raises `CheckpointIOError` (an OSError) that names the
    rank, the file and the errno; `CheckpointMismatchError` for ranks that do not hold one model
    together; `MisuseError` for an optimizer with a parameter that is not the model's, and for ranks
    that ask for different things; `UnsupportedObjectError` (a TypeError) for an `extra` that cannot
    be kept: all but the first before anything is written. `CollectiveTimeoutError`,
    `PeerLostError`, `DesyncError`.
    """
    backend = backend if backend is not None else backend_of(model)
    check_parts_are_apart(model, backend, os.path.abspath(folder), "save_checkpoint")
    ranks = Ranks(backend, "save_checkpoint", timeout)
    background = Background(backend)
    mine = Holdings()

    means = means_of(model, ranks.timeout)

    def describe() -> bytes:
        background.settle()
        described = _describe(mine, ranks, model, means, step, optimizer, extra)
        described.asked = [f"step={step}", f"keep={keep}", f"async_save={async_save}"]
        described.fresh = async_save and background.needs_group
        _check_options(step, keep)
        return msgspec.json.encode(described)

    described = [msgspec.json.decode(each, type=Description) for each in ranks.together(describe)]
    save = Saving(ranks, os.path.abspath(folder), operator.index(step), keep, mine, described)
    save.open()
    pending = PendingSave(Path(save.path), save.step, save.write_and_commit)
    if not async_save or background.impossible:
        return pending.run()
    save.copy()
    group = background.group(fresh=any(each.fresh for each in described))
    save.ranks = Ranks(group, ranks.op, ranks.timeout)
    return background.start(pending)


def _check_options(step: int, keep: int | None) -> None:
    if operator.index(step) < 0:
        raise MisuseError(f"step must be 0 or more, not {step}")
    if keep is not None and operator.index(keep) < 1:
        raise MisuseError(f"keep must be 1 or more, or None for all, not {keep}")


def _describe(
    mine: Holdings,
    ranks: Ranks,
    model: nn.Module,
    means: Mapping[Tensor, Tensor],
    step: int,
    optimizer: torch.optim.Optimizer | None,
    extra: object,
) -> Description:
    parts = parts_of(model)
    values = mine.add_model(parts, means)
    about = describe_optimizer(optimizer, parts.parameters, mine) if optimizer else None
    for number, wrapper in enumerate(parts.wrappers):
        for key, tensor in wrapper.own_state().items():  # keys say whose they are
            mine.add("state", f"own/{number}/{key}", tensor, equal=False)
    state = f"rng/{ranks.rank}"
    mine.add("state", state, rng.capture(), equal=False)
    kept = mine.json(extra, "extra") if ranks.rank == 0 else None
    return Description([], mine.held, parts.aliases, values, about, state, kept)


# ------------------------------------------------------------------------------
# One save, as one rank goes through it: plan, open, copy if need be, write, commit.


class Saving:
    """One rank's part in one save.

    ranks       those that save together
    described   what each of them holds
    mine        this rank's tensors
    """

    def __init__(
        self,
        ranks: Ranks,
        folder: str,
        step: int,
        keep: int | None,
        mine: Holdings,
        described: Sequence[Description],
    ) -> None:
        self.ranks = ranks
        self.step = step
        self.path = ""
        self._folder = folder
        self._keep = keep
        self._tensors = mine.tensors
        self._described = described
        self._planned: list[PlannedFile] = []
        self._new: NewCheckpoint | None = None  # on rank 0
        self._word = ""
        self._last = ""

    def open(self) -> None:
        """Work out who writes what; rank 0 makes the folder."""
        try:
            opened = self.ranks.together(self._open)[0]
        except BaseException:
            self._abandon()
            raise
        name, self._word, self._last = opened
        self.path = os.path.join(self._folder, name)

    def _open(self) -> tuple[str, str, str]:
        _check_alike(self._described)
        merge_optimizers(self._described)
        self._planned = plan_files(self._described)
        if self.ranks.rank != 0:
            return "", "", ""
        self._new = NewCheckpoint(self._folder, self.step, self.ranks.timeout / 2)
        return os.path.basename(self._new.path), self._new.word, self._new.last

    def copy(self) -> None:
        """Let go of the caller's tensors: keep copies of what this rank writes."""
        try:
            self.ranks.together(self._copy)
        except BaseException:
            self._abandon()
            raise

    def _copy(self) -> None:
        self._tensors = {
            (file, content.name): _copied(self._tensors[file, content.name])
            for rank, file, layout in self._planned
            if rank == self.ranks.rank
            for content, _ in layout.contents
        }

    def write_and_commit(self) -> None:
        """Write this rank's files; when all ranks have theirs, rank 0 commits."""
        try:
            reports = self.ranks.together(self._write)
            self.ranks.on_first(lambda: self._commit(reports))
        except BaseException as error:
            self._abandon()
            if isinstance(error, CheckpointError):
                error.message += f". The last checkpoint is {self._last or 'none'}, as before"
            raise
        if self._new is not None:
            self._new.end(self._keep)

    def _write(self) -> list[tuple[str, int, int, str]]:
        check_shared(self.path, self._word)
        written = [
            write_tensors(self.path, layout, self._bytes_of(file))
            for rank, file, layout in self._planned
            if rank == self.ranks.rank
        ]
        sync_folder(self.path)
        return [(file.name, file.bytes, file.block, file.checksums) for file in written]

    def _bytes_of(self, file: File) -> Callable[[str], memoryview]:
        return lambda name: tensor_bytes(plain(self._tensors[file, name].cpu()))

    def _commit(self, reports: Sequence[list[tuple[str, int, int, str]]]) -> None:
        assert self._new is not None
        names = [layout.name for _, _, layout in self._planned]
        self._new.commit(self._manifest(files_in_order(reports, names)))

    def _manifest(self, files: list[FileRecord]) -> Manifest:
        records = records_of(self._planned)
        first = self._described[0]
        aliases: dict[str, str] = {}
        values: dict[str, object] = {}
        for each in reversed(self._described):  # of what several have, the first one's
            aliases |= each.aliases
            values |= each.values
        return Manifest(
            format=FORMAT,
            version=VERSION,
            step=self.step,
            world_size=self.ranks.size,
            phalanx=_version(),
            torch=str(torch.__version__),
            files=files,
            model=records["model"],
            aliases=aliases,
            values=values,
            optimizer=merge_optimizers(self._described),
            state=records["state"],
            rng=[each.rng for each in self._described],
            extra=first.extra,
        )

    def _abandon(self) -> None:
        if self._new is not None:
            self._new.abandon()
            self._new = None


def _copied(tensor: Tensor) -> Tensor:
    """Its values now, in memory of its own, on the CPU."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy_bits(copy, tensor)
    return copy


def _version() -> str:
    try:
        return importlib.metadata.version("phalanx")
    except importlib.metadata.PackageNotFoundError:  # run from its source
        return "unknown"


def _check_alike(described: Sequence[Description]) -> None:
    for rank, each in enumerate(described):
        for ours, theirs in zip(described[0].asked, each.asked, strict=True):
            if ours != theirs:
                raise MisuseError(f"rank 0 asks for {ours} and rank {rank} for {theirs}")


# ------------------------------------------------------------------------------
# A save, as rank 0 begins and ends it.
#
#     lock, leftovers removed             |
#     mkdir 000007-step-120, fsync ..     |   all ranks: see the folder, write their files,
#     begun                               |   fsync each, fsync the folder, say so
#     all files seen, manifest, fsync     |
#     commit.json.unfinished, fsync, fsync of the folder
#     rename to commit.json, fsync of the folder      from here on it is a checkpoint
#     those beyond the last `keep` removed, unlock
#
# Up to the rename the folder is a leftover, of which every file is safe by then; the checkpoints
# before it have not been touched.

log = logging.getLogger("phalanx")


class NewCheckpoint:
    """A checkpoint that rank 0 is making in `folder`, and the lock on that; OSErrors name files.

    patience   seconds to wait for another save there
    last       the checkpoint before this one, "" if there is none
    word       a random one, which is in the new folder for all ranks to see
    """

    def __init__(self, folder: str, step: int, patience: float) -> None:
        make_parents(folder)
        self._folder = folder
        self._lock = FolderLock(folder, patience)
        self._made: Numbered | None = None
        self.word = secrets.token_hex(16)
        self.committed = False
        try:
            _remove_leftovers(folder)
            before = committed(folder)
            self.last = before[-1].path if before else ""
            self._made = make_next(folder, step)
            write_file(os.path.join(self.path, BEGUN), self.word.encode())
        except BaseException:
            self.abandon()
            raise

    @property
    def path(self) -> str:
        """Its own folder."""
        assert self._made is not None
        return self._made.path

    def commit(self, manifest: Manifest) -> None:
        """Make it a checkpoint. Every file of the manifest has to be safe."""
        for file in manifest.files:
            _check_seen(self.path, file)
        content = encode(manifest)
        write_file(os.path.join(self.path, MANIFEST), content)
        unfinished = os.path.join(self.path, UNFINISHED)
        write_file(unfinished, encode(commit_of(manifest, content)))
        sync_folder(self.path)
        os.rename(unfinished, os.path.join(self.path, COMMIT))
        sync_folder(self.path)
        self.committed = True

    def end(self, keep: int | None) -> None:
        """Remove all but the last `keep` checkpoints, and unlock. Trouble goes to the log."""
        try:
            for old in committed(self._folder)[: -keep if keep is not None else 0]:
                _try_to_remove(old)
        except OSError as error:
            log.warning("%s: cannot look for old checkpoints to remove: %s", self._folder, error)
        finally:
            self._lock.release()

    def abandon(self) -> None:
        """Remove what there is of it, unless it is a checkpoint by now, and unlock."""
        try:
            if self._made is not None and not self.committed:
                _try_to_remove(self._made)
        finally:
            self._lock.release()


def check_shared(path: str, word: str) -> None:
    """Raise `CheckpointIOError` unless this rank sees the folder that rank 0 has made."""
    seen = b""
    with suppress(FileNotFoundError, NotADirectoryError):
        seen = read_file(os.path.join(path, BEGUN))
    if seen != word.encode():
        raise CheckpointIOError(
            f"{path}, which rank 0 has just made, cannot be seen from here: give every rank the "
            "same folder, on a file system that all of them share"
        )


def _check_seen(path: str, file: FileRecord) -> None:
    """Raise `CheckpointIOError` unless rank 0 sees the file that another rank has written."""
    try:
        size = size_of(os.path.join(path, file.name))
    except FileNotFoundError:
        size = -1
    if size != file.bytes:
        what = "cannot be seen" if size < 0 else f"has {size} bytes"
        rank = int(file.name.split("-")[1])
        raise CheckpointIOError(
            f"{os.path.join(path, file.name)}, {file.bytes} bytes that rank {rank} has written, "
            f"{what} from rank 0: is the folder on a file system that all ranks share?"
        )


def _remove_leftovers(folder: str) -> None:
    """What saves that were killed have left, and removals. The lock says that none is under way."""
    for each in numbered(folder):
        if not each.is_committed:
            _try_to_remove(each)


def _try_to_remove(folder: Numbered) -> None:
    try:
        remove(folder)
    except OSError as error:
        log.warning("%s cannot be removed; the next save will try again: %s", folder.path, error)


def files_in_order(reports: Sequence[object], names: Sequence[str]) -> list[FileRecord]:
    """The files that the ranks say they have written, in the order of their names in the plan."""
    by_name = {}
    for report in reports:
        for name, size, block, checksums in report:  # type: ignore[attr-defined]
            by_name[name] = FileRecord(name, size, block, checksums)
    return [by_name[name] for name in names]

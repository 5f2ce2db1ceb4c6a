"""`save_checkpoint`: a model and its training, in files that a kill cannot spoil."""

from __future__ import annotations

import logging
import operator
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from phalanx.checkpoint import state, storage
from phalanx.checkpoint.async_saves import AsyncSaves, PendingSave
from phalanx.checkpoint.group import CheckpointGroup
from phalanx.checkpoint.manifest import VERSION, Commit, FileRecord, Manifest, encode
from phalanx.checkpoint.save_plan import RankDescription, SavePlan
from phalanx.checkpoint.storage import CheckpointFolder, FolderLock
from phalanx.checkpoint.tensor_files import FileKind, TensorShard, write_tensors
from phalanx.core.backend import Backend
from phalanx.errors import CheckpointError, CheckpointIOError, MisuseError
from phalanx.wire.memory import copy_bits, plain, tensor_bytes

log = logging.getLogger("phalanx")


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
                holds; what several hold one of them writes, so that all write about as much.
                Buffers and extra state of the state dict are rank 0's. State of each rank (DDP's
                compression) is kept for each. Of LocalSGD and DiLoCo, where ranks have different
                parameters: the means, and each rank's own, with its optimizer's state
    step        how far training is, 0 or more
    optimizer   of these parameters
    extra       rank 0's is kept: None, bool, int, float, str, bytes, tensors, and lists, tuples
                and dicts of them, such as the state of a learning rate schedule
    backend     the ranks that save together; by default the model's, or this one by itself. With
                tensor-parallel layers (`parallelize`) those that have the same part of them, in a
                folder of their own
    keep        afterwards only the last so many checkpoints are left; None: all
    async_save  return when this rank's part is copied (as much memory as it writes), and write in
                the background. A later save waits for an earlier one; call `wait()` before the
                backend is closed. Under `phalanx.simulate` (one thread at a time) it is written now
    timeout     seconds that a rank waits for the others at a time; by default 600, or the
                backend's if that is more

    Random states (torch, Python, NumPy if it is imported, the current GPU) are kept for each rank.

    Blocks until the checkpoint is committed: all files and folders are on disk (fsync), the commit
    record last. Killed at any moment, without room, or on a failing disk, earlier checkpoints stay
    as they are, and `load_checkpoint` finds the last; what is left of the new one is removed, at
    the latest by the next save. Nothing is overwritten. Messages: descriptions, no tensors.

    An error is raised on every rank: `CheckpointIOError` (an OSError) with rank, file and errno;
    and, before anything is written, `CheckpointMismatchError` for ranks that do not hold one model
    together; `MisuseError` for an optimizer with a parameter that is not the model's, and for ranks
    that ask for different things; `UnsupportedObjectError` (a TypeError) for an `extra` that cannot
    be kept. `CollectiveTimeoutError`, `PeerLostError`, `DesyncError`.
    """
    save = _Save(folder, model, step, backend, keep, async_save, timeout)
    save.describe(model, optimizer, extra)
    save.open()
    return save.start()


class _Save:
    """One rank's part in one save: describe, open, copy if it is asynchronous, write, commit."""

    _described: list[RankDescription]
    _plan: SavePlan

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        step: int,
        backend: Backend | None,
        keep: int | None,
        async_save: bool,
        timeout: float | None,
    ) -> None:
        self._folder = os.path.abspath(folder)
        self._step = step
        self._keep = keep
        self._async = async_save
        self._backend = backend if backend is not None else state.backend_of(model)
        state.check_layer_parts_apart(model, self._backend, self._folder, "save_checkpoint")
        self._group = CheckpointGroup(self._backend, "save_checkpoint", timeout)
        self._saves = AsyncSaves.on(self._backend)
        self._local = state.LocalTensors()
        self._new: NewCheckpoint | None = None  # on rank 0
        self._path = self._nonce = self._previous = ""

    def describe(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: object
    ) -> None:
        """Exchange what each rank holds. Nothing is written yet."""
        means = state.means_of(model, self._group.timeout)

        def describe() -> bytes:
            self._saves.settle()
            local, held = self._local, state.model_state(model)
            values = local.add_model(held, means)
            about = (
                state.describe_optimizer(optimizer, held.parameters, local) if optimizer else None
            )
            for number, wrapper in enumerate(held.wrappers):
                for key, tensor in wrapper.own_state().items():  # the key names the rank
                    local.add("state", f"own/{number}/{key}", tensor, equal=False)
            rng = f"rng/{self._group.rank}"
            local.add("state", rng, state.capture_random_state(), equal=False)
            kept = local.json(extra, "extra") if self._group.rank == 0 else None
            asked = [f"step={self._step}", f"keep={self._keep}", f"async_save={self._async}"]
            fresh = self._async and self._saves.group is None
            self._check_options()
            return msgspec.json.encode(
                RankDescription(asked, local.held, held.aliases, values, about, rng, kept, fresh)
            )

        described = self._group.on_all(describe)
        self._described = [msgspec.json.decode(each, type=RankDescription) for each in described]

    def _check_options(self) -> None:
        self._step = operator.index(self._step)
        if self._step < 0:
            raise MisuseError(f"step must be 0 or more, not {self._step}")
        if self._keep is not None and operator.index(self._keep) < 1:
            raise MisuseError(f"keep must be 1 or more, or None for all, not {self._keep}")

    def open(self) -> None:
        """Work out who writes what; rank 0 makes the folder."""
        with self._abandoned_on_error():
            name, self._nonce, self._previous = self._group.on_all(self._open)[0]
        self._path = os.path.join(self._folder, name)

    def _open(self) -> tuple[str, str, str]:
        self._plan = SavePlan(self._described)
        if self._group.rank != 0:
            return "", "", ""
        self._new = NewCheckpoint(self._folder, self._step, self._group.timeout / 2)
        return os.path.basename(self._new.path), self._new.nonce, self._new.previous

    def start(self) -> PendingSave:
        """Write and commit; or copy, and let a thread do so."""
        pending = PendingSave(Path(self._path), self._step)
        backend = self._backend
        if not self._async or (backend is not None and not backend.has_background):
            self._write_and_commit()
            return pending
        with self._abandoned_on_error():
            self._group.on_all(self._copy)
            if backend is not None and self._plan.fresh_group:
                self._saves.group = backend.subgroup(range(backend.world_size))
        self._group = CheckpointGroup(self._saves.group, self._group.op, self._group.timeout)
        self._saves.start(pending, self._write_and_commit, backend)
        return pending

    def _copy(self) -> None:
        """Replace the caller's tensors by copies, on the CPU, of those that this rank writes."""
        rank, copies = self._group.rank, dict[tuple[FileKind, str], Tensor]()
        for shard in (shard for file in self._plan.files_of(rank) for shard, _ in file.shards):
            tensor = self._local.tensors[shard.kind, shard.name]
            copy = copies[shard.kind, shard.name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            copy_bits(copy, tensor)
        self._local.tensors = copies

    def _write_and_commit(self) -> None:
        """Write this rank's files; when all ranks have written theirs, rank 0 commits."""
        try:
            with self._abandoned_on_error():
                written = self._group.on_all(self._write)
                files = [FileRecord(*file) for of_rank in written for file in of_rank]
                self._group.on_rank0(lambda: self._commit(files))
        except CheckpointError as error:
            error.message += f". The last checkpoint is {self._previous or 'none'}, as before"
            raise
        if self._new is not None:
            self._new.end(self._keep)

    def _write(self) -> list[tuple[str, int, int, str]]:
        check_shared(self._path, self._nonce)
        written = [
            (record.name, record.bytes, record.block, record.checksums)
            for file in self._plan.files_of(self._group.rank)
            for record in [write_tensors(self._path, file, self._bytes_of)]
        ]
        storage.sync_folder(self._path)
        return written

    def _bytes_of(self, shard: TensorShard) -> memoryview:
        return tensor_bytes(plain(self._local.tensors[shard.kind, shard.name].cpu()))

    def _commit(self, files: list[FileRecord]) -> None:
        assert self._new is not None
        self._new.commit(self._plan.manifest(self._step, files))

    @contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self._new is not None:
                self._new.abandon()
                self._new = None
            raise


# ------------------------------------------------------------------------------
# The commit: rank 0's part
#
#     lock, remove left-over folders      |
#     mkdir 000007-step-120, fsync ..     |   all ranks: see the folder, write their files,
#     begun                               |   fsync each, fsync the folder, report
#     size of all files, manifest, fsync  |
#     commit.json.unfinished, fsync, fsync of the folder
#     rename to commit.json, fsync of the folder      from here on it is a checkpoint
#     remove those beyond the last `keep`, unlock
#
# Before the rename every file is durable, and earlier checkpoints have not been touched.


class NewCheckpoint:
    """A checkpoint that rank 0 is making in `folder`, with the lock on that. OSErrors name files.

    timeout    seconds to wait for another save there
    previous   the newest checkpoint before this one, "" if there is none
    nonce      is in the new folder: a rank that reads it there sees the same folder
    """

    def __init__(self, folder: str, step: int, timeout: float) -> None:
        storage.make_parents(folder)
        self._folder = folder
        self._lock = FolderLock(folder, timeout)
        self._made: CheckpointFolder | None = None
        self._committed = False
        self.nonce = secrets.token_hex(16)
        try:
            for each in storage.numbered(folder):
                if not each.is_committed:  # left over: the lock says that no save is under way
                    _try_to_remove(each)
            before = storage.committed(folder)
            self.previous = before[-1].path if before else ""
            self._made = storage.make_next(folder, step)
            self.path = self._made.path
            storage.write_file(os.path.join(self.path, storage.BEGUN), self.nonce.encode())
        except BaseException:
            self.abandon()
            raise

    def commit(self, manifest: Manifest) -> None:
        """Make it a checkpoint. Every file of the manifest has to be durable."""
        for file in manifest.files:
            _check_seen(self.path, file)
        content = encode(manifest)
        commit = Commit(VERSION, manifest.step, len(content), xxh3_64_hexdigest(content))
        unfinished = os.path.join(self.path, storage.UNFINISHED)
        storage.write_file(os.path.join(self.path, storage.MANIFEST), content)
        storage.write_file(unfinished, encode(commit))
        storage.sync_folder(self.path)
        os.rename(unfinished, os.path.join(self.path, storage.COMMIT))
        storage.sync_folder(self.path)
        self._committed = True

    def end(self, keep: int | None) -> None:
        """Remove all but the last `keep` checkpoints, and unlock. Errors are logged."""
        try:
            for old in storage.committed(self._folder)[: -keep if keep is not None else 0]:
                _try_to_remove(old)
        except OSError as error:
            log.warning("%s: cannot look for old checkpoints to remove: %s", self._folder, error)
        finally:
            self._lock.release()

    def abandon(self) -> None:
        """Remove the folder, unless it is a checkpoint by now, and unlock."""
        try:
            if self._made is not None and not self._committed:
                _try_to_remove(self._made)
        finally:
            self._lock.release()


def check_shared(path: str, nonce: str) -> None:
    """Raise `CheckpointIOError` unless this rank sees the folder that rank 0 has made."""
    seen = b""
    with suppress(FileNotFoundError, NotADirectoryError):
        seen = storage.read_file(os.path.join(path, storage.BEGUN))
    if seen != nonce.encode():
        raise CheckpointIOError(
            f"{path}, which rank 0 has just made, cannot be seen from here: give every rank the "
            "same folder, on a file system that all of them share"
        )


def _check_seen(path: str, file: FileRecord) -> None:
    """Raise `CheckpointIOError` unless rank 0 sees the file that another rank has written."""
    try:
        size = storage.size_of(os.path.join(path, file.name))
    except FileNotFoundError:
        size = -1
    if size != file.bytes:
        what = "cannot be seen" if size < 0 else f"has {size} bytes"
        rank = int(file.name.split("-")[1])
        raise CheckpointIOError(
            f"{os.path.join(path, file.name)}, {file.bytes} bytes that rank {rank} has written, "
            f"{what} from rank 0: is the folder on a file system that all ranks share?"
        )


def _try_to_remove(folder: CheckpointFolder) -> None:
    try:
        storage.remove(folder)
    except OSError as error:
        log.warning("%s cannot be removed; the next save will try again: %s", folder.path, error)

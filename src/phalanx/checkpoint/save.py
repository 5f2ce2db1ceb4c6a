"""`save_checkpoint`: a model and its training, in files that a kill cannot spoil."""

from __future__ import annotations

import logging
import operator
import os
import secrets
import socket
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from phalanx import files
from phalanx.checkpoint import state, storage
from phalanx.checkpoint.async_saves import PendingSave, finish_latest_save
from phalanx.checkpoint.group import CheckpointGroup, group_for
from phalanx.checkpoint.manifest import VERSION, Commit, FileRecord, Manifest, encode
from phalanx.checkpoint.parts import cuts_of
from phalanx.checkpoint.save_plan import (
    LocalTensors,
    RankDescription,
    describe_optimizer,
    make_manifest,
    merge_optimizers,
    plan_files,
)
from phalanx.checkpoint.storage import CheckpointFolder
from phalanx.checkpoint.tensor_files import PlannedFile, TensorShard, write_tensors
from phalanx.core.backend import Backend
from phalanx.errors import CheckpointError, CheckpointIOError, MisuseError
from phalanx.wire.control import learned
from phalanx.wire.memory import copy_bits, plain, tensor_bytes

log = logging.getLogger("phalanx")


def save_checkpoint(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module,
    step: int,
    optimizer: torch.optim.Optimizer | None = None,
    extra: object = None,
    own: object = None,
    backend: Backend | None = None,
    keep: int | None = 3,
    async_save: bool = False,
    timeout: float | None = None,
) -> PendingSave:
    """Write a new checkpoint into `folder`, in a numbered folder of its own; every rank calls it.

    folder      one that all ranks see; made if it is not there
    model       a plain module, DDP, FSDP, or a module with such in it. Each rank writes its
    part; one of several that hold the same writes it, so that all write about as much.
                Buffers and extra state of the state dict are rank 0's. State of each rank (DDP's
                compression) is kept for each. Of LocalSGD and DiLoCo, if ranks have different
                parameters: the means, and each rank's own, with its optimizer's state
    step        number of training steps so far, 0 or more
    optimizer   of these parameters
    extra       rank 0's is kept: None, bool, int, float, str, bytes, tensors, and lists, tuples
                and dicts of them, such as the state of a learning rate schedule
    own         of the same kinds, kept for each rank, such as its data loader's position
                (`StatefulDataLoader.state_dict()`). None for a rank that has none
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
    record last. After a kill at any moment, a full disk or a failing one, earlier checkpoints are
    intact, and `load_checkpoint` finds the last; the rest of the new one is removed, at the latest
    by the next save. Nothing is overwritten. Messages: descriptions, no tensors.

    An error is raised on every rank: `CheckpointIOError` (an OSError) with rank, file and errno;
    and, before anything is written, `CheckpointMismatchError` for ranks that do not hold one model
    together; `MisuseError` for an optimizer with a parameter that is not the model's, and for ranks
    with different arguments; `UnsupportedObjectError` (a TypeError) for an `extra` or `own` that
    cannot be kept, with the rank and the part of it. `CollectiveTimeoutError`, `PeerLostError`,
    `DesyncError`.
    """
    folder = os.path.abspath(folder)
    group = group_for(model, backend, folder, "save_checkpoint", timeout)
    save = _Save(group, folder, step, keep, async_save)
    return save.run(model, optimizer, extra, own)


@dataclass
class _Save:
    """One rank's part in one save: describe, open, copy if it is asynchronous, write, commit."""

    group: CheckpointGroup
    folder: str
    step: int
    keep: int | None
    async_save: bool
    tensors: dict[TensorShard, Tensor] = field(default_factory=dict)  # that it could write
    background: Backend | None = None  # the same ranks, for saves in the background
    files: list[PlannedFile] = field(default_factory=list)  # that this rank writes
    path: str = ""
    nonce: str = ""
    previous: str = ""
    new: Generator[tuple[str, str, str], list[FileRecord]] | None = None  # on rank 0

    def run(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: object,
        own: object,
    ) -> PendingSave:
        group, backend = self.group, self.group.backend
        means: dict[Tensor, Tensor] = {}
        for wrapper in state.wrappers_of(model).values():
            means.update(wrapper.means(timeout=group.timeout))
        told = group.on_all(lambda: self._describe(model, optimizer, extra, own, means))
        described = [msgspec.json.decode(each, type=learned(RankDescription)) for each in told]
        with self._abandoned_on_error():
            name, self.nonce, self.previous = group.on_all(lambda: self._open(described))[0]
            self.path = os.path.join(self.folder, name)
            pending = PendingSave(Path(self.path), self.step)
            if not self.async_save or (backend is not None and not backend.has_background):
                self._write_and_commit()
                return pending
            group.on_all(self._copy)
            if backend is not None and any(each.fresh_group for each in described):
                self.background = backend.subgroup(range(backend.world_size))
        self.group = CheckpointGroup(self.background, group.op, group.timeout)
        pending._start(self._write_and_commit, backend, self.background)
        return pending

    def _describe(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: object,
        own: object,
        means: dict[Tensor, Tensor],
    ) -> bytes:
        """Describe this rank's tensors and request, for the exchange; nothing is written yet."""
        self.background = finish_latest_save(self.group.backend)
        local, rank = LocalTensors(), self.group.rank
        described = describe(model, optimizer, local, means)
        asked = {"step": self.step, "keep": self.keep, "async_save": self.async_save}
        described.asked = [f"{name}={value}" for name, value in asked.items()]
        described.rng = f"rng/{rank}"
        described.fresh_group = self.async_save and self.background is None
        local.add("state", described.rng, state.capture_random_state(), equal=False)
        described.extra = local.json(extra, "extra") if rank == 0 else None
        described.own = local.json(own, f"own@{rank}")
        self.tensors = local.tensors
        described.held = list(local.tensors)
        self.step = operator.index(self.step)
        if self.step < 0:
            raise MisuseError(f"step must be 0 or more, not {self.step}")
        if self.keep is not None and operator.index(self.keep) < 1:
            raise MisuseError(f"keep must be 1 or more, or None for all, not {self.keep}")
        return msgspec.json.encode(described)

    def _open(self, described: list[RankDescription]) -> tuple[str, str, str]:
        """Plan which rank writes which shard; rank 0 makes the folder."""
        for rank, each in enumerate(described):
            for ours, theirs in zip(described[0].asked, each.asked, strict=True):
                if ours != theirs:
                    raise MisuseError(f"rank 0 asks for {ours} and rank {rank} for {theirs}")
        optimizer, planned = merge_optimizers(described), plan_files(described)
        self.files = [file for file in planned if file.rank == self.group.rank]
        if self.group.rank != 0:
            return "", "", ""
        manifest = make_manifest(described, optimizer, planned, self.step)
        self.new = new_checkpoint(self.folder, manifest, self.group.timeout / 2, self.keep)
        return next(self.new)

    def _copy(self) -> None:
        """Replace the caller's tensors that this rank writes by copies on the CPU."""
        copies = {}
        for shard in (shard for file in self.files for shard, _ in file.shards):
            tensor = self.tensors[shard]
            copies[shard] = torch.empty(tensor.shape, dtype=tensor.dtype)
            copy_bits(copies[shard], tensor)
        self.tensors = copies

    def _write_and_commit(self) -> None:
        """Write this rank's files; when all ranks have written theirs, rank 0 commits."""
        try:
            with self._abandoned_on_error():
                written = self.group.on_all(self._write)
                files = [FileRecord(*file) for of_rank in written for file in of_rank]
                new = self.new
                self.group.on_rank0(lambda: new.send(files) if new is not None else None)
        except CheckpointError as error:
            error.message += f". The last checkpoint is {self.previous or 'none'}, as before"
            raise
        if self.new is not None:
            next(self.new, None)

    def _write(self) -> list[tuple[str, int, int, str]]:
        """Write this rank's files; return their records as tuples."""
        seen = b""
        with suppress(FileNotFoundError, NotADirectoryError):
            seen = files.read(os.path.join(self.path, storage.BEGUN), storage.MOST_BEGUN)
        if seen != self.nonce.encode():
            raise CheckpointIOError(
                f"{self.path}, which rank 0 has just made, cannot be seen from here: give every "
                "rank the same folder, on a file system that all of them share"
            )

        def bytes_of(shard: TensorShard) -> memoryview:
            return tensor_bytes(plain(self.tensors[shard].cpu()))

        written = [write_tensors(self.path, file, bytes_of) for file in self.files]
        storage.sync_folder(self.path)
        return [(file.name, file.bytes, file.block, file.checksums) for file in written]

    @contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self.new is not None:
                self.new.close()
                self.new = None
            raise


def describe(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    local: LocalTensors,
    means: Mapping[Tensor, Tensor],
) -> RankDescription:
    """Return the description of this rank's model and optimizer; add their tensors to `local`.

    means   values to take instead of those of some tensors
    """
    held = state.model_state(model)
    for name, shard in held.parameters.items():
        tensor = means.get(shard.tensor, shard.tensor)
        local.add("model", name, tensor, shard.slice, equal=True)
    for name, shard in held.buffers.items():  # may differ between ranks: rank 0's are written
        local.add("model", name, means.get(shard.tensor, shard.tensor), equal=False)
    described = RankDescription(aliases=held.aliases, cuts=cuts_of(model, held.parameters))
    for key, module in held.stateful.items():
        described.values[key] = local.json(module.get_extra_state(), f"model/{key}")
    if optimizer is not None:
        described.optimizer = describe_optimizer(optimizer, held.parameters, local)
    for name, wrapper in held.wrappers.items():
        for key, tensor in wrapper.own_state().items():  # the key names the rank
            local.add("state", f"own/{name}/{key}", tensor, equal=False)
    return described


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


def new_checkpoint(
    folder: str, manifest: Manifest, timeout: float, keep: int | None
) -> Generator[tuple[str, str, str], list[FileRecord]]:
    """Make a checkpoint in `folder`; `manifest` has everything but the records of the files.

    Yields the name of its folder, a nonce in it, and the newest checkpoint before it, or "". A rank
    that reads the nonce there sees the same folder. Send it the files' records when all are
    durable, and it commits. Resumed again, it removes all but the last `keep` checkpoints. If an
    error is raised, or it is closed before, it removes the new folder unless that is committed.
    OSErrors name files.

    timeout    seconds to wait for another save there
    """
    storage.make_parents(folder)
    with storage.locked(folder, timeout):
        for each in storage.numbered(folder):
            if not each.is_committed:  # left over: the lock says that no save is under way
                _try_to_remove(each)
        before = storage.committed(folder)
        new = storage.make_next(folder, manifest.step)
        try:
            nonce = f"process {os.getpid()} on {socket.gethostname()}: {secrets.token_hex(16)}"
            storage.write_file(os.path.join(new.path, storage.BEGUN), nonce.encode())
            made = (os.path.basename(new.path), nonce, before[-1].path if before else "")
            written = yield made
            _commit(new.path, msgspec.structs.replace(manifest, files=written))
        except BaseException:
            _try_to_remove(new)
            raise
        yield made
        try:
            for old in storage.committed(folder)[: -keep if keep is not None else 0]:
                _try_to_remove(old)
        except OSError as error:
            log.warning("%s: cannot look for old checkpoints to remove: %s", folder, error)


def _commit(path: str, manifest: Manifest) -> None:
    for file in manifest.files:
        _check_seen(path, file)
    content = encode(manifest)
    commit = Commit(VERSION, manifest.step, len(content), xxh3_64_hexdigest(content))
    unfinished = os.path.join(path, storage.UNFINISHED)
    storage.write_file(os.path.join(path, storage.MANIFEST), content)
    storage.write_file(unfinished, encode(commit))
    with files.folder(path) as at, files.naming(path):
        storage.sync(at)
        os.rename(storage.UNFINISHED, storage.COMMIT, src_dir_fd=at, dst_dir_fd=at)
        storage.sync(at)


def _check_seen(folder: str, file: FileRecord) -> None:
    """Raise `CheckpointIOError` unless rank 0 sees the file of another rank."""
    path = os.path.join(folder, file.name)
    try:
        size = storage.size_of(path)
    except FileNotFoundError:
        size = -1
    if size != file.bytes:
        what = "cannot be seen" if size < 0 else f"has {size} bytes"
        raise CheckpointIOError(
            f"{path}, {file.bytes} bytes that rank {int(file.name.split('-')[1])} has written, "
            f"{what} from rank 0: is the folder on a file system that all ranks share?"
        )


def _try_to_remove(folder: CheckpointFolder) -> None:
    try:
        storage.remove(folder)
    except OSError as error:
        log.warning("%s cannot be removed; the next save will try again: %s", folder.path, error)

"""One save, as one rank goes through it: plan, open, copy if need be, write, commit."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.backends.memory import copy_bits, plain, tensor_bytes
from phalanx.checkpoint.commit import NewCheckpoint, check_shared, files_in_order
from phalanx.checkpoint.description import Description, File, Holdings
from phalanx.checkpoint.disk import sync_folder
from phalanx.checkpoint.manifest import FORMAT, VERSION, FileRecord, Manifest
from phalanx.checkpoint.plan import PlannedFile, merge_optimizers, plan_files, records_of
from phalanx.checkpoint.ranks import Ranks
from phalanx.checkpoint.safetensors_file import write_tensors
from phalanx.errors import CheckpointError, MisuseError


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

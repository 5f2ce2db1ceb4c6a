"""`Elastic`: a job whose ranks die, leave and arrive, while the others train on."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils.data import Dataset

from phalanx.checkpoint import PendingSave, latest_checkpoint, load_checkpoint, save_checkpoint
from phalanx.checkpoint.group import CheckpointGroup
from phalanx.collectives import all_reduce_, barrier, broadcast_object
from phalanx.core import random_state
from phalanx.core.backend import Backend
from phalanx.core.replaceable import ReplaceableBackend
from phalanx.elastic.batches import Batches
from phalanx.elastic.generations import Ended, Generations
from phalanx.elastic.kept import Kept
from phalanx.elastic.membership import Bounds, Decision
from phalanx.elastic.memory import Memory
from phalanx.elastic.moves import move
from phalanx.elastic.start import find_site, leave_when_told
from phalanx.errors import (
    CollectiveTimeoutError,
    DistributedError,
    InvalidWorldSizeError,
    MisuseError,
    PeerLostError,
)
from phalanx.launch.report import AGAIN
from phalanx.transport.simulated import SimulatedBackend

log = logging.getLogger("phalanx")
LOSS = PeerLostError, CollectiveTimeoutError
_LONG = 2.0  # seconds: after a longer block, a notice is obeyed without another one
# What the ranks tell each other in a vote: how many ...
_NOTICED, _LEAVING, _COMING = 1, 1 << 20, 1 << 40


class Generation(NamedTuple):
    """One generation of a job, as this process saw it.

    number      from 1
    first_step  the number of its first step
    world_size  its number of ranks
    lost        ranks of the generation before that are gone
    joined      its ranks that were not in the generation before
    redone      steps that had counted, and are taken again
    seconds     by phase: "noticed", from the last sign of the old generation to the loss's notice;
                "decided", "met", "moved", and "total", from the notice on
    """

    number: int
    first_step: int
    world_size: int
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    redone: int
    seconds: dict[str, float]


class Elastic:
    """A job whose ranks die, leave and arrive, in the place of `init()`. Returns at once.

        job = phalanx.Elastic(min_ranks=2)
        model = phalanx.DDP(Model(), job.backend)
        optimizer = torch.optim.AdamW(model.parameters())
        batches = job.loader(dataset, batch_size=256)
        job.keep(model=model, optimizer=optimizer)
        for step in job.steps(10_000):
            with step:                                      # counts on all ranks, or on none
                inputs, targets = batches.take()
                loss = criterion(model(inputs), targets)
                optimizer.zero_grad()
                (loss * step.weight).backward()
                optimizer.step()
            if step.done:                                   # else the same step comes again
                job.backend.print(step.number, loss.item())

    When a rank is lost, the others keep their processes, form the next *generation* of the group,
    and go on. What it begins with is, bit for bit, what a checkpoint saved after the last step that
    counts would give when loaded on its ranks; it comes out of their memories. `docs/elastic.md`
    has the protocol, its costs, and recipes.

    backend     "tcp", "shm", "hybrid", or "auto": memory inside a host, TCP between. Under
                `phalanx.simulate` the backend that the function is given
    min_ranks   with fewer the job waits for others, up to `wait` seconds; by default
                PHALANX_MIN_RANKS (`phalanx run --min`), else 1
    max_ranks   more stand by until they are needed; by default PHALANX_MAX_RANKS, else all train
    copy_every  steps between two versions that are kept in memory, of what not every rank holds
    checkpoints       a folder: the job begins from the newest checkpoint there, and saves into it
    checkpoint_every  steps between two checkpoints, saved in the background; the last step's is
                      saved, too. 0: only that one
    seed        of the random states: in each generation, rank and first step they begin anew
    wait        seconds for enough ranks, or for a store that cannot be reached
    timeout     seconds for a call, as of `init`. A rank that keeps the others waiting for longer is
                lost, and joins again when it can
    store       "etcd://host:port,...", the address of a launcher's store, or an object with torch's
                `get`, `set`, `check` and `compare_set`; by default PHALANX_STORE. Processes that
                nobody has started as a job train alone

    # In a block
    All that the ranks send each other belongs into a block; so does all that changes what is kept.
    An exception of the block ends the job on this rank alone, and the others go on without it.

    # Errors
    `InvalidWorldSizeError` for `min_ranks` below 1 or above `max_ranks`; `UnsupportedOperationError`
    for gloo, nccl, ucc and mpi. `MembershipError` where there are too few ranks, or no store, for
    `wait` seconds. `DesyncError` in a process that keeps something else than those that train,
    which names the first difference; `AuthenticationError` with another token.
    """

    def __init__(
        self,
        backend: str | Backend = "auto",
        *,
        min_ranks: int | None = None,
        max_ranks: int | None = None,
        copy_every: int = 1,
        checkpoints: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 0,
        seed: int = 0,
        wait: float = 600.0,
        timeout: float = 60.0,
        store: object = None,
    ) -> None:
        self._site, least, most = find_site(backend, store)
        self._min = min_ranks if min_ranks is not None else least
        self._max = max_ranks if max_ranks is not None else most
        if self._min < 1 or self._max < self._min:
            raise InvalidWorldSizeError(
                f"Elastic: min_ranks={self._min} must be at least 1, and at most "
                f"max_ranks={self._max}"
            )
        for name, value in {"copy_every": copy_every, "checkpoint_every": checkpoint_every}.items():
            if value < (name == "copy_every"):
                raise ValueError(f"Elastic: {name}={value} must be a number of steps")
        if checkpoint_every and checkpoints is None:
            raise ValueError("Elastic: checkpoint_every needs checkpoints=, a folder")
        alone = SimulatedBackend.create_group(1, timeout=timeout)[0]
        self.backend = ReplaceableBackend(alone)
        self.history: list[Generation] = []
        self._copy_every, self._checkpoint_every = copy_every, checkpoint_every
        self._checkpoints = None if checkpoints is None else os.fspath(checkpoints)
        self._seed, self._wait, self._timeout = seed, wait, timeout
        self._kept = Kept(self.backend)
        self._batches: list[Batches[Any]] = []
        self._notice = leave_when_told(self._site)
        self._generations: Generations | None = None
        self._total = 0
        self._version = 0  # number of the next step, and of the state before it
        self._highest = 0  # the most that it has been
        self._in_block = False
        self._memory = Memory(self._kept, self.backend, self._site)
        self._saved = -1
        self._save: PendingSave | None = None
        self._notice_seen = self._leaves = self._over = False
        self._flags = torch.zeros(1, dtype=torch.int64)

    # What is kept -----------------------------------------------------------------------------

    def keep(self, **objects: Any) -> None:
        """Keep these: modules, their optimizers, and others with `state_dict` and
        `load_state_dict`, such as schedules. Before `steps`; the same on every process.

        A module is a plain one, `DDP`, `FSDP`, `LocalSGD` or `DiLoCo` on `job.backend`, or one with
        such in it. The state of other objects is numbers and text, and the same on every rank.

        Raises `TypeError` for an object without a state; `MisuseError` after `steps`, or for a
        module on another backend; `UnsupportedOperationError` for `Pipeline`, parallel layers, and
        modules on the meta device.
        """
        if self._generations is not None or self._over:
            self._refuse("keep() after steps() has begun: keep all before it")
        self._kept.add(objects)

    def sampler(self, samples: Any, *, batch_size: int, **options: Any) -> Batches[list[int]]:
        """Return batches of sample numbers: `take()` gives this rank's part of a joined batch.

        samples   how many there are, or the numbers of those to be used
        options   shuffle, seed, drop_last, lengths, pool, weights: as for `phalanx.BatchSampler`

        The joined batches are the same on any number of ranks, so each sample comes once in an
        epoch. Epochs follow each other.
        """
        from phalanx.elastic.batches import sampler  # noqa: PLC0415

        return self._add_batches(
            sampler(samples, self.backend, batch_size=batch_size, **options), "sampler"
        )

    def loader(self, dataset: Dataset[Any], *, batch_size: int, **options: Any) -> Batches[Any]:
        """Return batches that torch's `DataLoader` loads, which takes the other `options`.

        In a step's block, `take()` gives this rank's part of the joined batch, once.
        """
        from phalanx.elastic.batches import loader  # noqa: PLC0415

        return self._add_batches(
            loader(dataset, self.backend, batch_size=batch_size, **options), "loader"
        )

    def _add_batches(self, batches: Batches[Any], kind: str) -> Batches[Any]:
        self.keep(**{f"{kind} {len(self._batches)}": batches})
        self._batches.append(batches)
        return batches

    # For the script ---------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """The number of the generation that this process is in, from 1; before `steps` 0."""
        return self.history[-1].number if self.history else 0

    @property
    def done(self) -> int:
        """The number of steps that count."""
        return self._version

    @property
    def safe(self) -> int:
        """The number of steps that no loss of one rank undoes."""
        return self._memory.copied if self._memory.copies else self._version

    def leave(self) -> None:
        """Leave after this step, as after a SIGTERM: `steps` raises SystemExit(75) then."""
        self._leaves = True

    def steps(self, total: int) -> Iterator[ElasticStep]:
        """Yield the steps up to number `total` - 1, each until it counts.

        Blocks until there is a group: it forms one, or joins one that trains. After the last step
        all ranks go on. A process that comes later ends with exit code 0; one that leaves, with 75.
        """
        self._begin(total)
        try:
            self._form((), "the training begins")
            while self._version < total:
                step = ElasticStep(self, self._version, self.generation)
                yield step
                if self._over:
                    raise SystemExit(AGAIN)
                if step.state == "new":
                    self._refuse(f"the block of step {step.number} was not entered: `with step:`")
            self._finish()
        except Ended:
            self.close()
            log.info("process %s comes after the end", self._site.process)
            raise SystemExit(0) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the group at once; the others take this rank as lost."""
        self._over = True
        if self._generations is not None:
            self._generations.newcomers.watch(wanted=False)
        self._memory.close()
        for batches in self._batches:
            batches.close()
        self.backend.inner.abort()
        self._site.close()
        if self._notice is not None:
            self._notice.close()

    @property
    def weight(self) -> float:
        """`step.weight` of the step in whose block this process is: of what it took last."""
        taken = [each.weight for each in self._batches if each.taken]
        return taken[-1] if taken else 1.0

    # The loop ---------------------------------------------------------------------------------

    def _begin(self, total: int) -> None:
        if self._generations is not None or self._over:
            self._refuse("steps() a second time: a job has one loop")
        kept = self._kept
        if not kept.has_modules:
            self._refuse("steps() without a model: job.keep(model=..., optimizer=...) first")
        if self._checkpoints is not None and len(kept.optimizers) > 1:
            self._refuse("checkpoints= takes one optimizer, and several are kept")
        multiple = kept.multiple
        bounds = Bounds(self._min, self._max, multiple)
        if self._site.store is not None and not bounds.size(self._max):
            raise InvalidWorldSizeError(
                f"Elastic: no number of ranks from {self._min} to {self._max} is a multiple of "
                f"{multiple}, as FSDP's strategy needs"
            )
        self._total = total
        lines = [*kept.lines(), f"steps: {total}", f"seed: {self._seed}"]
        lines += [
            f"copy_every: {self._copy_every}",
            f"checkpoints: {self._checkpoints is not None}",
        ]
        self._generations = Generations(
            self._site, bounds, lines, wait=self._wait, timeout=self._timeout
        )
        self._memory.begin()

    def enter(self, step: ElasticStep) -> None:
        """Begin a step's block."""
        if self._in_block:
            self._refuse("a step inside another step's block")
        if self._over or step.number != self._version or step.generation != self.generation:
            self._refuse(f"step {step.number} of generation {step.generation} is over")
        self._kept.begin_block()
        self._memory.begin_block()
        self._in_block = True
        for batches in self._batches:
            batches.begin()
        self._block_began = time.monotonic()

    def leave_block(self, step: ElasticStep, error: BaseException | None) -> bool:
        """End a step's block; return whether the error is dealt with."""
        self._in_block = False
        if error is not None:  # to raise it here would make a cycle, with the old group's memory
            if not self._is_loss(error):
                self.close()
                return False
            self._form(self._culprits(error), str(error))
            return True
        try:
            self._count(step)
        except BaseException as other:
            if not self._is_loss(other):
                self.close()
                raise
            self._form(self._culprits(other), str(other))
        return True

    def _is_loss(self, error: BaseException) -> bool:
        """Return whether it follows from a rank that is lost, or has kept others waiting."""
        if isinstance(error, LOSS):
            return True
        failure = self.backend.failure
        return (
            isinstance(error, DistributedError)
            and failure is not None
            and issubclass(failure.error, LOSS)
        )

    @staticmethod
    def _culprits(error: BaseException) -> tuple[int, ...]:
        peer = error.peer if isinstance(error, LOSS) else None
        return () if peer is None else (peer,)

    def _count(self, step: ElasticStep) -> None:
        """Take the step as taken, keep the version after it, and vote."""
        for batches in self._batches:
            batches.count()
        followed, memory = self._kept.end_block(), self._memory
        memory.copies = followed or not self._kept.is_whole()
        after = step.number + 1
        if memory.copies and (after % self._copy_every == 0 or self._notice_seen):
            memory.write(after)
        told = self._vote(f"step {step.number} counts")
        self._version, self._highest = after, max(after, self._highest)
        self._after_vote(told)

    def _vote(self, label: str) -> int:
        """Tell all ranks what this one wants, and return the sums."""
        newcomers = self._coming()
        self._leaves |= self._notice is not None and self._notice.told
        now = self._leaves and self._may_leave()
        self._flags[0] = _NOTICED * self._leaves + _LEAVING * now + _COMING * newcomers
        all_reduce_(self._flags, self.backend, label=label)
        self._leaves_now = now
        return int(self._flags[0])

    def _may_leave(self) -> bool:
        """Return whether this rank leaves after this vote: all ranks have copied meanwhile."""
        long = time.monotonic() - self._block_began > _LONG
        kept = self.safe == self._version
        return self._notice_seen or (long and kept) or self.backend.world_size == 1

    def _coming(self) -> bool:
        """Return whether newcomers may join: rank 0 knows."""
        generations = self._generations
        if generations is None or self.backend.rank or self._site.store is None:
            return False
        if not self._site.watches:
            generations.newcomers.look(self._site.store)
        living = generations.newcomers.living(generations.members)
        size, bounds = self.backend.world_size, generations.bounds
        return bounds.size(size + len(living)) > size

    def _after_vote(self, told: int) -> None:
        size = self.backend.world_size
        noticed, leaving = told % _LEAVING, told % _COMING // _LEAVING
        if noticed == size:
            self._save_checkpoint(wait=True)
            leaving, self._leaves_now = size, True
        if self._leaves_now and leaving:
            self._go()
            return
        self._notice_seen = noticed > 0
        self._save_checkpoint(wait=False)
        if leaving or told >= _COMING:
            self._form((), "a rank leaves" if leaving else "a rank joins")

    def _go(self) -> None:
        """Leave: the others form the next generation at once."""
        log.info("process %s leaves after step %d", self._site.process, self._version - 1)
        self.backend.inner.close()
        self.close()

    # A new generation -------------------------------------------------------------------------

    def _form(self, gone: Sequence[int], why: str) -> None:
        """Form generations, until one has a state that all of its ranks have."""
        began = time.monotonic()
        seconds = {"decided": 0.0, "met": 0.0, "moved": 0.0}
        before = self._version
        if self._site.store is None:
            return self._begin_alone()
        generations, lost = self._generations, set(gone)
        assert generations is not None
        members = generations.members
        while True:
            held = self._memory.held(generations.entered)
            decision = generations.next(held, lost, self.backend.lost)
            lost = set()
            decided = time.monotonic()
            try:
                self._enter(decision, seconds)
            except LOSS as error:
                lost.update(self._culprits(error))
                if error.peer is not None and error.peer >= len(decision.survivors):
                    generations.newcomers.did_not_come(decision.members[error.peer])
                continue
            seconds["decided"] = decided - began
            break
        return self._entered(decision, why, seconds, before, began, members)

    def _enter(self, decision: Decision, seconds: dict[str, float]) -> None:
        """Be a rank of this generation: meet the others, and take the state."""
        generations, site, kept = self._generations, self._site, self._kept
        assert generations is not None
        rank, began = decision.members.index(site.process), time.monotonic()
        group = site.meet(
            decision.generation, rank, len(decision.members), decision.address, self._timeout
        )
        met = time.monotonic()
        first = decision.version is None or not decision.layout
        if rank >= len(decision.survivors):
            self._memory.forget(first=first)
        self.backend.inner.abort()
        self.backend.enter(group)
        generations.entered = decision.generation
        kept.regrouped()
        if first:
            values, self._version = self._bring_first()
        else:
            given = self._memory.give(decision)
            values = move(given, self.backend, kept.model, kept.optimizers)
            self._version = decision.version or 0
        kept.load_values(values)
        for batches in self._batches:
            batches.regrouped()
        self._memory.enter(self._version, decision.generation, decision.members, first=first)
        barrier(self.backend, label=f"generation {decision.generation} has its state")
        self._memory.complete()
        seconds["met"], seconds["moved"] = met - began, time.monotonic() - met

    def _bring_first(self) -> tuple[Any, int]:
        """Begin with the newest checkpoint, or else with rank 0's state before the first step."""
        kept, backend, folder = self._kept, self.backend, self._checkpoints
        found = broadcast_object(
            None if folder is None else str(latest_checkpoint(folder) or ""), backend
        )
        if found:
            first = kept.optimizers[0] if kept.optimizers else None
            loaded = load_checkpoint(str(found), model=kept.model, optimizer=first, backend=backend)
            self._saved = loaded.step
            return loaded.extra, loaded.step
        given = self._memory.first() if backend.rank == 0 else []

        def check() -> None:
            if backend.rank == 0 and not given:
                raise MisuseError(
                    f"no version of the state is complete after step {self._highest - 1}: ranks "
                    "are lost that alone had parts of it, and there is no checkpoint "
                    "(checkpoints=). Start the job again"
                )

        CheckpointGroup(backend, "elastic", self._timeout).on_all(check)
        return move(given, backend, kept.model, kept.optimizers), 0

    def _entered(
        self,
        decision: Decision,
        why: str,
        seconds: dict[str, float],
        before: int,
        began: float,
        members: Sequence[str],
    ) -> None:
        """Take note of a new generation, whose state is there."""
        generations = self._generations
        assert generations is not None
        rank, size = self.backend.rank, self.backend.world_size
        random_state.restore(
            random_state.seeded(self._seed, self._version * (1 << 20) + size * (1 << 10) + rank)
        )
        seconds["total"] = time.monotonic() - began
        joined = tuple(range(len(decision.survivors), size))
        redone = max(0, before - self._version)
        self.history.append(
            Generation(
                decision.generation, self._version, size, decision.lost, joined, redone, seconds
            )
        )
        if rank == 0:
            generations.tell_kept()
            self._log(why, members)
        generations.newcomers.watch(wanted=rank == 0)

    def _log(self, why: str, before: Sequence[str]) -> None:
        """Log the generation in one line."""
        now = self.history[-1]
        lost = ", ".join(
            f"rank {rank} ({before[rank]})" if rank < len(before) else f"rank {rank}"
            for rank in now.lost
        )
        what = f"{lost} lost in step {now.first_step}" if lost else why
        phases = ", ".join(
            f"{name} {took:.3f}" for name, took in now.seconds.items() if name != "total"
        )
        log.info(
            "generation %d: %s; %d go on, %d join, %d steps done again, %.3f s (%s)",
            now.number,
            what,
            now.world_size - len(now.joined),
            len(now.joined),
            now.redone,
            now.seconds["total"],
            phases,
        )

    # The end ----------------------------------------------------------------------------------

    def _save_checkpoint(self, *, wait: bool) -> None:
        """Save, if it is time; the save in the background is waited for at the end alone."""
        kept, every = self._kept, self._checkpoint_every
        if self._checkpoints is None or self._saved == self._version:
            return
        if self._save is not None and self._save.failed:
            self._save, self._saved = None, -1
        due = every and self._version - max(self._saved, 0) >= every
        if not (wait or due):
            return
        first = kept.optimizers[0] if kept.optimizers else None
        self._save = save_checkpoint(
            self._checkpoints,
            model=kept.model,
            optimizer=first,
            step=self._version,
            extra=kept.values(),
            backend=self.backend,
            async_save=not wait,
        )
        self._saved = self._version

    def _finish(self) -> None:
        """Save the last checkpoint, and let all ranks end together."""
        while True:
            try:
                self._save_checkpoint(wait=True)
                if self.backend.rank == 0 and self._site.store is not None:
                    self._site.store.write_note("end", str(self._version))
                self._vote("the end")
                break
            except LOSS as error:
                self._form(self._culprits(error), str(error))
        self._over = True
        if self._generations is not None:
            self._generations.newcomers.watch(wanted=False)

    def _refuse(self, problem: str) -> NoReturn:
        raise MisuseError(f"rank {self.backend.rank}: Elastic: {problem}", rank=self.backend.rank)


class ElasticStep:
    """A step, for `with step:`.

    number       from 0
    generation   in which it is taken
    done         whether it counts, once the block has ended
    """

    def __init__(self, job: Elastic, number: int, generation: int) -> None:
        self.number, self.generation, self.done = number, generation, False
        self.state: Literal["new", "entered", "over"] = "new"
        self._job = job

    @property
    def weight(self) -> float:
        """Of this rank's loss, so that the mean over the ranks is that of the joined batch: 1.0
        unless the ranks' parts differ in size.
        """
        return self._job.weight

    def __enter__(self) -> ElasticStep:
        self._job.enter(self)
        self.state = "entered"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        handled = self._job.leave_block(self, error)
        self.state = "over"
        self.done = self._job.done > self.number
        return handled

"""`Elastic`: a job whose ranks die, leave and arrive, while the others train on."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterator
from types import TracebackType
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch.utils.data import Dataset

from phalanx.collectives import all_reduce_
from phalanx.core.backend import Backend
from phalanx.core.call import check_timeout, whole_number
from phalanx.core.replaceable import ReplaceableBackend
from phalanx.elastic import batches
from phalanx.elastic.batches import Batches
from phalanx.elastic.generations import Ended, Generations, Left
from phalanx.elastic.kept import Kept, watch_optimizers
from phalanx.elastic.membership import Bounds
from phalanx.elastic.memory import Memory
from phalanx.elastic.regrouping import LOSS, Generation, Regrouping, blamed
from phalanx.elastic.saves import Checkpoints
from phalanx.elastic.start import find_site, leave_when_told
from phalanx.errors import DistributedError, InvalidWorldSizeError, MisuseError
from phalanx.launch.report import AGAIN, error_line
from phalanx.transport.simulated import SimulatedBackend

log = logging.getLogger("phalanx")
_LONG = 2.0  # seconds: after a longer block, a notice is obeyed without another one
_BITS = 15  # of each number in a vote's sum: at most 32,767 ranks


class Votes(NamedTuple):
    """How many ranks say so."""

    noticed: int  # that they are to leave
    leaving: int  # that they do so now
    needing: int  # that versions are to be kept
    uncuttable: int  # that they cannot be
    coming: int  # that newcomers make the group larger: rank 0 knows


class Elastic:
    """A job whose ranks die, leave and arrive while the others train on, in the place of `init()`.

    When a rank is lost, the others keep their processes, form the next *generation* of the group,
    and go on. What it begins with is, bit for bit, what a checkpoint saved after the last step that
    counts would give when loaded on its ranks; it comes out of their memories. The constructor
    returns at once, and `backend` is a world of one until `steps`. Guide: `docs/elastic.md`.

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

    # Notes
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

    # In a block
    All that the ranks send each other belongs into a block; so does all that changes what is kept.
    An exception of the block ends the job on this rank alone, and the others go on without it.

    # Errors
    `InvalidWorldSizeError` for `min_ranks` below 1 or above `max_ranks`; for gloo, nccl, ucc and
    mpi `UnsupportedOperationError`. `MembershipError` if there are too few ranks, or no store, for
    `wait` seconds. `DesyncError` in a process that keeps something else than those that train, and
    on all ranks if optimizers' options or kept objects differ after a step; it names the first
    difference. `AuthenticationError` with another token.
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
        self._min = whole_number(least if min_ranks is None else min_ranks, "min_ranks")
        self._max = whole_number(most if max_ranks is None else max_ranks, "max_ranks")
        if self._min < 1 or self._max < self._min:
            raise InvalidWorldSizeError(
                f"Elastic: min_ranks={self._min} must be at least 1, and at most "
                f"max_ranks={self._max}"
            )
        if self._site.store is None:
            self._min = self._max = 1  # nobody has started this process as a job: it trains alone
        for name, value in {"copy_every": copy_every, "checkpoint_every": checkpoint_every}.items():
            if whole_number(value, name) < (name == "copy_every"):
                raise ValueError(f"Elastic: {name}={value} must be a number of steps")
        if checkpoint_every and checkpoints is None:
            raise ValueError("Elastic: checkpoint_every needs checkpoints=, a folder")
        alone = SimulatedBackend.create_group(1, timeout=timeout)[0]
        self.backend = ReplaceableBackend(alone)
        self.history: list[Generation] = []
        self._copy_every, self._seed = copy_every, whole_number(seed, "seed")
        self._wait, self._timeout = check_timeout(wait, "wait"), timeout
        self._kept = Kept(self.backend)
        self._memory = Memory(self._kept, self.backend, self._site)
        folder = None if checkpoints is None else os.fspath(checkpoints)
        self._checkpoints = Checkpoints(folder, checkpoint_every, self._kept, self.backend)
        self._batches: list[Batches[Any]] = []
        self._notice = leave_when_told(self._site)
        self._generations: Generations | None = None
        self._regrouping: Regrouping | None = None
        self._version = self._total = 0  # steps that count, and all
        self._in_block = self._told_to_leave = self._noticed = self._over = False
        self._block_began, self._exit_code, self._failed = 0.0, AGAIN, ""
        self._ballot = torch.zeros(2, dtype=torch.int64)

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
        options = {"seed": self._seed, **options}
        made = batches.sampler(samples, self.backend, batch_size=batch_size, **options)
        return self._add_batches(made, "sampler")

    def loader(self, dataset: Dataset[Any], *, batch_size: int, **options: Any) -> Batches[Any]:
        """Return batches that torch's `DataLoader` loads, which takes the other `options`.

        In a step's block, `take()` gives this rank's part of the joined batch, once.
        """
        options = {"seed": self._seed, **options}
        made = batches.loader(dataset, self.backend, batch_size=batch_size, **options)
        return self._add_batches(made, "loader")

    def _add_batches(self, made: Batches[Any], kind: str) -> Batches[Any]:
        self.keep(**{f"{kind} {len(self._batches)}": made})
        self._batches.append(made)
        return made

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

    @property
    def weight(self) -> float:
        """`step.weight` of the step in whose block this process is: of what it took last."""
        taken = [each.weight for each in self._batches if each.taken]
        return taken[-1] if taken else 1.0

    def leave(self) -> None:
        """Leave after this step or the next, as after a SIGTERM: `steps` raises SystemExit(75)."""
        self._told_to_leave = True

    def steps(self, total: int) -> Iterator[ElasticStep]:
        """Yield the steps up to number `total` - 1, each until it counts. None, if a checkpoint has
        as many behind it already.

        Blocks until there is a group: it forms one, or joins one that trains. After the last step
        all ranks go on. A process that comes later ends with exit code 0; one that leaves, with 75.
        """
        self._begin(total)
        try:
            self._form((), "")
            while not self._over:
                if self._version >= total:
                    self._finish()
                    continue
                step = ElasticStep(self, self._version, self.generation)
                yield step
                if step.state == "new":
                    self._refuse(f"the block of step {step.number} was not entered: `with step:`")
                if self._failed:
                    self._refuse(
                        f"the block of step {step.number} ended with {self._failed}, and with it "
                        "the job on this rank. To go on after an error, catch it inside the block"
                    )
                if self._over:
                    raise SystemExit(self._exit_code)
        except BaseException as error:
            self.close()
            if isinstance(error, (Ended, Left)):
                raise SystemExit(error.exit_code) from None
            raise

    def close(self) -> None:
        """Leave the group at once; the others take this rank as lost."""
        self._stop()
        self.backend.inner.close()

    def _stop(self) -> None:
        """Take no further part in the job."""
        self._over = True
        if self._generations is not None:
            self._generations.newcomers.watch(wanted=False)
        self._memory.close()
        watch_optimizers(self._kept, wanted=False)
        for each in self._batches:
            each.close()
        self._site.close()
        if self._notice is not None:
            self._notice.close()

    # The loop ---------------------------------------------------------------------------------

    def _begin(self, total: int) -> None:
        kept = self._kept
        if not hasattr(total, "__index__") or total < 0:
            raise ValueError(f"Elastic.steps({total!r}): it takes a number of steps")
        if self._generations is not None or self._over:
            self._refuse("steps() a second time: a job has one loop")
        if not kept.has_modules:
            self._refuse("steps() without a model: job.keep(model=..., optimizer=...) first")
        kept.check_wrapped()
        if self._checkpoints.folder is not None and len(kept.optimizers) > 1:
            self._refuse("checkpoints= takes one optimizer, and several are kept")
        bounds = Bounds(self._min, self._max, kept.multiple)
        if self._site.store is not None and not bounds.size(self._max):
            raise InvalidWorldSizeError(
                f"Elastic: no number of ranks from {self._min} to {self._max} is a multiple of "
                f"{bounds.multiple}, as FSDP's strategy needs"
            )
        lines = [f"steps: {total}", f"seed: {self._seed}", f"copy_every: {self._copy_every}"]
        lines += [f"checkpoints: {self._checkpoints.folder is not None}", *kept.lines()]
        self._generations = Generations(
            self._site,
            self.backend,
            bounds,
            lines,
            self._is_told,
            wait=self._wait,
            timeout=self._timeout,
        )
        self._regrouping = Regrouping(
            self._site,
            self.backend,
            self._generations,
            kept,
            self._memory,
            self._checkpoints,
            seed=self._seed,
            timeout=self._timeout,
        )
        watch_optimizers(kept, wanted=True)
        self._memory.begin()
        self._total = total

    def _form(self, gone: Collection[int], how: str) -> None:
        """Go on in the next generation; `how` says what became of ranks that are not in it."""
        assert self._regrouping is not None
        made = self._regrouping.form(self._version, gone, how)
        self.history.append(made)
        self._version, self._noticed = made.first_step, False

    def begin_block(self, step: ElasticStep) -> None:
        """Begin a step's block; `ElasticStep` calls it."""
        if self._in_block:
            self._refuse("a step inside another step's block")
        if self._over or (step.number, step.generation) != (self._version, self.generation):
            self._refuse(f"step {step.number} of generation {step.generation} is over")
        self._kept.begin_block()
        self._memory.begin_block()
        for each in self._batches:
            each.begin()
        self._in_block, self._block_began = True, time.monotonic()

    def end_block(self, step: ElasticStep, error: BaseException | None) -> bool:
        """End a step's block; return whether the error is dealt with. `ElasticStep` calls it."""
        self._in_block = False
        if error is not None and not self._is_loss(error):
            self._failed = error_line(error)
            self.close()
            return False
        try:
            if error is not None:  # to raise it would make a cycle, with the old group's memory
                self._form(blamed(error), "lost")
            else:
                self._count_or_form(step)
        except (Ended, Left) as over:  # `steps` says so
            self._exit_code = over.exit_code
            self.close()
        except BaseException:
            self.close()
            raise
        return True

    def _is_loss(self, error: BaseException) -> bool:
        """Return whether it follows from a rank that is lost, or has kept others waiting."""
        failure = self.backend.failure
        follows = failure is not None and issubclass(failure.error, LOSS)
        return isinstance(error, LOSS) or (isinstance(error, DistributedError) and follows)

    def _count_or_form(self, step: ElasticStep) -> None:
        """Let the step count, or go on in the next generation."""
        try:
            self._count(step)
        except DistributedError as error:
            if not self._is_loss(error):
                raise
            self._form(blamed(error), "lost")

    def _count(self, step: ElasticStep) -> None:
        """Take the step as taken, keep the version after it, and vote."""
        after = step.number + 1
        for each in self._batches:
            each.count()
        followed = self._kept.end_block()
        due = self._noticed or after % self._copy_every == 0
        self._memory.end_block(after, due=due)
        leaves = self._is_told() and self._may_leave(after)
        needs = self._memory.needs_copies(followed=followed)
        told = self._vote(f"step {step.number} counts", leaves=leaves, needs=needs)
        self._version = after
        if told.uncuttable:
            what = self._kept.uncuttable or "what an optimizer of another rank keeps"
            self._refuse(
                f"{what} belongs to that rank's shard, and cannot be cut anew for other ranks: "
                "take DDP, a ShardedOptimizer, or another optimizer"
            )
        self._memory.agree(after, needed=told.needing > 0, due=due)
        everybody = told.noticed == self.backend.world_size
        if everybody:
            self._checkpoints.save_now(after)
        if leaves or everybody:
            log.info("process %s leaves after step %d", self._site.process, step.number)
            self.close()
            return
        self._noticed = told.noticed > 0
        if after < self._total:
            self._checkpoints.save_if_due(after)
        if told.leaving or told.coming:
            self._form((), "" if told.coming else "left")

    def _vote(self, label: str, *, leaves: bool = False, needs: bool = False) -> Votes:
        """Tell all ranks what this one wants, and return how many do.

        Raises `DesyncError` on all ranks if what they keep differs: a sum of equal hashes is a
        multiple of each.
        """
        uncuttable = bool(self._kept.uncuttable)
        mine = Votes(self._is_told(), leaves, needs, uncuttable, self._are_coming())
        flags = sum(said << _BITS * place for place, said in enumerate(mine))
        digest = self._kept.digest()
        numbers = self._ballot.numpy()  # the same memory, which Python reads sooner
        numbers[:] = flags, digest
        all_reduce_(self._ballot, self.backend, label=label)
        told, digests = numbers.tolist()
        if (digests - digest * self.backend.world_size) % (1 << 64):
            self._kept.check_alike()
        return Votes(*(told >> _BITS * place & (1 << _BITS) - 1 for place in range(len(mine))))

    def _is_told(self) -> bool:
        """Return whether this process is to leave."""
        return self._told_to_leave or (self._notice is not None and self._notice.told)

    def _may_leave(self, after: int) -> bool:
        """Return whether a rank that is to leave may do so after this vote: others have its part.

        That is after one step more: others that have a notice, too, have said so by then, and all
        save together.
        """
        long = time.monotonic() - self._block_began > _LONG
        kept = not self._memory.copies or self._memory.copied == after
        return kept and (self._noticed or long)

    def _are_coming(self) -> bool:
        """Return whether newcomers make the next generation larger: rank 0 knows."""
        generations, site = self._generations, self._site
        if generations is None or self.backend.rank or site.store is None:
            return False
        if not site.watches:
            generations.newcomers.look(site.store)
        there = len(generations.newcomers.living(generations.members))
        size = self.backend.world_size
        return generations.bounds.size(size + there) > size

    def _finish(self) -> None:
        """Save the last checkpoint, and let all ranks end together.

        If one is lost meanwhile, the others form a generation. It may begin with an older version.
        """
        try:
            self._checkpoints.save_now(self._version)
            if self.backend.rank == 0 and self._site.store is not None:
                self._site.store.write_note("end", str(self.generation))
            self._vote("the end")
            self._stop()
        except LOSS as error:
            self._form(blamed(error), "lost")

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
        unless the ranks' parts differ in size. With several samplers each has its own `weight`.
        """
        return self._job.weight

    def __enter__(self) -> ElasticStep:
        self._job.begin_block(self)
        self.state = "entered"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        handled = self._job.end_block(self, error)
        self.state = "over"
        self.done = self._job.done > self.number
        return handled

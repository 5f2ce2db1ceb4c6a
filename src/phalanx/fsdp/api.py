"""FSDP: every rank keeps a shard of the parameters, and unshards a group of them to compute.

rank 0    | a a a . . .  b b . .  c c c . |         parameters() and optimizer state: shards
rank 1    | . . . a a a  . . b b  . . . c |
             unshard a -> compute a -> reshard a                           forward
             unshard a -> compute a -> reshard a, reduce gradients of a    backward
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.compression import Compressor
from phalanx.core.backend import Backend
from phalanx.errors import SizeMismatchError, UnsupportedOperationError
from phalanx.fsdp.build import Initialize, UnitRule, build, rebuild
from phalanx.fsdp.gradients import call_post_accumulate_hooks
from phalanx.fsdp.runtime import FsdpRuntime
from phalanx.fsdp.strategy import MixedPrecision, ShardingStrategy, precision_of, strategy_of
from phalanx.parallel.compressor_state import with_versions, without_own
from phalanx.parallel.guards import every_rank_does
from phalanx.parallel.joined_step import AveragingWrapper
from phalanx.parallel.uneven import JoinPhase
from phalanx.parallel.wrapper import Slice, claim, owner_of, release, remove_hooks
from phalanx.torch_internals import disable_dynamo

if TYPE_CHECKING:
    from typing_extensions import Self

ELEMENTWISE = frozenset(  # of torch: each element's step is its own
    "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()  # noqa: SIM905
)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether it is one of these, or of a class made from one."""
    return any(
        kind.__name__ in ELEMENTWISE and kind.__module__.startswith("torch.optim")
        for kind in type(optimizer).__mro__
    )


class FSDP(AveragingWrapper):
    """A module whose parameters, gradients and optimizer state are cut into shards over ranks.

        model = FSDP(model, backend)
        optimizer = torch.optim.AdamW(model.parameters())           # of this rank's shards
        loss_of(model(inputs), targets).backward()
        phalanx.clip_grad_norm_(model, 1.0)                         # the norm of all ranks' shards
        optimizer.step()

    It computes as the module does; after `loss.backward()` each parameter's `.grad` is this rank's
    part of the mean over all ranks.

    module       the model; the same on every rank, in structure. Rank 0's values count. It may be
                 on the meta device: then it is given values group by group (`reset_parameters` of
                 its modules), and no rank ever holds all of it
    backend      the ranks that train together
    strategy     what is cut, and when parameters are unsharded: a `ShardingStrategy`, or its name
    unit         the modules whose parameters form a group, which is unsharded together: a class of
                 modules, several, or a function of a module. By default every direct child that has
                 parameters (of a list of modules, its members), if there are several. Parameters
                 in none of these form a group, too, which is unsharded while the model computes
    mixed_precision   a dtype to compute in, or a `MixedPrecision`; shards keep theirs
    prefetch     number of groups that are unsharded ahead, in forward and in backward
    initialize   for a model on the meta device: called with each module that has parameters or
                 buffers of its own there, in the place of its `reset_parameters`
    compression  send less: `ErrorFeedback(TopK(0.01))`, `ErrorFeedback(PowerSGD(4))`, ...; below
    elementwise  take steps of an optimizer that is not torch's: each element's depends on its own
                 values and gradients alone

    # Notes
    `parameters()` yields one `Parameter` for each of the module's, under its name: a 1-D slice of
    it, possibly empty (NO_SHARD: the whole), the same object for the whole run. So optimizers
    work that are elementwise (SGD, Adam, AdamW). Others (Muon, Adafactor), which would see other
    shapes, are a `MisuseError` at their step, on every rank: give them to `ShardedOptimizer`.
    Accumulation: `no_sync` keeps full gradients and moves nothing; without it each backward pass
    adds to the shards' `.grad`. Hooks on parameters run when that is done, on shards:
    `Tensor.register_hook`'s before a mean is added, those after accumulation after it.
    `torch.autograd.grad` for parameters refers to unsharded ones, inside of the module's forward;
    shards are in no graph.

    A parameter group is sharded, unsharded while it computes, and sharded again; `unsharded.py`
    draws its states. Use of a full parameter while it is sharded is a `MisuseError`. A backward
    pass is noticed when it comes to an output of a group's module, or to a tensor computed from a
    full parameter in it (a loss kept as an attribute). It is not noticed at a tensor computed from
    a view of one (`x @ weight.t()`) that leaves the module by another way than its outputs. All
    ranks have to use the same groups in a pass, or `DesyncError` names them; inside a group ranks
    may use other parameters, and parameters that a rank did not use count as zeros.

    On one host with shared memory (`backend.common`) the full parameters exist once, and to unshard
    moves nothing: it waits until all ranks have written. Write parameters inside `writing()`,
    unless a torch optimizer or a method of this class does.

    Moves, per step and rank, with n bytes of parameters and p ranks: FULL_SHARD 3(p-1)/p n,
    SHARD_GRAD_OP 2(p-1)/p n, NO_SHARD an all-reduce of n. Keeps n/p of parameters, gradients and
    optimizer state each, and the groups in flight, five at the peak: one that computes, with its
    gradients, `prefetch` that are being unsharded, and the gradients of one in a reduce-scatter.

    Raises `InvalidWorldSizeError` if the strategy does not fit the number of ranks, `DesyncError`,
    on every rank, if their models or options differ, and `MisuseError` for a module that is
    wrapped already.

    # Compression
    Gradients are reduced by a copy of the compressor, `.compression`: those of a group together.
    With FULL_SHARD and SHARD_GRAD_OP each rank sends the owner of each shard its part of it; with
    `hybrid` gradients are reduced as they are inside of a shard group, and compressed between
    these, over the slow links; with NO_SHARD as in DDP. A compressor's state, such as residuals,
    stays as it was if a pass fails, or if a mean is not finite on any rank. Error feedback keeps 4
    bytes a value of the FULL gradients on every rank, and as many more while a backward pass runs:
    as much as a rank without FSDP has for gradients. So use it for models whose optimizer state is
    large, or use `hybrid`, which keeps a shard's. With a scaled loss call `.compression.scale_`
    when the scale changes. `state_dict` has this rank's state, too (`own_state`), as DDP's has;
    `full_state_dict` has not.
    """

    in_rounds = True
    shards_optimizers = True

    def __init__(
        self,
        module: nn.Module,
        backend: Backend,
        *,
        strategy: ShardingStrategy | str = ShardingStrategy.FULL_SHARD,
        unit: UnitRule | None = None,
        mixed_precision: MixedPrecision | torch.dtype | None = None,
        prefetch: int = 1,
        initialize: Initialize | None = None,
        compression: Compressor | None = None,
        elementwise: bool = False,
    ) -> None:
        super().__init__(module, backend)
        if prefetch < 0:
            raise ValueError(f"prefetch is a number of parameter groups, or 0, not {prefetch}")
        self._check_compression(compression)
        self.strategy = strategy_of(strategy)
        self.compression = deepcopy(compression)
        self.mixed_precision = precision_of(mixed_precision)
        self.elementwise = elementwise
        self._checked = self._unwrapped = False
        for name, part in module.named_modules():
            if isinstance(part, torch.jit.ScriptModule):
                self._refuse(
                    f"{name or 'the module'} is a ScriptModule, whose compiled code has parameters "
                    "of its own: wrap the module that it was compiled from"
                )
        for name, parameter in module.named_parameters():
            if (owner := owner_of(parameter)) is not None:
                known_as = next((n for n, p in owner.named_parameters() if p is parameter), name)
                self._refuse(
                    f"of this {type(module).__name__} {name} is in another {type(owner).__name__} "
                    f"already, of a {type(owner.module).__name__}, as {known_as}: unwrap() or "
                    "delete that one first, or wrap layers that share it together"
                )
        self._runtime = build(
            module,
            backend,
            strategy=self.strategy,
            rule=unit,
            precision=self.mixed_precision,
            prefetch=prefetch,
            initialize=initialize,
            compressor=self.compression,
        )
        for parameter in module.parameters():
            claim(parameter, self)
        self._handles: list[Any] = []
        weakref.finalize(self, remove_hooks, self._handles)  # a list, which does not keep this
        self.attach()

    def attach(self) -> None:
        """Let the runtime notice passes from now on."""
        if self._runtime.compression is not None:
            self._sharding = self._runtime.compression.cut(self._runtime.flats)
        self._handles += self._runtime.hook()

    def regrouped(self) -> None:
        """Cut the parameters anew, in place, for the ranks that `backend` has now.

        As of any `Wrapper`, but for values: a `Parameter` is in new memory, of any contents until
        it is written, as by `load_checkpoint`; or it stays where it is, as the same part. In both
        cases what `p.detach()` gave before has the old shard until then, and `slices()` gave its
        place. Ranks that have full parameters in common make that memory together: they send
        small messages, and block. If that fails, call it again, with the next group.
        `InvalidWorldSizeError`, with nothing changed, if the strategy does not fit the ranks.
        """
        self.strategy.ranks_per_copy(self.backend.world_size)
        super().regrouped()
        remove_hooks(self._handles)
        self._runtime.close()
        self._runtime = rebuild(self._runtime, self.module)
        self.attach()

    def check_regroupable(self) -> None:
        super().check_regroupable()
        if self._summoned or self._unwrapped:
            self._refuse("regrouped() inside summon_full_params(), or after unwrap()")

    # As a module ----------------------------------------------------------------------------

    @disable_dynamo(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward. Blocks while groups are unsharded."""
        if self.backend.forked:  # perhaps in the middle of a pass
            self._refuse("forward in a process that was forked from the rank: start it by spawn")
        if self._summoned:
            self._refuse("forward inside summon_full_params(): leave it first")
        if self._unwrapped:
            self._refuse("forward after unwrap(): call the module itself, or wrap it again")
        if not self._checked:
            self._runtime.swap.check_complete(self.module)
            self._checked = True
        try:
            with every_rank_does("FSDP"):
                return self.module(*args, **kwargs)
        except BaseException:
            self._runtime.abandon_forward()
            raise

    @property
    def passes(self) -> FsdpRuntime:
        return self._runtime

    @property
    def leaves(self) -> list[Tensor]:
        return [view for flat in self._runtime.flats for view in flat.views]

    def answer(self, phase: JoinPhase, group: int = 0) -> None:
        """Take part, without a batch, in what other ranks do next."""
        self._runtime.answer(phase, group)

    def begin_answers(self) -> None:
        self._runtime.forget_failed()
        self._runtime.drop_accumulated()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those that were accumulated under `no_sync`."""
        super().zero_grad(set_to_none)
        self._runtime.drop_accumulated()

    def sync_gradients(self) -> None:
        """Reduce gradients that were accumulated under `no_sync` and not reduced since.

        Blocks until they are; every rank has to call it. Does nothing if there are none: after
        an ordinary `backward()` all gradients are final. `MisuseError` before any forward pass.
        """
        runtime = self._runtime
        if not runtime.forward_pass.order:
            self._refuse("sync_gradients() before any forward pass: there are no gradients yet")
        if runtime.accumulated:
            call_post_accumulate_hooks(runtime.finish_reduction(runtime.groups))

    @property
    def bytes_sent(self) -> int:
        """Bytes of gradients that this rank has sent so far, as rings and direct messages send
        them. In shared memory ranks read them instead.
        """
        compressed = self._runtime.compression
        sent = compressed.exchange.bytes_sent if compressed is not None else 0
        return sent + sum(gradient.bytes_sent for gradient in self._runtime.gradients)

    def other_parts(self) -> tuple[Backend | None, Iterable[nn.Parameter]]:
        """Return the shard group, if there are others in it, and all parameters."""
        return self._runtime.plan.shards, self.parameters()

    # By hand --------------------------------------------------------------------------------

    def prefetch_forward_params(self) -> None:
        """Begin to unshard all groups for the next forward pass. Returns at once.

        Takes memory for the whole model until that pass has used it. Every rank calls it.
        `UnsupportedOperationError` with a strategy that keeps full parameters; `MisuseError` if
        an earlier prefetch was not used.
        """
        if self.strategy.keeps_whole:
            self._refuse(
                f"prefetch_forward_params() with {self.strategy}, which keeps full parameters: "
                "there is nothing to unshard",
                UnsupportedOperationError,
            )
        if self.has_pending_prefetch():
            self._refuse(
                "prefetch_forward_params() twice in a row: the first one has not been used by a "
                "forward pass yet"
            )
        self._runtime.prefetch_first()

    def has_pending_prefetch(self) -> bool:
        """Return whether no forward pass has used the last `prefetch_forward_params()` yet."""
        return self._runtime.forward_pass.prefetched_next

    def broadcast_updated_params(self) -> None:
        """Exchange the shards that an optimizer has written; else the next forward pass does.

        With SHARD_GRAD_OP. Blocks; every rank calls it. Does nothing with the other strategies, nor
        if nothing was written since.
        """
        if self.strategy.keeps_whole:
            self._runtime.unshard_written()

    # Steps of optimizers --------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        """Take an optimizer's step as about to write some of the parameters."""
        super().before_step(optimizer)
        has_whole = self.strategy.name == "no_shard" or hasattr(optimizer, "owner_key")
        if not (has_whole or self.elementwise or is_elementwise(optimizer)):
            kind = type(optimizer).__name__
            self._refuse(
                f"{kind} has flat shards here, and is not known to be elementwise, so it may take "
                f"other steps than with whole ones: use phalanx.ShardedOptimizer({kind}, model, "
                "...), or NO_SHARD, or say FSDP(..., elementwise=True) if it is"
            )
        self._runtime.write_epoch.begin("step")

    def after_step(self, optimizer: Optimizer) -> None:
        self._runtime.write_epoch.end("step")

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the shards, by the plain module's names; inside of a forward pass, too."""
        for name, parameter in self.module.named_parameters(*args, **kwargs):
            yield name, getattr(parameter, "shard", parameter)

    # Parts and full values ----------------------------------------------------------------------

    def slices(self) -> dict[str, Slice]:
        """Return for each parameter, by name, the part of it that this rank's `Parameter` holds."""
        return {
            name: Slice(shape, *flat.layout.part(number, flat.plan.shard_index))
            for flat in self._runtime.flats
            for number, (name, shape) in enumerate(zip(flat.names, flat.layout.shapes, strict=True))
        }

    def all_slices(self) -> tuple[Backend, Mapping[nn.Parameter, Sequence[Slice]] | None]:
        """Return the shard group, and its ranks' parts; with NO_SHARD all, and None."""
        plan = self._runtime.plan
        if self.strategy.name == "no_shard":
            return plan.world, None
        return plan.shards or plan.world.subgroup([plan.world.rank]), {
            parameter: [Slice(shape, *flat.layout.part(at, i)) for i in range(plan.shards_per_copy)]
            for flat in self._runtime.flats
            for at, (parameter, shape) in enumerate(zip(flat.parameters, flat.layout.shapes))  # noqa: B905
        }

    # Writing parameters ---------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write parameters in here, in place: `with fsdp.writing(): p.mul_(0.5)`.

        Every rank enters it, and waits until none reads parameters that it shares with others. An
        optimizer's step and the methods of this class do so by themselves.
        """
        with self._runtime.write_epoch.writing("writing()"):
            yield

    @torch.no_grad()
    def update_shards(self, flat: Tensor) -> None:
        """Overwrite this rank's shards, in the order of `parameters()`, from one flat tensor.

        Every rank calls it. `SizeMismatchError` if its length is not that of all of them together;
        nothing is changed then.
        """
        parameters = list(self.parameters())
        sizes = [p.numel() for p in parameters]
        if flat.dim() != 1 or flat.numel() != sum(sizes):
            self._refuse(
                f"update_shards() takes a flat tensor of {sum(sizes)} elements, all shards of "
                f"this rank, and was given {flat.numel()} ({list(flat.shape)}); nothing was "
                "changed",
                SizeMismatchError,
            )
        with self._runtime.write_epoch.writing("update_shards()"):
            for parameter, values in zip(
                parameters, torch.split(flat.detach(), sizes), strict=True
            ):
                parameter.copy_(values.view(parameter.shape))

    # State ----------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return copies of this rank's shards, by the plain module's names, and `own_state`, if
        there is any; no communication.

        Copies, since shards are parts of larger memory, all of which `torch.save` would write.
        """
        with self._runtime.swap.shards():
            state = self.module.state_dict(*args, **kwargs)
        for name, value in state.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                state[name] = value.clone()
        return self._with_own(state, args, kwargs)

    @torch.no_grad()
    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """Return the plain module's whole state on every rank; with `rank0_only` {} on the others.

        Copies. Blocks; every rank calls it. Moves (p-1)/p of the parameters' bytes to each rank.
        """
        self.backend.mark("FSDP.full_state_dict()")
        self._runtime.write_epoch.wait_for_writes()
        wanted = not rank0_only or self.backend.rank == 0
        full = self._full_values(keep=wanted)
        with self._runtime.swap.shards():
            local = self.module.state_dict(keep_vars=True) if wanted else {}
        for name, value in local.items():
            if isinstance(value, nn.Parameter) and value in full:
                local[name] = full[value]
            elif isinstance(value, Tensor):
                local[name] = value.detach().clone()
        return local

    def _full_values(self, *, keep: bool = True) -> dict[nn.Parameter, Tensor]:
        """Return copies of the parameters' full values, in the dtype of the shards. Every rank of
        the shard group calls this, also one that does not keep them.
        """
        full: dict[nn.Parameter, Tensor] = {}
        for flat in self._runtime.flats:
            parts = flat.split(flat.all_shards())
            for parameter, part in zip(flat.parameters, parts, strict=True) if keep else ():
                full[parameter] = part.clone()
        return full

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load full tensors, as of a plain module, or this rank's shards, as of `state_dict()`.

        Values are copied into the shards. Every rank calls it. `SizeMismatchError` names a tensor
        that is neither, and nothing is changed. `own_state` goes to its rank.
        """
        state_dict, own = without_own(state_dict)
        if assign:
            self._refuse("load_state_dict(assign=True) would put other tensors in place of shards")
        if self._summoned:
            self._refuse("load_state_dict() inside summon_full_params(): leave it first")
        runtime = self._runtime
        with runtime.swap.shards():
            local = self._only_shards(state_dict)
            with runtime.write_epoch.writing("load_state_dict()"):
                result = self.module.load_state_dict(local, strict=strict)
        self.load_own_state(own)
        return result

    def _only_shards(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state of shards, from one whose tensors are full or shards already."""
        pieces = self.slices()
        held = {parameter: pieces.get(name) for name, parameter in self.named_parameters()}
        own = self.module.state_dict(keep_vars=True)
        result = with_versions(state, state)
        for name, value in state.items():
            mine = own.get(name)
            if not isinstance(mine, nn.Parameter) or not isinstance(value, Tensor):
                continue
            piece = held.get(mine)
            if piece is None:
                continue
            if tuple(value.shape) == piece.shape:
                result[name] = value.detach().reshape(-1)[piece.start : piece.stop].view(mine.shape)
            elif value.shape != mine.shape:
                self._refuse(
                    f"{name} is to be loaded from a tensor of shape {list(value.shape)}; it takes "
                    f"the full one, {list(piece.shape)}, or this rank's shard of it, "
                    f"{list(mine.shape)}",
                    SizeMismatchError,
                )
        return result

    # Full parameters ------------------------------------------------------------------------

    @contextmanager
    def summon_full_params(self, *, writeback: bool = True) -> Iterator[None]:
        """Give modules full parameters in here: `fsdp.module.head.weight` has its own shape.

        They are copies, this rank's own. With `writeback`, each rank's part of its copies in the
        end is its shard afterwards; so every rank makes the same changes. `parameters()` are the
        shards all the time. Every rank enters and leaves it. Takes memory for the whole model.
        """
        if self._summoned:
            self._refuse("summon_full_params() inside itself")
        runtime = self._runtime
        self.backend.mark("FSDP.summon_full_params()")
        runtime.write_epoch.wait_for_writes()
        for group in runtime.groups:
            group.reshard()
        copies = [flat.all_shards().clone() for flat in runtime.flats]
        runtime.swap.swap_in("summon")
        for group in runtime.groups:
            group.state.after("summon")
        try:
            for flat, copy in zip(runtime.flats, copies, strict=True):
                flat.show(flat.split(copy))
            yield
        finally:
            for group in runtime.groups:
                group.state.after("restore")
            runtime.swap.swap_out("summon")
            for flat in runtime.flats:
                flat.show(flat.homes)
        if writeback:
            with runtime.write_epoch.writing("summon_full_params()"), torch.no_grad():
                for flat, copy in zip(runtime.flats, copies, strict=True):
                    flat.write(copy)

    @property
    def _summoned(self) -> bool:
        return self._runtime.groups[0].state.now == "SUMMONED"

    @torch.no_grad()
    def unwrap(self) -> nn.Module:
        """Return the plain module with full parameters: the same objects, without gradients.

        Every rank calls it; this FSDP is of no use afterwards.
        """
        self._runtime.write_epoch.wait_for_writes()
        values = self._full_values()
        shards = self._runtime.plan.shards
        if shards is not None:
            shards.barrier(label="FSDP: unwrap()")  # nobody reads the memory any more
        remove_hooks(self._handles)
        self._unwrapped = True
        for parameter, value in values.items():
            parameter.grad = None
            parameter.data = value
            release(parameter)
        return self.module

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an FSDP of a copy of the module, with the same shards, units and options, as
        `torch.optim.swa_utils.AveragedModel` makes one.

        Every rank makes the copy between two passes. Blocks, and moves as much as building it does.
        """
        runtime = self._runtime
        self.backend.mark("copy.deepcopy of an FSDP")
        for flat in runtime.flats:
            for parameter, shape in zip(flat.parameters, flat.layout.shapes, strict=True):
                whole = torch.empty(shape, dtype=parameter.dtype, device="meta")
                memo[id(parameter)] = nn.Parameter(whole, parameter.requires_grad)
        remove_hooks(self._handles)  # which know this FSDP
        try:
            module = deepcopy(self.module, memo)
        finally:
            self._handles += runtime.hook()
        units = {module.get_submodule(group.name) for group in runtime.groups}
        buffers = [buffer.clone() for buffer in module.buffers()]
        copy = memo[id(self)] = type(self)(
            module,
            self.backend,
            strategy=self.strategy,
            unit=units.__contains__,
            mixed_precision=self.mixed_precision,
            prefetch=runtime.prefetch,
            initialize=lambda module: None,
            compression=self.compression,
            elementwise=self.elementwise,
        )
        copy.training = self.training
        for buffer, own in zip(module.buffers(), buffers, strict=True):
            buffer.copy_(own)
        copy.update_shards(torch.cat([p.detach().flatten() for p in self.parameters()]))
        return copy

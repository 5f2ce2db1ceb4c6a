"""`ShardedOptimizer`: each rank steps on its share of the parameters, and has their state alone.

    parameters      a a a a a a    b b    c c c    d     the same on every rank, or in shards
    rank 0 owns     a a a a a a                    d     whole parameters, dealt by size
    rank 1 owns                    b b    c c c

(Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models":
stage 1, of whole parameters.)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from phalanx.errors import DistributedError, MisuseError, UnsupportedOperationError
from phalanx.optim.exchange import whole_replicas, whole_shards
from phalanx.parallel.guards import check_agreement, refuse
from phalanx.parallel.wrapper import Wrapper
from phalanx.torch_internals import disable_dynamo

NEEDS_ALL = frozenset({"LBFGS"})
"""Optimizers whose step on one parameter depends on all of them."""
NORM_INSIDE = "max_grad_norm"
"""The option of optimizers that scale by a norm of all gradients that they were given."""

Options = dict[str, Any]


class ShardedOptimizer(Optimizer):
    """Any torch optimizer, with each parameter's step and state on one rank: its owner.

        model = phalanx.DDP(model, backend)                     # or an FSDP
        optimizer = phalanx.ShardedOptimizer(torch.optim.AdamW, model, lr=1e-3)
        loss_of(model(inputs), targets).backward()              # means go to their owners alone
        optimizer.step()                                        # new parameters come from them

    factory    makes the optimizer: called with a list of groups (dicts), and with `options`
    model      a `DDP` or an `FSDP`, of any strategy
    groups     parameters of the model, or dicts of them with options, as torch's optimizers take;
               by default all. Others have another optimizer, or none
    options    of the factory

    # Notes
    The steps are those of the factory's optimizer in one process, since owners have whole
    parameters, in their own shape. `param_groups` have all of them: learning rate schedules,
    closures, hooks, and `add_param_group` at any time are as ever. `state` has those that this rank
    owns (`owned`), on which `inner` steps. Every rank calls `step`, which blocks. A loss scale is
    `phalanx.GradScaler`'s, and to clip is `phalanx.clip_grad_norm_(model, ...)`.

    DDP: a gradient is averaged for its owner alone, while backward runs: on the others `.grad` is
    None after it. Buckets are of one owner each (with `compression` as ever, for all ranks). `join`
    needs a step that calls this one's. FSDP: pieces of parameters and gradients go to owners in
    `step`, and new ones return, so that optimizers are right which are not elementwise (Muon,
    Adafactor, Shampoo). With `hybrid` each shard group deals for itself; NO_SHARD is as DDP.

    With n bytes of parameters, m the largest, and p ranks, a rank owns n/p + m at most, and keeps
    their state. A step with DDP sends 2(p-1)/p n as the mean over ranks, as plain DDP; any rank at
    most 2n if parameters are large. FSDP sends 3(p-1)/p² n more than without, as the mean, and
    takes memory for what a rank owns, twice, during `step`.

    `save_checkpoint` and `load_checkpoint` take it, on any number of ranks, and the factory's
    optimizer in one process. `state_dict` has what this rank owns; `load_state_dict` takes that,
    and a whole one, as of the factory's optimizer.

    Raises, on every rank alike: `TypeError` for another model; `MisuseError` for a parameter that
    is not the model's, and at the step of an optimizer on parameters that another has been given
    since; `DesyncError` if ranks give other groups or options; `UnsupportedOperationError` for
    sparse gradients, L-BFGS, an optimizer with `max_grad_norm`, and copies. An optimizer that takes
    a norm, or anything else, of all gradients together, and does not say so, is wrong here: it
    would see those that this rank owns.
    """

    skips_together = False  # whether a scaler has said that it skips steps on all ranks

    def __init__(
        self,
        factory: Callable[..., Optimizer],
        model: nn.Module,
        *,
        groups: Iterable[nn.Parameter] | Iterable[Options] | None = None,
        **options: Any,
    ) -> None:
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        if not isinstance(model, Wrapper) or not model.shards_optimizers:
            kind = type(model).__name__
            raise TypeError(f"ShardedOptimizer takes a factory, then a DDP or an FSDP, not {kind}")
        self._factory, self._options, self._model = factory, options, model
        self._backend, self._slices = model.all_slices()
        self._owners: dict[nn.Parameter, int] = {}
        self._load = [0] * self._backend.world_size  # bytes that each rank owns
        self._steps = 0
        self.owned: set[nn.Parameter] = set()
        self._trained: set[nn.Parameter] = set()  # at the last step
        self.owner_key = object()
        self.inner: Optimizer | None = None
        super().__init__(model.parameters() if groups is None else groups, {})
        self._admit(self.param_groups)

    # Parameters -----------------------------------------------------------------------------

    def add_param_group(self, param_group: Options) -> None:
        """Deal more parameters of the model, between passes; every rank calls it."""
        super().add_param_group(param_group)
        if self.inner is not None:
            try:
                self._admit(self.param_groups[-1:])
            except BaseException:
                self.param_groups.pop()
                raise

    def _admit(self, groups: Sequence[Options]) -> None:
        """Check groups, deal their parameters, and give this rank's to the inner optimizer."""
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        parameters = [parameter for group in groups for parameter in group["params"]]
        for place, parameter in enumerate(parameters):
            if parameter not in names:
                self._refuse(
                    f"parameter {place} (shape {list(parameter.shape)}) is not one of the model's: "
                    "give those of the model, as it is after wrapping"
                )
        tried = self._try(groups)
        lines = [type(tried).__name__]
        for group, known in zip(groups, tried.param_groups, strict=True):
            group.update(options_of(known))
            plain = (bool, int, float, str, tuple, type(None))
            lines += [f"{k} = {v}" for k, v in options_of(known).items() if isinstance(v, plain)]
            lines += [names[p] for p in group["params"]]
        remedy = "Give every rank the same optimizer, groups and options"
        check_agreement(lines, self._model.backend, op="ShardedOptimizer", remedy=remedy)
        self._deal(parameters)
        with self._whole("ShardedOptimizer's parameters", set(parameters), steps=False):
            parts = [self._part(group) for group in groups]
            if self.inner is None:
                self._make_inner(parts)
            else:
                self.inner.add_param_group(*parts)

    def regrouped(self) -> None:
        """Deal all parameters anew, after `regrouped` of the model; every rank calls it.

        Options stay as they are. State is to be loaded: `state` and `inner` are new. Sends nothing.
        """
        self._backend, self._slices = self._model.all_slices()
        self._owners, self._load = {}, [0] * self._backend.world_size
        self.owned, self._trained, self._steps = set(), set(), 0
        self._deal([parameter for group in self.param_groups for parameter in group["params"]])
        shards = {parameter: parameter.data for parameter in self.owned}
        for parameter in shards:  # the factory sees shapes; there are no values yet
            parameter.data = parameter.data.new_empty(()).expand(self._shape(parameter))
        try:
            self._make_inner([self._part(group) for group in self.param_groups])
        finally:
            for parameter, shard in shards.items():
                parameter.data = shard

    def _make_inner(self, parts: list[Options]) -> None:
        self.inner = self._factory(parts, **self._options)
        self.inner.owner_key = self.owner_key  # type: ignore[attr-defined]
        self.defaults, self.state = self.inner.defaults, self.inner.state

    def _try(self, groups: Sequence[Options]) -> Optimizer:
        """Return an optimizer of stand-ins for all parameters: each rank has the same errors."""
        parts = [self._part(group, stand_ins=True) for group in groups]
        tried = self._factory(parts, **self._options)
        problem = ""
        if any(kind.__name__ in NEEDS_ALL for kind in type(tried).__mro__):
            problem = "needs all gradients at once"
        elif any(group.get(NORM_INSIDE) for group in tried.param_groups):
            problem = f"has {NORM_INSIDE} (use phalanx.clip_grad_norm_(model, ...) in its place)"
        if problem:
            problem = f"{type(tried).__name__} {problem}, and each rank has those that it owns"
            self._refuse(problem, UnsupportedOperationError)
        return tried

    def _part(self, group: Options, *, stand_ins: bool = False) -> Options:
        """Return a group of what this rank owns; or of stand-ins for all parameters, which have the
        whole ones' shape, and take no memory.
        """
        given = [p for p in group["params"] if stand_ins or p in self.owned]
        if stand_ins:
            empty = [p.detach().new_empty(()).expand(self._shape(p)) for p in given]
            flags = [p.requires_grad for p in given]
            given = [*map(nn.Parameter, empty, flags)]
        return {**options_of(group), "params": given}

    def _shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        slices = self._slices
        return tuple(parameter.shape) if slices is None else slices[parameter][0].shape

    def _deal(self, parameters: Sequence[nn.Parameter]) -> None:
        """Deal parameters: the largest first, each to the rank that has least."""
        sizes = {p: prod(self._shape(p)) * p.element_size() for p in parameters}
        owners = {}
        for parameter in sorted(parameters, key=sizes.__getitem__, reverse=True):
            owners[parameter] = owner = self._load.index(min(self._load))
            self._load[owner] += sizes[parameter]
        self._owners.update({parameter: owners[parameter] for parameter in parameters})
        self.owned |= {p for p, owner in owners.items() if owner == self._backend.rank}
        self._model.deal(owners, self.owner_key)

    # A step ---------------------------------------------------------------------------------

    @torch.no_grad()
    @disable_dynamo()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on what this rank owns, and take the other parameters from their owners.

        closure   computes the loss, with its gradients; called once, by every rank

        Returns the closure's result. Blocks; every rank calls it.
        """
        assert self.inner is not None
        if not self._model.owners.keys() >= self._owners.keys():
            self._refuse("a step after regrouped() of the model: call regrouped() of this one, too")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._steps += 1
        # Of those that were frozen since the last step gradients may have come before.
        trained, before = {p for p in self._owners if p.requires_grad}, self._trained
        self._trained = trained
        for parameter in self.owned - trained - before:
            parameter.grad = None
        _copy_options(self.param_groups, self.inner.param_groups)
        label = f"ShardedOptimizer's step {self._steps}"
        with self._model.writing(), self._whole(label, trained | before):
            if self.owned:
                self.inner.step()
        _copy_options(self.inner.param_groups, self.param_groups)
        return loss

    def _whole(
        self, label: str, some: Container[nn.Parameter], *, steps: bool = True
    ) -> AbstractContextManager[None]:
        """Let owners have some whole parameters in here; if it `steps`, gradients, too."""
        owners = {p: rank for p, rank in self._owners.items() if p in some}
        backend = self._backend
        if self._slices is not None:
            return whole_shards(owners, backend, label, self._slices, steps=steps)
        return whole_replicas(owners, backend, label) if steps else nullcontext()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False. A scaler asks for it in `step`: with torch's each rank would decide for itself."""
        if not self.skips_together:
            problem = "torch's GradScaler sees this rank's gradients only: use phalanx.GradScaler"
            self._refuse(problem)
        return False

    # State ----------------------------------------------------------------------------------

    def state_dict(self) -> Options:
        """Return this rank's part: a plain optimizer would take it for the whole."""
        return {"sharded": self._place(), "part": super().state_dict()}

    def load_state_dict(self, state_dict: Options) -> None:
        """Load `state_dict` of the same rank of as many, or a whole one; nothing is sent."""
        assert self.inner is not None
        whole = state_dict.get("part", state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        others = {place for place, p in enumerate(parameters) if p not in self.owned}
        mine = {key: value for key, value in whole["state"].items() if key not in others}
        if whole is not state_dict and (
            state_dict["sharded"] != self._place() or len(mine) < len(whole["state"])
        ):
            self._refuse(
                f"load_state_dict() of rank {state_dict['sharded']}, or of other groups, here on "
                f"{self._place()}: save_checkpoint and load_checkpoint take any number of ranks"
            )
        super().load_state_dict({**whole, "state": mine})
        self.inner.state = self.state

    def _place(self) -> str:
        return f"{self._backend.rank}/{self._backend.world_size}"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse(
            "it cannot be copied or pickled: make one of the copy of the model, and load the state",
            UnsupportedOperationError,
        )

    def _refuse(self, problem: str, kind: type[DistributedError] = MisuseError) -> NoReturn:
        refuse("ShardedOptimizer", self._backend.rank, problem, kind)


def options_of(group: Mapping[str, Any]) -> Options:
    """Return the options of a group of parameters, without these."""
    return {key: value for key, value in group.items() if key not in {"params", "param_names"}}


def _copy_options(groups: Sequence[Options], into: Sequence[Options]) -> None:
    """Copy options, which schedules write in one optimizer, and steps perhaps in the other."""
    for group, other in zip(groups, into, strict=True):
        for key in options_of(other).keys() - group.keys():
            del other[key]
        other.update(options_of(group))

"""The FSDP runtime: it unshards, reshards and reduces each parameter group in time.

    forward     unshard 0 | compute 0 | reshard 0
                  unshard 1 ......... | compute 1 | reshard 1
                                        unshard 2  ....

    backward    ... | compute 1 | reshard 1, reduce 1 ......
                      unshard 0 | compute 0 | reshard 0, reduce 0
                                                          the end: wait, and finalize

Hooks of the model's modules follow a forward pass, hooks of their outputs follow a backward pass.
The order of groups is guessed from the last forward pass; a wrong guess costs time only. A backward
pass may use any of a group's parameters. So it leaves the group when all its gradients are there,
or its inputs have theirs, or the pass comes to another group, whichever is first. It does not while
the group has calls that the pass has not come to (`parameter_group.py`).

All ranks run the same model, and so do all this in the same order. If a rank does not, the
collectives, whose labels name the group, raise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.collectives import ReduceOp, all_reduce_
from phalanx.fsdp.flat_param import ShardingPlan
from phalanx.fsdp.gradients import CompressedReduction, FlatGradient, call_post_accumulate_hooks
from phalanx.fsdp.parameter_group import (
    DONE,
    IDLE,
    LEFT,
    BackwardPass,
    ForwardCall,
    ForwardPass,
    ParameterGroup,
)
from phalanx.fsdp.unsharded import ParameterSwap
from phalanx.fsdp.write_epoch import WriteEpoch
from phalanx.parallel.guards import every_rank_does, refuse
from phalanx.parallel.joined_step import InStep, LeadingJoin, has_gradients
from phalanx.parallel.uneven import JoinPhase, check_no_step
from phalanx.torch_internals import (
    accumulates_everywhere,
    at_end_of_backward,
    backward_number,
    disable_dynamo,
    keeps_graph,
    pytree,
)


class FsdpRuntime:
    """The runtime of one FSDP on one rank.

    groups           the parameter groups, that of the model itself first
    plan             the ranks that have a copy together, or the same shard
    swap             lets modules see unsharded parameters
    write_epoch      keeps those who write parameters and those who read them apart
    gradients        of all groups
    compression      reduces them, if there is a compressor; it remembers passes with finite means
    prefetch         number of groups that are unsharded ahead
    synchronize      whether backward passes reduce; if not, full gradients add up here [no_sync]
    accumulated      whether there may be gradients, on some rank, that were not reduced
                     [_begin_forward, post_accumulate_grad, finish_reduction, zero_grad]
    join             the ranks' common state in `join` or `step` [join, step]
    zero_weight      whether the backward pass under way is of a loss with zero weight [step,
                     _close_backward]
    forward_pass     the one under way, or the last one [_begin_forward]
    last_order       the groups of the last one that did not fail, or a guess [post_forward]
    backward_pass    the one under way, if there is one [_begin_backward, _close_backward]
    under_way        gradients of the group that was reduced last [_begin_forward, _reduce,
                     finish_reduction]
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[ParameterGroup],
        plan: ShardingPlan,
        compression: CompressedReduction | None,
        prefetch: int,
    ) -> None:
        self.groups = groups
        self.flats = [flat for group in groups for flat in group.flats]
        self._parameters = [p for flat in self.flats for p in flat.parameters]
        self.plan = plan
        unsharded = {p: v for f in self.flats for p, v in zip(f.parameters, f.views, strict=True)}
        self.swap = ParameterSwap(model, unsharded, plan.world.rank)
        self.write_epoch = WriteEpoch(groups, plan.world, plan.shards or plan.world)
        self.gradients = [gradient for group in groups for gradient in group.gradients]
        self.compression = compression
        self.prefetch = prefetch
        self._rank = plan.world.rank
        self.synchronize = True
        self.accumulated = False
        self.join: LeadingJoin | InStep | None = None
        self.zero_weight = False
        self.forward_pass = ForwardPass()
        self.last_order: Sequence[ParameterGroup] = groups
        self.backward_pass: BackwardPass | None = None
        self.under_way: Sequence[FlatGradient] = ()

    @property
    def owes(self) -> bool:
        """True if there are gradients on this rank that were not reduced."""
        return any(gradient.owes for gradient in self.gradients)

    def hook(self) -> list[Any]:
        """Notice passes from now on. Returns the handles of the hooks."""
        handles: list[Any] = []
        for group in self.groups:
            module = group.module
            before, after = partial(self.pre_forward, group), partial(self.post_forward, group)
            # First of all, for other hooks may use parameters.
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
            for gradient in group.gradients:
                for number, view in enumerate(gradient.flat.views):
                    if view.is_floating_point() or view.is_complex():
                        notice = partial(self.post_accumulate_grad, group, gradient, number)
                        view.requires_grad_(True)
                        handles.append(view.register_post_accumulate_grad_hook(notice))  # type: ignore[no-untyped-call]
                        view.requires_grad_(gradient.flat.parameters[number].requires_grad)
        return handles

    def close(self) -> None:
        """Leave the model, with shards in it, whatever pass is under way; wait for nothing.

        A backward pass through what was computed before is refused, as after a write.
        """
        self.write_epoch.number += 1
        for holder in ("forward", "backward"):
            self.swap.swap_out(holder)
        self.forward_pass, self.backward_pass, self.under_way = ForwardPass(), None, ()
        for gradient in self.gradients:
            gradient.drop()
        for group in self.groups:
            group.close()

    # A forward pass -------------------------------------------------------------------------

    @disable_dynamo()  # torch.compile traces what a module computes between this and the next
    def pre_forward(self, group: ParameterGroup, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Prepare a group's module to compute. Returns the model's inputs, if they are cast."""
        again = backward_number() >= 0  # a checkpoint is computed again
        if again and self.backward_pass is None:
            self._begin_backward()
        elif not again and not self.forward_pass.stack:
            self._begin_forward()
        forward = self.forward_pass
        order, stack = forward.order, forward.stack
        if again:
            place = len(order) - order[::-1].index(group) if group in order else 0
        else:
            self._tell(JoinPhase.CALL, group)
            order.append(group)
            place = len(order)
        earlier = order[max(place - 1 - self.prefetch, 0) : max(place - 1, 0)][::-1]
        outer = stack[-1][0] if stack else None
        call = ForwardCall(group, forward, self.write_epoch.number, earlier, outer)
        stack.append((call, sys.exc_info()[1], _nodes((args, kwargs))))
        self._unshard(group)
        group.wait_for_unshard()
        group.state.on_backward = partial(self.pre_backward, call)
        if not again:
            for following in self.last_order[place : place + self.prefetch]:
                self._unshard(following)
        precision = self.plan.precision if not group.name else None
        return precision.cast((args, kwargs)) if precision is not None else None

    def forget_failed(self) -> None:
        """Forget a backward pass that an error has cut short: nothing of it counts."""
        if self.backward_pass is not None:
            self.under_way = ()
            for gradient in self.gradients:
                gradient.abandon()
            if self.compression is not None:
                self.compression.compressor.rollback()
            self._close_backward(self.backward_pass)

    def drop_accumulated(self) -> None:
        """Drop what was accumulated under `no_sync`."""
        self.accumulated = False
        for gradient in self.gradients:
            gradient.drop_accumulated()

    def _begin_forward(self) -> None:
        self.forget_failed()
        if self.join is not None:
            self.join.exchange(JoinPhase.FORWARD)
        self.plan.world.mark("FSDP.forward()")
        self.write_epoch.wait_for_writes()
        self.swap.swap_in("forward")
        self.forward_pass = ForwardPass()
        if not self.synchronize and torch.is_grad_enabled():
            self.accumulated = True  # on all ranks, whatever has gradients on this one

    @disable_dynamo()
    def post_forward(
        self, group: ParameterGroup, _: nn.Module, args: Any, kwargs: Any, outputs: Any
    ) -> None:
        """Take its computation as ended, or failed."""
        stack = self.forward_pass.stack
        while stack and stack[-1][0].group is not group:
            stack.pop()
        if not stack:
            return
        call, error, before = stack.pop()
        failed = sys.exc_info()[1] is not error
        if not failed and torch.is_grad_enabled():
            self._watch(call, before, outputs)
        if backward_number() >= 0:
            return  # a checkpoint is computed again, and its backward pass comes at once
        if not failed:
            self.reshard(group)
        if not stack:
            self.swap.swap_out("forward")
            if not failed:
                self.last_order = self.forward_pass.order
                self.reshard(*self.groups)

    def abandon_forward(self) -> None:
        """Take it as left by an error, of which torch tells no hooks if it is an interrupt.

        No backward pass will come to its outputs. The error may keep them, and each rank frees them
        at another time: the waiting calls must not depend on it.
        """
        if backward_number() >= 0:
            return
        forward = self.forward_pass
        for group in self.groups:
            for call in [call for call in group.waiting if call.forward is forward]:
                del group.waiting[call]
        if forward.stack:
            forward.stack.clear()
            self.swap.swap_out("forward")

    # Between passes -------------------------------------------------------------------------

    def reshard(self, *groups: ParameterGroup) -> None:
        """Reshard after a pass, unless a graph of a backward pass reads the parameters later."""
        if not self.forward_pass.has_graph:
            for group in groups:
                group.reshard()

    def unshard_written(self) -> None:
        """Unshard the written groups, in memory that stays. Blocks."""
        self.write_epoch.wait_for_writes()
        for group in self.groups:
            self._unshard(group)
        for group in self.groups:
            group.wait_for_unshard()

    def prefetch_first(self) -> None:
        """Begin to unshard all groups for the next forward pass, in the order of the last one."""
        self.write_epoch.wait_for_writes()
        self.forward_pass.prefetched_next = True
        for group in dict.fromkeys((*self.last_order, *self.groups)):
            self._unshard(group)

    def _unshard(self, group: ParameterGroup) -> None:
        """Begin to unshard a group, if that has not begun; tell ranks that follow this one."""
        if group.state.now == "SHARDED":
            self._tell(JoinPhase.UNSHARD, group)
        group.unshard()

    # Ranks without a batch ------------------------------------------------------------------

    def _tell(self, phase: JoinPhase, group: ParameterGroup) -> None:
        if self.join is not None:
            self.join.tell(phase, self.groups.index(group))

    @torch.no_grad()
    def answer(self, phase: JoinPhase, number: int) -> None:
        """Do, without a batch, as the rank that this one follows, with a group; give zeros."""
        group = self.groups[number if phase is not JoinPhase.FINISH else 0]
        if phase is JoinPhase.FORWARD:
            self.plan.world.mark("FSDP.forward()")
            self.write_epoch.wait_for_writes()
            self.forward_pass = ForwardPass()
            self.last_order = self.forward_pass.order
        elif phase is JoinPhase.CALL:
            self.forward_pass.order.append(group)
        elif phase is JoinPhase.UNSHARD:
            group.reshard()  # it may be there from an own pass
            group.unshard()
            group.reshard()
        elif phase is JoinPhase.REDUCE:
            self._reduce(group)
        else:
            if self.join is not None and self._rank not in self.join.active and not number:
                for parameter in self._parameters:  # the others have set theirs to zero
                    parameter.grad = None
            call_post_accumulate_hooks(self.finish_reduction(()))

    # The backward pass: follow it -----------------------------------------------------------

    def _watch(self, call: ForwardCall, before: set[Any], outputs: Any) -> None:
        """Watch for the backward pass through this call.

        The hook also fires for tensors computed from an unsharded parameter; by then a view may
        already have been read. An input that a layer returns as it is, such as a layer that is left
        out at random, belongs to the group that has computed it.
        """
        call.group.waiting.setdefault(call, False)  # a pass may have come in the middle of it
        tensors = [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.grad_fn]
        computed = [t for t in tensors if t.grad_fn not in before]
        for number, output in enumerate(computed):
            output.register_hook(lambda grad, n=number: self._at_output(call, n, grad))  # type: ignore[no-untyped-call]
        # A leaf would collect the hooks of all passes.
        if computed and before and None not in before:
            call.inputs = len(before)
            for node in before:
                node.register_prehook(lambda _: self._at_input(call))

    def _begin_backward(self) -> BackwardPass:
        backward = self.backward_pass = BackwardPass(keeps_graph(), accumulates_everywhere())
        self.swap.swap_in("backward")  # for checkpoints, which are computed again
        at_end_of_backward(partial(self._end_backward, backward))
        return backward

    def _at_output(self, call: ForwardCall, output: int, grad: Tensor) -> Tensor | None:
        """Take the gradient of an output of a group. Returns another one in its place, or None."""
        if output in call.spent:
            refuse(
                "FSDP",
                self._rank,
                f"a second backward pass through one forward pass of {call.group.title}: its graph "
                "is gone. Pass retain_graph=True to the first one, or run forward again",
            )
        self.pre_backward(call)
        call.group.calls[call].add(output)
        # The loss of no samples may have made NaN of the zeros that came into it.
        return torch.where(grad.isfinite(), grad, 0) if self.zero_weight else None

    @every_rank_does("FSDP")
    def pre_backward(self, call: ForwardCall) -> None:
        """Prepare a group's backward pass, which comes next."""
        group = call.group
        if call.epoch != self.write_epoch.number:
            refuse(
                "FSDP",
                self._rank,
                f"backward through {group.title}, whose parameters were written after its forward "
                "pass (an optimizer's step, load_state_dict, regrouped()): run forward again",
            )
        backward = self.backward_pass or self._begin_backward()
        backward.makes_graph = torch.is_grad_enabled()
        self.forward_pass.has_graph |= backward.makes_graph
        opened = not call.inputs or call not in group.calls
        if opened:
            self._open(call, backward)
        self._unshard(group)
        group.wait_for_unshard()
        for earlier in call.earlier if opened else ():
            self._unshard(earlier)

    def _open(self, call: ForwardCall, backward: BackwardPass) -> None:
        """Open this call: the backward pass has come to it, and so has left groups before it."""
        group = call.group
        if call.outer is not None:  # first, on all ranks, whose last computation it may be or not
            self.pre_backward(call.outer)
        group.waiting.pop(call, None)
        group.calls.setdefault(call, set())
        call.inputs = call.inputs or -1  # of one that was left, and comes again, nobody knows
        if group.phase is IDLE:
            group.after("enter")
            backward.reached.append(group)
        # Groups before are over, though they may not have all gradients. So ranks on which a
        # parameter was not used keep the order of those on which it was.
        for other in backward.reached:
            phase = other.phase
            if phase is DONE or phase is LEFT or other.surrounds or other.waiting or other is group:
                continue
            if not group.is_around(other.name):
                self.post_backward(other)

    @torch.no_grad()
    def post_accumulate_grad(
        self, group: ParameterGroup, gradient: FlatGradient, number: int, _: Tensor
    ) -> None:
        """Take the whole gradient of an unsharded parameter from autograd."""
        if self.join is not None:
            self.join.check_backward()
        backward = self.backward_pass or self._begin_backward()
        backward.accumulates = True
        if group.phase is IDLE:
            group.after("enter")
            backward.reached.append(group)
        if self.synchronize:
            gradient.accumulate(number)
        else:
            self.accumulated = True
        over = group.count_gradient(gradient, number) and not group.surrounds
        # Of a graph that was kept nobody knows whether this pass comes to it, too: then ranks that
        # have all gradients wait for its end, as do those that lack some.
        if over and not any(group.waiting.values()):
            self.post_backward(group)

    def _at_input(self, call: ForwardCall) -> None:
        """Take the gradient of an input of a group."""
        group = call.group
        if not call.inputs:  # it has left the call before
            return
        call.inputs -= 1
        if call.inputs or call not in group.calls:
            return
        for other in group.calls:
            if other.inputs:
                return
        if not group.waiting:  # all gradients of these calls are there; the rest was not used
            self._reduce_once(group)
        self.reshard(group)

    # The backward pass: end it --------------------------------------------------------------

    def post_backward(self, group: ParameterGroup) -> None:
        """End a group's backward pass: it gets no more gradients."""
        group.after("leave")
        self._reduce_once(group)
        if all(p.requires_grad for flat in group.flats for p in flat.parameters):
            self.reshard(group)  # else gradients do not tell of its end

    @every_rank_does("FSDP")
    def _reduce_once(self, group: ParameterGroup) -> None:
        backward = self.backward_pass
        if self.synchronize and backward is not None and backward.accumulates and group.owes:
            group.after("reduce")
            self._reduce(group)

    def _reduce(self, group: ParameterGroup) -> None:
        """Reduce the gradients of a group, when those of the one before are on this rank."""
        if self.join is None:
            check_no_step("FSDP", self.plan.world)
        self._tell(JoinPhase.REDUCE, group)
        for gradient in self.under_way:
            gradient.finish_scattering()
        for gradient in group.gradients:
            gradient.reduce()
        self.under_way = group.gradients

    @torch.no_grad()
    @every_rank_does("FSDP")
    def finish_reduction(self, groups: Iterable[ParameterGroup]) -> list[nn.Parameter]:
        """Reduce the rest, of these groups; then means of all become the gradients.

        Returns the parameters that have got one.
        """
        compressor = self.compression.compressor if self.compression is not None else None
        scale = self.plan.world.world_size / self.join.divisor if self.join is not None else 1.0
        try:
            for group in groups:
                self._reduce(group)
            if (join := self.join) is not None:  # those who are not active ask, nobody else
                some_left = len(join.active) < self.plan.world.world_size
                join.tell(JoinPhase.FINISH, some_left and has_gradients(self._parameters))
            for gradient in self.gradients:
                gradient.finish()
            self.under_way = ()
            # Which parameters have a mean on any rank, and whether a compressor's are all finite.
            mine = [g.has_mean(at) for g in self.gradients for at in range(len(g.flat.parameters))]
            if compressor is not None:
                mine.append(not all(gradient.finite for gradient in self.gradients))
            bits = torch.tensor(mine, dtype=torch.uint8)
            if mine:
                all_reduce_(bits, self.plan.world, ReduceOp.MAX, label="which parameters were used")
            used = [bool(bit) for bit in bits.tolist()]
        except BaseException:
            if compressor is not None:
                compressor.rollback()
            raise
        if compressor is not None:
            compressor.end_pass(counts=not used.pop())
        reached, flag = [], iter(used)
        for gradient in self.gradients:
            reached += gradient.finalize([next(flag) for _ in gradient.flat.parameters], scale)
        self.accumulated = False
        self.plan.world.progress.count(self)
        return reached

    @every_rank_does("FSDP")
    def _end_backward(self, backward: BackwardPass) -> None:
        for group in backward.reached:
            for call, outputs in group.calls.items():
                if backward.keeps_graph:
                    group.waiting[call] = True
                else:
                    call.spent |= outputs
        reduced: list[nn.Parameter] = []
        if self.synchronize and backward.accumulates:
            reached = sorted(backward.reached, key=lambda group: group.surrounds)
            groups = dict.fromkeys((*reached, *self.groups))
            # In a step ranks reduce all groups: some may have used others in earlier micro-batches.
            every = isinstance(self.join, InStep)
            owed = [group for group in groups if group.owes or (every and group.phase is IDLE)]
            reduced = self.finish_reduction(owed)
        self._close_backward(backward)
        call_post_accumulate_hooks(reduced)  # which may be an optimizer's step

    def _close_backward(self, backward: BackwardPass) -> None:
        self.backward_pass = None
        self.zero_weight = False
        self.forward_pass.has_graph &= backward.makes_graph or backward.keeps_graph
        self.swap.swap_out("backward")
        for group in backward.reached:
            group.after("end")
            group.calls.clear()
            group.missing.clear()
        self.reshard(*self.groups)


def _nodes(given: Any) -> set[Any]:
    """Return the autograd nodes of tensors among these that require gradients; None of a leaf."""
    if not torch.is_grad_enabled():
        return set()
    leaves = pytree.tree_leaves(given)
    return {t.grad_fn for t in leaves if isinstance(t, Tensor) and t.requires_grad}

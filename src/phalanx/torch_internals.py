"""Private names of torch that Phalanx uses: here, and nowhere else.

    name in torch                              use                            if it is gone
    torch.utils._pytree                        tensors in nested arguments    optree has it
    _C._current_graph_task_id                  is this a backward pass        no hooks in it
    autograd._is_checkpoint_valid              ... that fills every .grad     refuse inputs=
    _get_current_graph_task_keep_graph         ... that keeps its graph       it is taken to
    Variable._execution_engine                 the end of that pass           step() reduces
    Tensor._backward_hooks,                    a shard has the hooks of its   hooks are lost
    Tensor._post_accumulate_grad_hooks         parameter
    _C.DisableTorchFunctionSubclass            an unsharded parameter is a    as_subclass, slower
                                               plain tensor to torch
    UntypedStorage._swap_data_ptr_ (2.12)      memory that is used again      resize_, slower
    RNNBase._flat_weights                      an RNN sees full parameters    refuse RNNs
    GradScaler._per_optimizer_states           was a step skipped, or ended   a skip counts
    Optimizer._step_supports_amp_scaling       refuse torch's scaler          ranks skip apart
    _C._dynamo.eval_frame (2.7)                functions are not compiled     _disable_dynamo
    torch._compile._disable_dynamo             ... before 2.7                 import: 2 s more
    _len_torch_dispatch_stack                  CommDebugMode counts calls     it counts none
    _C.fork                                    a future of C++                torch's DDP fails
    c10d._get_default_group                    groups share connections       each makes its own
    c10d._new_process_group_helper, _world     backends of other devices      the CPU only
    ProcessGroup._device_types, _get_backend   ... that torch has made        the CPU only

Two functions read local variables of torch's functions, for want of another way:
`variables_of_group_being_made` and `variables_of_batch`. torch does not tell the creator of a
process group which backends a program names for devices. Nor does it tell a group which messages
are a batch (up to 2.13).

Two modules are imported during `import torch` and use such names themselves: the registration in
`phalanx/__init__.py` (`Backend._plugins`) and `torch_backend/instead_of_gloo.py`, which replaces
`_new_process_group_helper`. `tests/torch_backend/test_torch_internals.py` tests each use of each
name; `make test-torch-next` does so with the newest torch.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, _compile, nn
from torch.utils import _python_dispatch, _pytree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])
Hook = Callable[[Tensor], Any]
ENGINE = "torch.autograd.graph"  # the module of the frame that is innermost under autograd's C++

pytree = _pytree
"""Nested containers: `tree_leaves`, `tree_map`, ..."""

as_plain_tensors = torch._C.DisableTorchFunctionSubclass
"""A context in which subclasses of Tensor are plain ones: `__torch_function__` is not called."""


# The backward pass that runs --------------------------------------------------------------------


backward_number: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward pass that this thread runs, in which checkpoints run forward
passes again; -1 if it runs none."""

accumulates_everywhere: Callable[[], bool] = torch.autograd._is_checkpoint_valid
"""Return whether the pass adds to all `.grad` it reaches: no autograd.grad, and no `inputs=`.

To be asked inside a node; that is when reentrant checkpoints may run, too."""

at_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
"""Run a function in this thread at the end of the backward pass that is running."""


def keeps_graph() -> bool:
    """Return whether the pass keeps the graph, so that another may follow. If unknown: yes."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return bool(ask()) if ask is not None else True


def is_called_by_engine(depth: int) -> bool:
    """Return whether autograd's C++ code called the function `depth` frames above the caller."""
    frame = sys._getframe(depth + 1)
    outer = frame.f_back
    return outer is None or outer.f_globals.get("__name__") == ENGINE


# Hooks of parameters ----------------------------------------------------------------------------


def gradient_hooks(tensor: Tensor) -> list[Hook]:
    """Return the hooks that `Tensor.register_hook` has registered, in order."""
    return list((tensor._backward_hooks or {}).values())


def post_accumulate_hooks(tensor: Tensor) -> list[Hook]:
    """Return the hooks of `Tensor.register_post_accumulate_grad_hook`, in order."""
    return list((tensor._post_accumulate_grad_hooks or {}).values())


def copy_hooks(source: Tensor, target: Tensor, keep: Callable[[Hook], bool]) -> None:
    """Copy one leaf's hooks to another; of those that run after `.grad` is set, some only."""
    if source._backward_hooks:
        target._backward_hooks = OrderedDict(source._backward_hooks)
    hooks = source._post_accumulate_grad_hooks or {}
    if kept := {key: hook for key, hook in hooks.items() if keep(hook)}:
        target._post_accumulate_grad_hooks = OrderedDict(kept)


# Memory, modules, optimizers --------------------------------------------------------------------

SWAPS_MEMORY = hasattr(torch.UntypedStorage, "_swap_data_ptr_")  # since torch 2.12


def swap_memory(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange the memory of two storages of one size, or if one of them has none."""
    one._swap_data_ptr_(other)  # type: ignore[attr-defined]


def register_flat_weights(module: nn.RNNBase) -> None:
    """Let an RNN, LSTM or GRU compute with the parameters that are registered in it now."""
    module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def skipped_step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the scaler's last `step(optimizer)` was skipped: a gradient was not finite."""
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(bool(value.item()) for value in found.values())


def forget_unscaled(scaler: torch.amp.GradScaler) -> None:
    """Let a scaler forget whose gradients it has unscaled since its last `update()`."""
    scaler._per_optimizer_states.clear()


# torch.compile, and torch.distributed -----------------------------------------------------------


def disable_dynamo(*, recursive: bool = True) -> Callable[[Function], Function]:
    """Let torch.compile run a function uncompiled; with all functions it calls, if `recursive`.

    As `torch.compiler.disable`, which imports torch._dynamo at once (2 s) and wraps the function
    (6 us a call). These marks are on the code, and cost nothing if nothing is compiled.
    """
    frames = torch._C._dynamo.eval_frame
    if not hasattr(frames, "_FrameExecStrategy"):
        return partial(_compile._disable_dynamo, recursive=recursive)  # type: ignore[return-value]
    skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT

    def mark(function: Function) -> Function:
        strategy = frames._FrameExecStrategy(skip, skip if recursive else default)
        frames.set_code_exec_strategy(function.__code__, strategy)
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        return function

    return mark


def untraced(kind: type[T]) -> type[T]:
    """Return the class with methods that torch.compile runs uncompiled, with all that they call.

    Else it compiles methods that torch's own code calls, and fails on the first one: it cannot read
    a process group's attributes.
    """
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            disable_dynamo()(method)
    return kind


def dispatch_modes() -> list[Any]:
    """Return the modes that see this thread's operations on tensors, such as `CommDebugMode`."""
    if not torch._C._len_torch_dispatch_stack():  # which is asked for in each call of a collective
        return []
    return _python_dispatch._get_current_dispatch_mode_stack()


def future_in_cpp(value: Callable[[], T]) -> torch.Future[T]:
    """Return a complete future whose value C++ code can take; this has called `value`."""
    return torch._C.fork(value)


def _c10d() -> Any:
    return importlib.import_module("torch.distributed.distributed_c10d")


def default_group() -> Any:
    """Return the default process group; None if there is none."""
    return _c10d()._get_default_group() if torch.distributed.is_initialized() else None


def variables_of_group_being_made() -> Mapping[str, Any] | None:
    """Return the variables of torch's function that makes a process group, if it called us."""
    return _variables_of(_c10d()._new_process_group_helper)


def variables_of_batch() -> Mapping[str, Any] | None:
    """Return the variables of `batch_isend_irecv`, if it called us."""
    return _variables_of(_c10d().batch_isend_irecv)


def _variables_of(function: Any) -> Mapping[str, Any] | None:
    code = inspect.unwrap(function).__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else frame.f_locals


def devices_of(group: ProcessGroup) -> list[torch.device]:
    """Return the devices for which a process group has backends."""
    return list(group._device_types)


def backend_of(group: ProcessGroup, kind: str) -> Any:
    """Return a group's backend for a kind of device; for a group in Python, the group itself."""
    is_torchs = type(group) is _c10d().ProcessGroup
    return group._get_backend(torch.device(kind)) if is_torchs else group


def make_part_of_group(*given: Any, **options: Any) -> Any:
    """Make a process group as a part of another one, which ends it: torch keeps none of it.

    given, options   as torch's `_new_process_group_helper` takes them
    """
    c10d = _c10d()
    group, _ = c10d._new_process_group_helper(*given, **options)
    world = c10d._world
    name = world.pg_names.pop(group)
    for kept in (world.pg_map, world.pg_backend_config, world.pg_to_tag):
        kept.pop(group, None)
    for tag, groups in list(world.tags_to_pg.items()):
        if group in groups:
            groups.remove(group)
        if not groups:
            del world.tags_to_pg[tag]
    c10d._unregister_process_group(name)
    return group

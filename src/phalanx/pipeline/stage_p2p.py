r"""Messages between the stages in one step: activations to the next, gradients to the one before.

    rank 1    F0        F1        F2        B0        F3         computes
              \ post_recv: receives for the next two actions, already under way
               \____ isend: no rank waits for it

Only `recv` (if the message is not there) and `wait_sends` block. A message is a tree of tensors: a
tensor, or tuples, lists and dicts of tensors. It is sent tensor by tensor, and before the first
message of a kind its layout: how the tensors are nested, and the shape and dtype of each. Both ends
remember the layouts that have been sent. A kind is an edge between two stages, the number of
samples, and the step's metadata (`step_metadata`). Tags from 2 ** 30 - 1 up are the pipeline's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from phalanx.collectives import PendingCollective, irecv, isend
from phalanx.core.backend import Backend
from phalanx.errors import MalformedObjectError, UnsupportedObjectError, UnsupportedOperationError
from phalanx.pipeline.schedules import ActionKind
from phalanx.wire.codec import DTYPES, decode, encode
from phalanx.wire.control import learned

FIRST_TAG = 2**30
LOSS_TAG = FIRST_TAG - 1
A_DAY = 86_400.0  # seconds; a timeout runs only while this rank waits, not while it computes
MOST_LAYOUTS = 1024  # of one edge that are kept; one is some hundred bytes
MOST_LAYOUT_BYTES = 1 << 20  # a message that announces a longer layout is malformed
_LENGTH = struct.Struct("<q")
_LOSS_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

Tree = Any  # Tensor | None | tuple[Tree, ...] | list[Tree] | dict[str, Tree]


def map_tensors(fn: Callable[[str, Tensor], object], tree: Tree, name: str) -> Tree:
    """Return the same tree with `fn(path, tensor)` in the place of each tensor.

    name    of the whole: paths are such as `outputs['mask'][1]`

    Raises `UnsupportedObjectError` (a TypeError), naming the path, for anything but a dense tensor,
    None, tuple, list or dict: a subclass of these would not arrive as one.
    """
    if tree is None:
        return None
    if isinstance(tree, Tensor):
        if tree.is_nested or tree.layout is not torch.strided:
            raise UnsupportedObjectError(f"{name} is not a dense tensor ({tree.layout})")
        return fn(name, tree)
    if type(tree) in (tuple, list):
        return type(tree)(map_tensors(fn, part, f"{name}[{i}]") for i, part in enumerate(tree))
    if type(tree) is dict:
        return {key: map_tensors(fn, part, f"{name}[{key!r}]") for key, part in tree.items()}
    raise UnsupportedObjectError(
        f"{name} is a {type(tree).__qualname__}; layers of a pipeline pass on tensors, None, and "
        "tuples, lists and dicts of these"
    )


def flatten(tree: Tree, name: str) -> tuple[Tree, list[Tensor]]:
    """Return the tree with numbers in the place of tensors, and the tensors by these numbers."""
    leaves: list[Tensor] = []

    def number(_: str, tensor: Tensor) -> int:
        leaves.append(tensor)
        return len(leaves) - 1

    return map_tensors(number, tree, name), leaves


def unflatten(structure: Tree, leaves: list[Tensor]) -> Tree:
    """Return the tree that `flatten` took apart."""
    if structure is None:
        return None
    if type(structure) is int:
        return leaves[structure]
    if type(structure) is dict:
        return {key: unflatten(part, leaves) for key, part in structure.items()}
    return type(structure)(unflatten(part, leaves) for part in structure)


class TensorSpec(NamedTuple):
    """One tensor: its dtype by name, its shape, and whether a gradient is sent back for it."""

    dtype: str
    shape: tuple[int, ...]
    needs_grad: bool

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}" + (" with a gradient" if self.needs_grad else "")


class MessageLayout(NamedTuple):
    """The layout of a message: the nesting of its tensors, and the description of each."""

    structure: Tree
    specs: tuple[TensorSpec, ...]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.specs))})"

    @classmethod
    def of(cls, tree: Tree, name: str) -> tuple[MessageLayout, list[Tensor]]:
        """Return the layout of a tree to be sent, and its tensors. Raise as `map_tensors` does."""
        structure, leaves = flatten(tree, name)
        specs = tuple(
            TensorSpec(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.requires_grad)
            for t in leaves
        )
        return cls(structure, specs), leaves

    def encode(self) -> bytearray:
        """Return it as bytes. Raise `UnsupportedObjectError` for keys of a dict that have none."""
        specs = [(spec.dtype, list(spec.shape), spec.needs_grad) for spec in self.specs]
        return encode((self.structure, specs))

    @classmethod
    def decode(cls, content: bytearray) -> MessageLayout:
        """Return the layout in bytes. Raise `MalformedObjectError` for other bytes."""
        try:
            layout = msgspec.convert(decode(memoryview(content)), learned(cls))
        except msgspec.ValidationError:
            raise MalformedObjectError("what came is no layout of tensors") from None
        if not all(spec.dtype in DTYPES for spec in layout.specs):
            raise MalformedObjectError("what came is a layout of dtypes that are not known here")
        return layout

    def empty(self) -> list[Tensor]:
        """Return uninitialized memory for the tensors."""
        return [torch.empty(spec.shape, dtype=DTYPES[spec.dtype]) for spec in self.specs]

    def accepts(self, found: MessageLayout) -> bool:
        """Return whether a message of the layout `found` may be sent to a rank that expects this
        one: it drops a gradient that it does not need, and must get each that it needs.
        """
        return self.structure == found.structure and all(
            ours[:2] == theirs[:2] and ours.needs_grad >= theirs.needs_grad
            for ours, theirs in zip(self.specs, found.specs, strict=True)
        )


class StageMessage(NamedTuple):
    """Activations (F) or gradients (B) of one micro-batch: the input of this pass of `stage`."""

    kind: ActionKind
    stage: int
    micro_batch: int


Edge = dict[tuple[int, int], MessageLayout]  # by step metadata, and number of samples
Layouts = dict[tuple[ActionKind, int], Edge]  # by kind, and the stage that receives
Received = tuple[MessageLayout, list[Tensor], list[PendingCollective[int]]]


@dataclass
class StageP2P:
    """The messages between one rank and other stages in one step.

    layouts      those that have been sent, the same at both ends of an edge; kept between steps
    metadata     the hash of all that shapes may depend on; the same on every rank
    sizes        the number of samples of each micro-batch
    ranks        of the stages, in their order
    timeout      seconds that this rank waits for a message at most
    """

    backend: Backend
    layouts: Layouts
    metadata: int
    sizes: Sequence[int]
    ranks: Sequence[int]
    timeout: float
    _received: dict[StageMessage, Received] = field(default_factory=dict)
    _sends: list[PendingCollective[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for edge in self.layouts.values():
            if len(edge) > MOST_LAYOUTS:  # between steps both ends have as many, and forget them
                edge.clear()

    def post_recv(self, message: StageMessage) -> None:
        """Begin to receive a message if its layout is known; does not block."""
        known, key = self._known(message)
        if key in known and message not in self._received and not self._is_local(message):
            tensors = known[key].empty()
            pending = [self._irecv(message, tensor) for tensor in tensors]
            self._received[message] = known[key], tensors, pending

    def recv(self, message: StageMessage) -> tuple[MessageLayout, list[Tensor]]:
        """Return the layout and the tensors of a message; blocks until they have arrived."""
        known, key = self._known(message)
        if key not in known:
            known[key] = self._recv_layout(message)
        self.post_recv(message)
        layout, tensors, pending = self._received.pop(message)
        for work in pending:
            work.wait(self.timeout)
        return layout, tensors

    def isend(
        self, message: StageMessage, tree: Tree, name: str
    ) -> tuple[MessageLayout, list[Tensor]]:
        """Begin to send; do not block. Return the layout that the receiver knows, and the tensors.

        Raises `UnsupportedObjectError` for anything but a tree of tensors,
        `UnsupportedOperationError` for one that differs from the first of its kind.
        """
        found, leaves = MessageLayout.of(tree, name)
        known, key = self._known(message)
        if key not in known:
            known[key] = found
            if not self._is_local(message):
                content = found.encode()
                self._isend(message, _LENGTH.pack(len(content)))
                self._isend(message, content)
        layout = known[key]
        if message.kind is ActionKind.B and layout.structure != found.structure:
            # The receiver expects a gradient, and there is none this time: it gets zeros.
            zeros = [memory.zero_() for memory in layout.empty()]
            filled = [
                zeros[place] if gradient is None and place is not None else gradient
                for place, gradient in zip(layout.structure, tree, strict=True)
            ]
            found, leaves = MessageLayout.of(filled, name)
        if not layout.accepts(found):
            raise UnsupportedOperationError(
                f"{name} of micro-batch {message.micro_batch} are {found}; those of the first one "
                f"like it were {layout}. In a pipeline, shapes, dtypes, and which tensors have a "
                "gradient may depend on the shapes of the inputs, on train() and eval(), on frozen "
                "parameters and on autocast, and on nothing else",
                rank=self.backend.rank,
                op="Pipeline",
            )
        if self._is_local(message):
            self._received[message] = layout, [leaf.detach() for leaf in leaves], []
            return layout, leaves
        sends, self._sends = self._sends, []
        for work in sends:
            if work.done():
                work.wait()  # raises its error, if it failed
            else:
                self._sends.append(work)
        for leaf in leaves:
            self._isend(message, leaf.detach())
        return layout, leaves

    def isend_loss(self, loss: Tensor) -> None:
        """Begin to send the loss of the step to every other rank; does not block. 16 bytes each."""
        row = torch.tensor([loss.item(), _LOSS_DTYPES.index(loss.dtype)], dtype=torch.float64)
        for peer in range(self.backend.world_size):
            if peer != self.backend.rank:
                self._sends.append(isend(row, self.backend, peer, tag=LOSS_TAG, timeout=A_DAY))

    def recv_loss(self) -> Tensor:
        """Return the loss that the last stage's rank has sent; blocks until it has arrived."""
        row = torch.empty(2, dtype=torch.float64)
        self.backend.recv(row, self.ranks[-1], tag=LOSS_TAG, timeout=self.timeout)
        value, dtype = row.tolist()
        return torch.tensor(value, dtype=_LOSS_DTYPES[int(dtype)])

    def wait_sends(self) -> None:
        """Block until everything has been sent."""
        for work in self._sends:
            work.wait(self.timeout)
        self._sends.clear()

    def _known(self, message: StageMessage) -> tuple[Edge, tuple[int, int]]:
        """Return the layouts that were sent over the message's edge, and the key of its own."""
        key = self.metadata, self.sizes[message.micro_batch]
        return self.layouts.setdefault(message[:2], {}), key

    def _isend(self, message: StageMessage, content: Any) -> None:
        receiver, tag = self.ranks[message.stage], self._tag(message)
        self._sends.append(isend(content, self.backend, receiver, tag=tag, timeout=A_DAY))

    def _irecv(self, message: StageMessage, into: Any) -> PendingCollective[int]:
        sender, tag = self._sender(message), self._tag(message)
        return irecv(into, self.backend, sender, tag=tag, timeout=A_DAY)

    def _sender(self, message: StageMessage) -> int:
        return self.ranks[message.stage + (-1 if message.kind is ActionKind.F else 1)]

    def _is_local(self, message: StageMessage) -> bool:
        """Return whether both stages are on this rank: then nothing is sent."""
        return self._sender(message) == self.ranks[message.stage]

    def _tag(self, message: StageMessage) -> int:
        edge = message.kind * len(self.ranks) + message.stage
        return FIRST_TAG + edge * len(self.sizes) + message.micro_batch

    def _recv_layout(self, message: StageMessage) -> MessageLayout:
        announced = bytearray(_LENGTH.size)
        self._irecv(message, announced).wait(self.timeout)
        (length,) = _LENGTH.unpack(announced)
        if not 0 < length <= MOST_LAYOUT_BYTES:
            sender = self._sender(message)
            raise MalformedObjectError(
                f"rank {sender} announced a layout of {length:,} bytes; no layout has that length",
                rank=self.backend.rank,
                peer=sender,
                op="Pipeline",
            )
        content = bytearray(length)
        self._irecv(message, content).wait(self.timeout)
        return MessageLayout.decode(content)

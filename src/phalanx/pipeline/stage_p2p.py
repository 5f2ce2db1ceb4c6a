r"""What goes between the stages in one step: activations down, gradients back up.

    rank 1    F0        F1        F2        B0        F3         computes
              \ expect: receive for the next two actions, already under way
               \____ give: isend, nobody waits for it

Nothing blocks but `take`, if the message is not there, and `finish`. A message of tensors is these
tensors, one after the other; before the first of a kind, its layout. Both sides know what has been
told: a kind is an edge between two stages, the number of samples, and the circumstances of the step
(`circumstances.py`). Tags from 2 ** 30 - 1 up are the pipeline's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.collectives import PendingCollective, irecv, isend
from phalanx.core.backend import Backend
from phalanx.errors import MalformedObjectError, UnsupportedObjectError, UnsupportedOperationError
from phalanx.pipeline.schedules import Kind
from phalanx.wire.codec import DTYPES, decode, encode

FIRST_TAG = 2**30
LOSS_TAG = FIRST_TAG - 1
A_DAY = 86_400.0  # seconds; while this rank computes, nobody waits, and no timeout runs
MOST_KNOWN = 1024  # layouts of one edge that are kept; one is some hundred bytes
_LENGTH = struct.Struct("<q")
_LOSS_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Parcel(NamedTuple):
    """Activations, or gradients, of one micro-batch, on their way to a stage."""

    kind: Kind
    stage: int
    micro_batch: int

    @property
    def sender(self) -> int:
        """The stage that it comes from."""
        return self.stage - 1 if self.kind is Kind.F else self.stage + 1


class KnownLayouts:
    """The layouts that have been told, by edge and then by kind; the same at both ends."""

    def __init__(self) -> None:
        self._edges: dict[tuple[Kind, int], dict[tuple[int, int], Layout]] = {}

    def begin_step(self) -> None:
        """Forget those of an edge that has too many. Between steps, both ends have as many."""
        for edge in self._edges.values():
            if len(edge) > MOST_KNOWN:
                edge.clear()

    def of(self, parcel: Parcel) -> dict[tuple[int, int], Layout]:
        """Those of a parcel's edge: by circumstances, and number of samples."""
        return self._edges.setdefault(parcel[:2], {})


class Wires:
    """One rank's messages of one step.

    circumstances   the hash of all that shapes may depend on; the same on every rank
    sizes           the number of samples of each micro-batch
    num_stages      of all ranks together, p * v
    """

    def __init__(
        self,
        backend: Backend,
        known: KnownLayouts,
        circumstances: int,
        sizes: Sequence[int],
        num_stages: int,
        *,
        timeout: float | None,
    ) -> None:
        known.begin_step()
        self._backend = backend
        self._known = known
        self._circumstances = circumstances
        self._sizes = sizes
        self._num_stages = num_stages
        self._timeout = backend.timeout if timeout is None else timeout
        self._coming: dict[Parcel, tuple[Layout, list[Tensor], list[PendingCollective[int]]]] = {}
        self._sent: list[PendingCollective[None]] = []

    def expect(self, parcel: Parcel) -> None:
        """Begin to receive, if it is known what; does not wait."""
        layout = self._known.of(parcel).get(self._kind(parcel))
        if layout is not None and parcel not in self._coming and not self._is_local(parcel):
            self._receive(parcel, layout)

    def take(self, parcel: Parcel) -> tuple[Layout, list[Tensor]]:
        """What came; blocks until it has come."""
        if parcel not in self._coming:
            edge, kind = self._known.of(parcel), self._kind(parcel)
            if kind not in edge:
                edge[kind] = self._receive_layout(parcel)
            self._receive(parcel, edge[kind])
        layout, tensors, pending = self._coming.pop(parcel)
        for message in pending:
            message.wait(self._timeout)
        return layout, tensors

    def give(self, parcel: Parcel, tree: Tree, name: str) -> tuple[Layout, list[Tensor]]:
        """Begin to send; does not wait. Gives the layout that the receiver knows, and the tensors.

        Raises `UnsupportedObjectError` for what is no tree of tensors, `UnsupportedOperationError`
        for one that differs from the first of its kind.
        """
        found, leaves = Layout.of(tree, name)
        edge, kind = self._known.of(parcel), self._kind(parcel)
        if kind not in edge:
            edge[kind] = found
            if not self._is_local(parcel):
                self._send_layout(parcel, found)
        layout = edge[kind]
        if parcel.kind is Kind.B and layout.structure != found.structure:
            found, leaves = _with_zeros(layout, tree, name)
        if not layout.fits(found):
            raise UnsupportedOperationError(
                f"{name} of micro-batch {parcel.micro_batch} are {found}; those of the first one "
                f"like it were {layout}. In a pipeline, shapes, dtypes, and which tensors have a "
                "gradient may depend on the shapes of the inputs, on train() and eval(), on frozen "
                "parameters and on autocast, and on nothing else",
                rank=self._backend.rank,
                op="Pipeline",
            )
        if self._is_local(parcel):
            self._coming[parcel] = layout, [leaf.detach() for leaf in leaves], []
        else:
            self._let_go_of_what_is_sent()
            for leaf in leaves:
                self._send(parcel, leaf.detach())
        return layout, leaves

    def announce(self, loss: Tensor) -> None:
        """Begin to tell every other rank the loss of the step; does not wait. 16 bytes each."""
        row = torch.tensor([loss.item(), _LOSS_DTYPES.index(loss.dtype)], dtype=torch.float64)
        size, rank = self._backend.world_size, self._backend.rank
        for peer in (*range(rank), *range(rank + 1, size)):
            self._sent.append(isend(row, peer, self._backend, tag=LOSS_TAG, timeout=A_DAY))

    def hear(self) -> Tensor:
        """The loss that the rank of the last stage has announced; blocks until it has come."""
        row = torch.empty(2, dtype=torch.float64)
        last = self._backend.world_size - 1
        self._backend.recv(row, last, tag=LOSS_TAG, timeout=self._timeout)
        value, dtype = row.tolist()
        return torch.tensor(value, dtype=_LOSS_DTYPES[int(dtype)])

    def finish(self) -> None:
        """Block until everything that was given has been sent."""
        for message in self._sent:
            message.wait(self._timeout)
        self._sent.clear()

    def _let_go_of_what_is_sent(self) -> None:
        waiting = []
        for message in self._sent:
            if message.done():
                message.wait()  # which raises what went wrong with it
            else:
                waiting.append(message)
        self._sent = waiting

    def _kind(self, parcel: Parcel) -> tuple[int, int]:
        return self._circumstances, self._sizes[parcel.micro_batch]

    def _rank_of(self, stage: int) -> int:
        return stage % self._backend.world_size

    def _is_local(self, parcel: Parcel) -> bool:
        return self._rank_of(parcel.sender) == self._rank_of(parcel.stage)

    def _tag(self, parcel: Parcel) -> int:
        edge = parcel.kind * self._num_stages + parcel.stage
        return FIRST_TAG + edge * len(self._sizes) + parcel.micro_batch

    def _send(self, parcel: Parcel, content: Any) -> None:
        self._sent.append(
            isend(
                content,
                self._rank_of(parcel.stage),
                self._backend,
                tag=self._tag(parcel),
                timeout=A_DAY,
            )
        )

    def _receive(self, parcel: Parcel, layout: Layout) -> None:
        tensors = layout.empty()
        pending = [self._begin_to_receive(parcel, tensor) for tensor in tensors]
        self._coming[parcel] = layout, tensors, pending

    def _begin_to_receive(self, parcel: Parcel, into: Any) -> PendingCollective[int]:
        return irecv(
            into,
            self._rank_of(parcel.sender),
            self._backend,
            tag=self._tag(parcel),
            timeout=A_DAY,
        )

    def _send_layout(self, parcel: Parcel, layout: Layout) -> None:
        content = layout.encode()
        self._send(parcel, _LENGTH.pack(len(content)))
        self._send(parcel, content)

    def _receive_layout(self, parcel: Parcel) -> Layout:
        announced = bytearray(_LENGTH.size)
        self._begin_to_receive(parcel, announced).wait(self._timeout)
        (length,) = _LENGTH.unpack(announced)
        if not 0 < length <= MOST_BYTES:
            raise MalformedObjectError(
                f"rank {self._rank_of(parcel.sender)} announced a layout of {length:,} bytes; no "
                "layout has that length",
                rank=self._backend.rank,
                peer=self._rank_of(parcel.sender),
                op="Pipeline",
            )
        content = bytearray(length)
        self._begin_to_receive(parcel, content).wait(self._timeout)
        return Layout.decode(content)


def _with_zeros(
    layout: Layout, gradients: list[Tensor | None], name: str
) -> tuple[Layout, list[Tensor]]:
    """Gradients with zeros where there is none for once: the receiver expects them."""
    zeros = [memory.zero_() for memory in layout.empty()]
    filled = [
        zeros[number] if gradient is None and number is not None else gradient
        for number, gradient in zip(layout.structure, gradients, strict=True)
    ]
    return Layout.of(filled, name)


# ------------------------------------------------------------------------------
# Layouts: of what shape and dtype the tensors of a message are, told once and then known.

MOST_BYTES = 1 << 20  # of a layout: what announces more is none


class Spec(NamedTuple):
    """One tensor: its dtype by name, its shape, and whether a gradient goes back for it."""

    dtype: str
    shape: tuple[int, ...]
    needs_grad: bool

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}" + (" with a gradient" if self.needs_grad else "")


class Layout(NamedTuple):
    """A message: how its tensors are nested, and what each is."""

    structure: Tree
    specs: tuple[Spec, ...]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.specs))})"

    @classmethod
    def of(cls, tree: Tree, name: str) -> tuple[Layout, list[Tensor]]:
        """The layout of what is to be sent, and its tensors. Raises as `map_tensors` does."""
        structure, leaves = flatten(tree, name)
        specs = tuple(
            Spec(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.requires_grad)
            for t in leaves
        )
        return cls(structure, specs), leaves

    def encode(self) -> bytearray:
        """As bytes. Raises `UnsupportedObjectError` for keys of a dict that have none."""
        specs = [(spec.dtype, list(spec.shape), spec.needs_grad) for spec in self.specs]
        return encode((self.structure, specs))

    @classmethod
    def decode(cls, content: bytearray) -> Layout:
        """From bytes. Raises `MalformedObjectError` for what is no layout."""
        found: Any = decode(memoryview(content))
        try:
            structure, rows = found
            specs = tuple(
                Spec(str(dtype), tuple(map(int, shape)), bool(grad)) for dtype, shape, grad in rows
            )
        except (TypeError, ValueError):
            raise MalformedObjectError("what came is no layout of tensors") from None
        if not all(spec.dtype in DTYPES for spec in specs):
            raise MalformedObjectError("what came is a layout of dtypes that are not known here")
        return cls(structure, specs)

    def empty(self) -> list[Tensor]:
        """Memory for the tensors, uninitialized."""
        return [torch.empty(spec.shape, dtype=DTYPES[spec.dtype]) for spec in self.specs]

    def fits(self, found: Layout) -> bool:
        """Whether a message of the layout `found` may go to somebody who expects this one.

        A gradient that comes back for a tensor that needs none is dropped; one that is needed and
        does not come would be lost.
        """
        return self.structure == found.structure and all(
            ours[:2] == theirs[:2] and ours.needs_grad >= theirs.needs_grad
            for ours, theirs in zip(self.specs, found.specs, strict=True)
        )


def needing_grad(specs: Sequence[Spec]) -> list[int]:
    """The numbers of those tensors for which a gradient goes back."""
    return [number for number, spec in enumerate(specs) if spec.needs_grad]


# ------------------------------------------------------------------------------
# What layers pass on: a tensor, or tuples, lists and dicts of tensors; and None among them.

Tree = Any  # Tensor | None | tuple[Tree, ...] | list[Tree] | dict[str, Tree]
_DENSE = (torch.strided,)


def map_tensors(fn: Callable[[str, Tensor], object], tree: Tree, name: str) -> Tree:
    """The same tree with `fn(path, tensor)` in the place of each tensor.

    name    what the whole is called: paths are such as `outputs['mask'][1]`

    Raises `UnsupportedObjectError` (a TypeError), naming the path, for what is neither a dense
    tensor, None, nor a tuple, list or dict: a subclass of these would not arrive as one.
    """
    if tree is None:
        return None
    if isinstance(tree, Tensor):
        if tree.is_nested or tree.layout not in _DENSE:
            raise UnsupportedObjectError(f"{name} is not a dense tensor ({tree.layout})")
        return fn(name, tree)
    if type(tree) in (tuple, list):
        return type(tree)(
            map_tensors(fn, part, f"{name}[{place}]") for place, part in enumerate(tree)
        )
    if type(tree) is dict:
        return {key: map_tensors(fn, part, f"{name}[{key!r}]") for key, part in tree.items()}
    kind = type(tree).__qualname__
    raise UnsupportedObjectError(
        f"{name} is a {kind}; layers of a pipeline pass on tensors, None, and tuples, lists and "
        "dicts of these"
    )


def flatten(tree: Tree, name: str) -> tuple[Tree, list[Tensor]]:
    """The tree with numbers in the place of tensors, and the tensors by these numbers."""
    leaves: list[Tensor] = []

    def number(_: str, tensor: Tensor) -> int:
        leaves.append(tensor)
        return len(leaves) - 1

    return map_tensors(number, tree, name), leaves


def rebuild(structure: Tree, leaves: list[Tensor]) -> Tree:
    """The tree that `flatten` has taken apart."""
    if structure is None:
        return None
    if type(structure) is int:
        return leaves[structure]
    if type(structure) is dict:
        return {key: rebuild(part, leaves) for key, part in structure.items()}
    return type(structure)(rebuild(part, leaves) for part in structure)

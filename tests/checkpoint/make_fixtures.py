"""Writes `fixtures/`: checkpoints as commit 8165af3 writes them, which every later version loads.

    git worktree add /tmp/before 8165af3
    export PYTHONPATH=/tmp/before/src
    python tests/checkpoint/make_fixtures.py tests/checkpoint/fixtures
    python -m phalanx.cli.main bench all_reduce all_gather --backends shm,tcp --sizes 8,64K \
        --tune tests/checkpoint/fixtures/tuning.json

For each case below the ranks of `saves` build a model, train it for a few steps (seeded), and save
it; then the ranks of each row of `loads` build it with another seed, and load that. What each rank
has after that is kept beside the checkpoint, in expected.json, as text: of a tensor the dtype, the
shape and a hash of its bytes. `test_checkpoints_of_before.py` loads the same files with the version
at hand and compares.

    fixtures/<case>/checkpoint/...          what save_checkpoint wrote
    fixtures/<case>/expected.json           {row of `loads`: [for each rank {what: text}]}
    fixtures/tuning.json                    a PHALANX_TUNING file

Only public names are used here, so that it runs with any version. Values that training has come to
may be others on another processor, and random words and times are others each time: files that were
made anew are as good, but not the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import phalanx
from phalanx import (
    DDP,
    FSDP,
    Backend,
    DeviceMesh,
    DiLoCo,
    ErrorFeedback,
    LocalSGD,
    Pipeline,
    PipelineParallelConfig,
    PowerSGD,
    Quantized,
    ShardingStrategy,
    TopK,
    load_checkpoint,
    parallelize,
    save_checkpoint,
    simulate,
)

STEP = 4
ROWS = 24  # of a batch of all ranks


class Setup(NamedTuple):
    """What a rank saves, or loads into.

    together   the ranks that save or load together; by default those of the model
    folder     in the case's own
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    together: Backend | None = None
    folder: str = "checkpoint"


Build = Callable[[Backend, int], Setup]
Train = Callable[[Setup, Backend], None]


class Row(NamedTuple):
    """So many ranks, and what each of them builds from a seed."""

    ranks: int
    build: Build


class Case(NamedTuple):
    """What is saved, and in which ways it is loaded. `extra` is saved beside it."""

    saves: Row
    train: Train
    loads: Mapping[str, Row]
    extra: Any = None


# Models ----------------------------------------------------------------------------------------


class Counting(nn.Linear):
    """Keeps something beside its tensors."""

    seen: Any = None

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class Everything(nn.Module):
    """Every dtype, no elements, no dimensions, two names for one tensor, state beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7)
        self.head.weight = self.embed.weight
        self.counting = Counting(3, 2)
        self.scale = nn.Parameter(torch.rand(()))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.brief = nn.Parameter(torch.randn(11).to(torch.bfloat16))
        self.short = nn.Parameter(torch.randn(3, 3).to(torch.float16))
        self.long = nn.Parameter(torch.randn(2, 2, 3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
            name = str(dtype).removeprefix("torch.")
            self.register_buffer(name, torch.randint(99, (5,)).to(dtype))
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("waves", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("long_waves", torch.randn(2, dtype=torch.complex128))
        self.register_buffer("eighths", torch.randn(6).to(torch.float8_e4m3fn))
        self.register_buffer("rare_eighths", torch.randn(6).to(torch.float8_e5m2))
        self.register_buffer("scratch", torch.rand(2), persistent=False)


class Uneven(nn.Module):
    """Sizes that do not divide, a tied output layer, frozen parts, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.body = nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 5))
        self.frozen = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7)
        self.frozen.requires_grad_(False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.frozen(self.body(self.embed(tokens))) * self.scale)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 3))


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=0.01, eps=1e-3)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    biases = [parameter for name, parameter in named if name.endswith("bias")]
    others = [parameter for name, parameter in named if not name.endswith("bias")]
    groups: list[dict[str, Any]] = [
        {"params": others},
        {"params": biases, "weight_decay": 0.0, "betas": (0.8, 0.99)},
    ]
    return torch.optim.AdamW(groups, lr=torch.tensor(0.02), amsgrad=True, foreach=False)


def setup(
    make: Callable[[], nn.Module],
    wrap: Callable[[nn.Module, Backend], nn.Module],
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> Build:
    """A model with each rank's part in a wrapper; saved by all ranks together."""

    def build(backend: Backend, seed: int) -> Setup:
        model = wrap(seeded(make, seed), backend)
        return Setup(model, optimizer_of(model) if optimizer_of else None, backend)

    return build


def plain(module: nn.Module, backend: Backend) -> nn.Module:
    return module


def fsdp(strategy: ShardingStrategy) -> Callable[[nn.Module, Backend], nn.Module]:
    return lambda module, backend: FSDP(module, backend, strategy=strategy)


def compressing(compressor: Callable[[], Any]) -> Callable[[nn.Module, Backend], nn.Module]:
    return lambda module, backend: DDP(module, backend, bucket_size=80, compression=compressor())


def diloco(module: nn.Module, backend: Backend) -> nn.Module:
    return DiLoCo(
        module,
        backend,
        every=3,
        outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True),
        compression=ErrorFeedback(Quantized(4, block=8)),
    )


def local_sgd(module: nn.Module, backend: Backend) -> nn.Module:
    return LocalSGD(module, backend, every=3, compression=TopK(0.25))


def pipeline(backend: Backend, seed: int) -> Setup:
    config = PipelineParallelConfig(backend.world_size, 2, "1f1b")
    stages = Pipeline(seeded(layers, seed), backend, config)
    return Setup(stages, adamw(stages), backend)


def cut_layers(ranks: int) -> Build:
    """A checkpoint for each part of the layers, saved by the `ranks` that have the same part."""

    def build(backend: Backend, seed: int) -> Setup:
        mesh = DeviceMesh(backend, (ranks, 2), ("data", "tensor"))
        module = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), seed)
        cut = parallelize(module, mesh["tensor"], {"0": "column", "2": "row"})
        model = FSDP(cut, mesh["data"])
        return Setup(model, adamw(model), mesh["data"], f"checkpoint/tensor{mesh['tensor'].rank}")

    return build


# Training --------------------------------------------------------------------------------------


def given_gradients(made: Setup, backend: Backend) -> None:
    """Steps with gradients that depend on the number of the parameter alone."""
    assert made.optimizer is not None
    for step in range(STEP):
        for number, parameter in enumerate(made.model.parameters()):
            draw = torch.Generator().manual_seed(100 * step + number)
            gradient = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
            parameter.grad = gradient if parameter.requires_grad else None
        made.optimizer.step()
    made.model.get_submodule("counting").seen = {"batches": STEP, "last": torch.arange(3)}


def on_tokens(made: Setup, backend: Backend) -> None:
    """Steps of a classifier, of which each rank has its rows of the batch."""
    assert made.optimizer is not None
    rank, ranks = backend.rank, backend.world_size
    mine = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    for step in range(STEP):
        draw = torch.Generator().manual_seed(step)
        tokens, targets = torch.randint(7, (2, ROWS), generator=draw)[:, mine]
        made.optimizer.zero_grad()
        F.cross_entropy(made.model(tokens), targets).backward()
        made.optimizer.step()


def on_vectors(made: Setup, backend: Backend) -> None:
    """Steps towards zero, with other inputs on each rank."""
    width = 4 if isinstance(made.model, FSDP) else 6
    for step in range(STEP):
        rank = made.model.backend.rank
        draw = torch.Generator().manual_seed(100 * step + rank)
        made.model.zero_grad()
        made.model(torch.randn(4, width, generator=draw)).pow(2).sum().backward()
        if made.optimizer is not None:
            made.optimizer.step()
            continue
        with torch.no_grad():
            for parameter in made.model.parameters():
                parameter.sub_(0.01 * parameter.grad)


def in_stages(made: Setup, backend: Backend) -> None:
    assert made.optimizer is not None
    for step in range(STEP):
        draw = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(8, 6, generator=draw), torch.randn(8, 3, generator=draw)
        made.optimizer.zero_grad()
        made.model.train_step(inputs, targets, F.mse_loss)
        made.optimizer.step()


def with_own_state(made: Setup, backend: Backend) -> None:
    """Also state that cannot be cut, and state for no parameter."""
    on_tokens(made, backend)
    assert made.optimizer is not None
    for number, (parameter, state) in enumerate(list(made.optimizer.state.items())):
        state["history"] = [parameter.detach() + age for age in range(2)]
        state["seen"] = (number, None, {"of": number % 2 == 0})
    made.optimizer.state["calls"] = {"count": 3, "at": torch.tensor([0.5, 1.5])}


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.Adafactor(trained, lr=0.1)


# Cases -----------------------------------------------------------------------------------------

EXTRA = {
    "none": None,
    "numbers": [0, -1, 2**63 - 1, -(2**63), 2**63, 2**70, -(2**64), True, False],
    "floats": [0.1, -0.0, 1e300, 5e-324, float("inf"), float("-inf"), float("nan"), 3.0],
    "text": ["", "$tensor", "Grüße, 世界", 'quo"te\n', "\x00"],
    "bytes": b"\x00\xff bytes",
    "tuple": (1, ("a", b""), [], {}, ()),
    3: "three",
    (1, "a"): {None: 1.5, True: "yes"},
    "$tuple": {"$int": "no"},
    "one tag": {"$bytes": "AA=="},
    "tensors": [
        torch.arange(4),
        torch.tensor(1.5, dtype=torch.float16),
        torch.empty(0),
        torch.empty(2, 0, 3),
        torch.tensor([[True, False]]),
        torch.tensor([1 + 2j]),
        torch.arange(5, dtype=torch.uint8).to(torch.float8_e4m3fn),
        torch.tensor(float("nan"), dtype=torch.float64),
    ],
    "a": {"b": torch.ones(2)},
    "a.b": torch.zeros(2),
    "schedule": {"last_epoch": 3, "_last_lr": [0.1, 0.01], "milestones": {2: 2, 5: 1}},
}

FULL = fsdp(ShardingStrategy.FULL_SHARD)
TOP_K = compressing(lambda: ErrorFeedback(TopK(0.25)))
POWER_SGD = compressing(lambda: ErrorFeedback(PowerSGD(1)))

CASES: dict[str, Case] = {
    "plain": Case(
        Row(1, setup(Everything, plain, two_groups)),
        given_gradients,
        {
            "plain on 1": Row(1, setup(Everything, plain, two_groups)),
            "DDP on 2": Row(2, setup(Everything, DDP, two_groups)),
        },
        EXTRA,
    ),
    "ddp": Case(
        Row(2, setup(Uneven, DDP, adamw)),
        on_tokens,
        {
            "DDP on 2": Row(2, setup(Uneven, DDP, adamw)),
            "DDP on 3": Row(3, setup(Uneven, DDP, adamw)),
            "plain on 1": Row(1, setup(Uneven, plain, adamw)),
            "FULL_SHARD on 3": Row(3, setup(Uneven, FULL, adamw)),
        },
        {"seen": 7},
    ),
    "fsdp": Case(
        Row(3, setup(Uneven, FULL, adamw)),
        on_tokens,
        {
            "FULL_SHARD on 3": Row(3, setup(Uneven, FULL, adamw)),
            "plain on 1": Row(1, setup(Uneven, plain, adamw)),
            "SHARD_GRAD_OP on 2": Row(
                2, setup(Uneven, fsdp(ShardingStrategy.SHARD_GRAD_OP), adamw)
            ),
            "hybrid on 4": Row(4, setup(Uneven, fsdp(ShardingStrategy.hybrid(2)), adamw)),
            "DDP on 2": Row(2, setup(Uneven, DDP, adamw)),
        },
    ),
    "own-state": Case(
        Row(2, setup(Uneven, FULL, adamw)),
        with_own_state,
        {"FULL_SHARD on 2": Row(2, setup(Uneven, FULL, adamw))},
    ),
    "adafactor": Case(
        Row(1, setup(Uneven, plain, adafactor)),
        on_tokens,
        {"plain on 1": Row(1, setup(Uneven, plain, adafactor))},
    ),
    "top-k": Case(
        Row(2, setup(layers, TOP_K)),
        on_vectors,
        {f"DDP on {n}": Row(n, setup(layers, TOP_K)) for n in (2, 3, 1)},
    ),
    "power-sgd": Case(
        Row(2, setup(layers, POWER_SGD)),
        on_vectors,
        {f"DDP on {n}": Row(n, setup(layers, POWER_SGD)) for n in (2, 3, 1)},
    ),
    "diloco": Case(  # saved a step after the ranks have met
        Row(2, setup(layers, diloco, momentum)),
        on_vectors,
        {
            "DiLoCo on 2": Row(2, setup(layers, diloco, momentum)),
            "DiLoCo on 3": Row(3, setup(layers, diloco, momentum)),
            "plain on 1": Row(1, setup(layers, plain, momentum)),
        },
    ),
    "local-sgd": Case(
        Row(2, setup(layers, local_sgd, momentum)),
        on_vectors,
        {
            "LocalSGD on 2": Row(2, setup(layers, local_sgd, momentum)),
            "LocalSGD on 3": Row(3, setup(layers, local_sgd, momentum)),
            "DDP on 2": Row(2, setup(layers, DDP, momentum)),
        },
    ),
    "pipeline": Case(
        Row(2, pipeline),
        in_stages,
        {
            "2 stages": Row(2, pipeline),
            "3 stages": Row(3, pipeline),
            "plain on 1": Row(1, setup(layers, plain, adamw)),
        },
    ),
    "cut-layers": Case(
        Row(4, cut_layers(2)),
        on_vectors,
        {"2 x 2": Row(4, cut_layers(2)), "1 x 2": Row(2, cut_layers(1))},
    ),
}


# What a rank has, as text ----------------------------------------------------------------------


def text_of(value: Any) -> str:
    """The value with all its types; of a tensor, dtype, shape, and a hash of its bytes."""
    match value:
        case Tensor():
            flat = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
            content = flat.view(torch.uint8).numpy().tobytes()
            dtype = str(value.dtype).removeprefix("torch.")
            return f"{dtype} {list(value.shape)} {hashlib.sha256(content).hexdigest()[:16]}"
        case dict():
            inside = (f"{text_of(key)}: {text_of(part)}" for key, part in value.items())
            return f"{{{', '.join(inside)}}}"
        case list() | tuple():
            kind = type(value).__name__
            return f"{kind}({', '.join(map(text_of, value))})"
    return repr(value)


def state_of(made: Setup) -> dict[str, str]:
    """Everything that a checkpoint brings back."""
    model, optimizer = made.model, made.optimizer
    found: dict[str, Any] = {f"model {name}": each for name, each in model.named_parameters()}
    kept = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in kept:
            found[f"model {name}"] = buffer
    for name, each in kept.items():
        if "@" in name or name.endswith("_extra_state"):
            found[f"own {name}"] = each
    if optimizer is not None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for key, state in optimizer.state.items():
            what = names[id(key)] if isinstance(key, Tensor) else f"{key}, of no parameter"
            for part, value in state.items():
                found[f"optimizer {what} {part}"] = value
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key not in ("params", "param_names"):
                    found[f"group {number} {key}"] = value
    found["random torch"] = torch.get_rng_state()
    found["random python"] = hashlib.sha256(repr(random.getstate()).encode()).hexdigest()[:16]
    name, words, *rest = np.random.get_state()
    found["random numpy"] = (name, torch.from_numpy(words.astype(np.int64)), *rest)
    return {key: text_of(value) for key, value in found.items()}


# Saving and loading ----------------------------------------------------------------------------


def save(case: Case, folder: Path) -> list[dict[str, str]]:
    """Save; what each rank has then."""

    def run(backend: Backend) -> dict[str, str]:
        made = case.saves.build(backend, 0)
        case.train(made, backend)
        saved = state_of(made)
        save_checkpoint(
            folder / made.folder,
            model=made.model,
            optimizer=made.optimizer,
            step=STEP,
            extra=case.extra,
            backend=made.together,
        )
        return saved

    return list(simulate(run, case.saves.ranks, seed=1))


def load(row: Row, folder: Path) -> list[dict[str, str]]:
    """Load into another model; what each rank has then, and what it was told."""

    def run(backend: Backend) -> dict[str, str]:
        made = row.build(backend, 5)
        loaded = load_checkpoint(
            folder / made.folder,
            model=made.model,
            optimizer=made.optimizer,
            backend=made.together,
        )
        told = {key: getattr(loaded, key) for key in ("step", "world_size", "extra")}
        return {**state_of(made), **{key: text_of(value) for key, value in told.items()}}

    return list(simulate(run, row.ranks, seed=2))


def main() -> int:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1]).resolve()
    print(f"with {phalanx.__file__}")
    for name, case in CASES.items():
        place = folder / name
        saved = save(case, place)
        for lock in place.rglob(".phalanx-lock"):
            lock.unlink()
        expected = {row: load(case.loads[row], place) for row in case.loads}
        for rank, state in enumerate(expected[next(iter(case.loads))]):
            for key, text in saved[rank].items():
                assert state[key] == text, f"{name}: rank {rank} had {key} as {text}: {state[key]}"
        (place / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())

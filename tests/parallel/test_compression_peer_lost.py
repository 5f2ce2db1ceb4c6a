"""A rank that is lost while gradients are averaged takes nothing of what compressors remember."""

from __future__ import annotations

from typing import Any

import pytest
from clusters import Tcp
from ddp_models import mlp, noise, seeded
from ddp_runs import assert_same_bits

from phalanx import (
    DDP,
    FSDP,
    Backend,
    ErrorFeedback,
    PeerLostError,
    ShardingStrategy,
    TopK,
)

WRAPPERS: dict[str, Any] = {
    "DDP": DDP,
    **{
        str(strategy): lambda model, backend, strategy=strategy, **options: FSDP(
            model, backend, strategy=strategy, **options
        )
        for strategy in (
            ShardingStrategy.FULL_SHARD,
            ShardingStrategy.SHARD_GRAD_OP,
            ShardingStrategy.NO_SHARD,
        )
    },
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_what_was_left_over_stays_as_it_was_when_a_rank_is_lost_in_backward(wrap: Any) -> None:
    models = [seeded(mlp) for _ in range(2)]

    def run(backend: Backend) -> None:
        model = wrap(models[backend.rank], backend, compression=ErrorFeedback(TopK(0.25)))
        model(noise(4, 6, seed=backend.rank)).sum().backward()
        before = {key: value.clone() for key, value in model.own_state().items()}
        assert any(bool(value.any()) for value in before.values())
        loss = model(noise(4, 6, seed=5 + backend.rank)).sum()
        if backend.rank == 1:
            backend.recv(bytearray(), 0)
            backend.abort()
            return
        backend.send(b"", 1)
        with pytest.raises(PeerLostError):
            loss.backward()
        assert_same_bits([before, model.own_state()])

    Tcp().run(run, 2)

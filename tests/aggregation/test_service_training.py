"""The parameter server trains: in every mode, with any number of servers and workers."""

from __future__ import annotations

import pytest
import torch
from clusters import Cluster
from service_runs import MODES, Outcome, adam, alone, gradients, loss_of, model, sgd, train

from phalanx import Backend, ParameterServer, simulate
from phalanx.aggregation import ServerMode

OPTIMIZERS = {"SGD": sgd, "Adam": adam}


@pytest.mark.checkered
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (1, 4), (2, 2), (3, 2)])
def test_synchronous_training_is_that_of_one_process_to_the_last_bit(
    servers: int, workers: int, name: str
) -> None:
    """Of elementwise optimizers it does not matter over how many servers parameters are shared."""
    optimizer, steps = OPTIMIZERS[name], 5
    outcomes = simulate(
        lambda b: train(
            b, ServerMode.SYNCHRONOUS, servers=range(servers), steps=steps, optimizer=optimizer
        ),
        servers + workers,
    )
    expected = alone(range(servers, servers + workers), steps, optimizer)
    for outcome in outcomes[servers:]:
        for found, wanted in zip(outcome.params, expected, strict=True):
            assert torch.equal(found, wanted)
    numbers = []
    for outcome in outcomes[:servers]:
        record = outcome.record
        assert record is not None
        assert (record.steps, record.dropped, record.clocks) == (steps, {}, {})
        assert record.pushes == dict.fromkeys(range(servers, servers + workers), steps)
        for number, param in zip(record.numbers, record.params, strict=True):
            assert torch.equal(param, expected[number])
        numbers += record.numbers
    assert sorted(numbers) == list(range(len(expected)))


@pytest.mark.checkered
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (1, 3), (2, 2)])
def test_every_mode_solves_the_task(mode: ServerMode, servers: int, workers: int) -> None:
    ranks = servers + workers
    outcomes = simulate(lambda b: train(b, mode, servers=range(servers), steps=25), ranks, seed=3)
    untrained = loss_of(list(model().parameters()))
    params: dict[int, torch.Tensor] = {}
    for outcome in outcomes[:servers]:
        record = outcome.record
        assert record is not None
        assert record.pushes == dict.fromkeys(range(servers, ranks), 25)
        assert record.steps == (25 if mode.together else 25 * workers)
        params |= dict(zip(record.numbers, record.params, strict=True))
    assert loss_of([params[number] for number in sorted(params)]) < 0.2 * untrained


@pytest.mark.checkered
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_it_works_on_every_kind_of_backend(mode: ServerMode, cluster: Cluster) -> None:
    outcomes = cluster.run(lambda b: train(b, mode, servers=(1, 0), steps=3), 4)
    expected = alone((2, 3), 3)
    total = 0
    for outcome in outcomes[:2]:
        assert outcome.record is not None
        assert outcome.record.pushes == {2: 3, 3: 3}
        total += len(outcome.record.numbers)
        if mode.together:
            for number, param in zip(outcome.record.numbers, outcome.params, strict=True):
                assert torch.equal(param, expected[number])
    assert total == len(expected)


def test_a_server_without_workers_returns_at_once() -> None:
    (outcome,) = simulate(lambda b: train(b, ServerMode.SYNCHRONOUS), 1)
    assert outcome.record is not None
    assert outcome.record.steps == 0
    assert outcome.record.optimizer is not None


KINDS = [torch.bfloat16, torch.float64, torch.float32, torch.float16, torch.complex64]


def test_tensors_of_several_dtypes_empty_ones_and_more_servers_than_tensors() -> None:
    shapes = [(3, 5), (), (0,), (7,), (2, 0, 3)]

    def run(backend: Backend) -> list[torch.Tensor]:
        params = [torch.ones(shape, dtype=d) for shape, d in zip(shapes, KINDS, strict=True)]
        servers = range(6)
        if backend.rank in servers:
            found = ParameterServer.serve(
                params, backend, lambda p: torch.optim.SGD(p, lr=1), servers=servers
            )
            assert found.steps == 2
            assert (found.optimizer is None) == (not found.numbers)
            return found.params
        with ParameterServer.connect(params, backend, servers=servers) as client:
            for step in range(2):
                before = client.pull()
                client.push([torch.full_like(p, 0.25 * (backend.rank - 5)) for p in params])
                for one, other in zip(before, params, strict=True):
                    assert (one.shape, one.dtype) == (other.shape, other.dtype)
                    assert torch.equal(one, other - 0.375 * step)
            client.pull_(params[:])
        return params

    for params in simulate(run, 8)[6:]:
        for param, dtype in zip(params, KINDS, strict=True):
            assert param.dtype == dtype
            assert torch.equal(param, torch.full_like(param, 0.25))


def test_gradients_that_are_strided_are_read_as_they_are() -> None:
    def run(backend: Backend) -> list[float]:
        params = [torch.zeros(2, 3)]
        if backend.rank == 0:
            return (
                ParameterServer.serve(params, backend, lambda p: torch.optim.SGD(p, lr=1))
                .params[0]
                .flatten()
                .tolist()
            )
        with ParameterServer.connect(params, backend) as client:
            client.push([torch.arange(6.0).view(3, 2).t()])
        return []

    assert simulate(run, 2)[0] == [0, -2, -4, -1, -3, -5]


def test_a_run_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    def run(seed: int) -> list[Outcome]:
        return simulate(lambda b: train(b, ServerMode.ASYNCHRONOUS, steps=3), 3, seed=seed)

    one, same, other = run(1)[0].params, run(1)[0].params, run(2)[0].params
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_service_goes_on_from_what_on_step_has_saved() -> None:
    saved: list[tuple[list[torch.Tensor], dict]] = []

    def save(record) -> None:
        if record.steps == 3:
            saved.append(
                ([p.detach().clone() for p in record.params], record.optimizer.state_dict())
            )

    def first(backend: Backend) -> Outcome:
        return train(backend, ServerMode.SYNCHRONOUS, steps=3, optimizer=adam, on_step=save)

    def second(backend: Backend) -> None:
        params, state = saved[0]

        def restored(mine: list[torch.Tensor]) -> torch.optim.Optimizer:
            made = adam(mine)
            made.load_state_dict(state)
            return made

        net = model()
        if backend.rank == 0:
            ParameterServer.serve(params, backend, restored)
            return
        with ParameterServer.connect(list(net.parameters()), backend) as client:
            client.pull_()
            for step in range(3, 5):
                client.step(gradients(net, backend.rank, step))

    simulate(first, 3)
    simulate(second, 3)
    for found, wanted in zip(saved[0][0], alone((1, 2), 5, adam), strict=True):
        assert torch.equal(found, wanted)

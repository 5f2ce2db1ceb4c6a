"""Configurations: checked, the same again from JSON and from the environment, and built."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from ports import unused_port

from phalanx import (
    AllReduceAggregator,
    Backend,
    BackendUnavailableError,
    CompressedAggregator,
    GradientAggregator,
    InvalidRankError,
    InvalidWorldSizeError,
    LocalAggregator,
    MisuseError,
    ParameterServer,
    TopK,
    simulate,
)
from phalanx.training import CompressionConfig, DataParallelConfig, DistributedConfig

CONFIG = DistributedConfig(3, 1, "node1:29500")
COMPRESSIONS = {
    "ErrorFeedback(TopK(0.01))": CompressionConfig("top_k", {"ratio": 0.01}, True),
    "RandomK(0.1, seed=4)": CompressionConfig("random_k", {"ratio": 0.1, "seed": 4}),
    "PowerSGD(4, dtype=None, seed=0)": CompressionConfig("power_sgd", {"rank": 4}),
    "PowerSGD(4, dtype=torch.bfloat16, seed=0)": CompressionConfig(
        "power_sgd", {"rank": 4, "dtype": "bfloat16"}
    ),
    "Quantized(bits=1, block=256, stochastic=None, seed=0)": CompressionConfig(
        "quantized", {"bits": 1, "stochastic": None}
    ),
    "Half(torch.float16)": CompressionConfig("half", {"dtype": "float16"}),
    "Half(torch.bfloat16)": CompressionConfig("half"),
}
ALL = [
    DataParallelConfig(CONFIG),
    DataParallelConfig(CONFIG, "parameter_server"),
    DataParallelConfig(DistributedConfig(1, 0, "[fd00::1]:29500"), "local"),
    DataParallelConfig(DistributedConfig(3, 2)),
    *(
        DataParallelConfig(CONFIG, "compressed", compression)
        for compression in COMPRESSIONS.values()
    ),
]


@pytest.mark.parametrize("config", ALL)
def test_a_config_is_the_same_from_json_and_from_the_environment(config: DataParallelConfig):
    assert DataParallelConfig.from_json(config.to_json()) == config
    assert DataParallelConfig.from_environment(config.to_environment()) == config
    assert DistributedConfig.from_json(config.config.to_json()) == config.config
    assert DistributedConfig.from_environment(config.config.to_environment()) == config.config


HOSTS = st.sampled_from(["node1", "192.0.2.7", "[fd00::1]", "[fe80::1%eth0]", "a.b-c.example"])
SEEDS = st.integers() | st.text(max_size=5) | st.none() | st.booleans()
COMPRESSIONS_DRAWN = st.one_of(
    st.builds(
        lambda method, ratio, seed, feedback: CompressionConfig(
            method, {"ratio": ratio, **({"seed": seed} if method == "random_k" else {})}, feedback
        ),
        st.sampled_from(["top_k", "random_k"]),
        st.floats(0, 1),
        SEEDS,
        st.booleans(),
    ),
    st.builds(
        lambda rank, seed: CompressionConfig("power_sgd", {"rank": rank, "seed": seed}),
        st.integers(1, 1000),
        SEEDS,
    ),
    st.builds(
        lambda bits, block: CompressionConfig("quantized", {"bits": bits, "block": block}),
        st.sampled_from([8, 4, 1]),
        st.integers(1, 10**6),
    ),
)


@settings(max_examples=examples(25))
@given(st.integers(1, 10**6), st.integers(0), HOSTS, st.integers(1, 65535), COMPRESSIONS_DRAWN)
def test_so_is_any_other(size: int, rank: int, host: str, port: int, compression):
    ranks = DistributedConfig(size, rank % size, f"{host}:{port}")
    config = DataParallelConfig(ranks, "compressed", compression)
    again = DataParallelConfig.from_json(config.to_json())
    assert again == config
    assert again.to_json() == config.to_json()
    assert DataParallelConfig.from_environment(config.to_environment()) == config
    assert repr(again.compression.build()) == repr(compression.build())


@pytest.mark.parametrize("size", [0, -1, "2", True, 1.5])
def test_a_world_of_no_number_of_ranks_is_refused(size):
    with pytest.raises(InvalidWorldSizeError, match="world_size must be"):
        DistributedConfig(size, 0, "a:1")


@pytest.mark.parametrize("rank", [-1, 2, "1", None])
def test_a_rank_that_is_not_there_is_refused(rank):
    with pytest.raises(InvalidRankError, match=r"the last is 1"):
        DistributedConfig(2, rank, "a:1")


@pytest.mark.parametrize("address", ["", "a", "a:", "a:0", "a:70000", "fd00::1:29500", ":1"])
def test_an_address_that_is_none_is_refused(address: str):
    with pytest.raises(ValueError, match="is not an address"):
        DistributedConfig(1, 0, address)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"world_size": 2, "rank": 5, "coordinator_addr": "a:1"}', "rank 5 is not one of 2"),
        ('{"world_size": "2", "rank": 0, "coordinator_addr": "a:1"}', "world_size"),
        ('{"world_size": 2, "coordinator_addr": "a:1"}', "rank"),
        ('{"world_size": 2, "rank": 0, "coordinator_addr": "a:1", "port": 3}', "port"),
        ("{", "JSON"),
    ],
)
def test_json_that_is_no_config_is_refused_by_the_field_s_name(text: str, words: str):
    with pytest.raises(ValueError, match=words):
        DistributedConfig.from_json(text)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_that_is_missing_or_no_number_is_named(name: str):
    environ = CONFIG.to_environment()
    if name != "MASTER_ADDR":
        with pytest.raises(ValueError, match=f"{name}='x'"):
            DistributedConfig.from_environment({**environ, name: "x"})
    del environ[name]
    with pytest.raises(ValueError, match=f"{name} is not in the environment"):
        DistributedConfig.from_environment(environ)


@pytest.mark.parametrize(
    ("variable", "kind"),
    [
        ({"RANK": "-1"}, InvalidRankError),
        ({"RANK": "3"}, InvalidRankError),
        ({"WORLD_SIZE": "0"}, InvalidWorldSizeError),
        ({"WORLD_SIZE": ""}, ValueError),
        ({"MASTER_ADDR": ""}, ValueError),
        ({"MASTER_ADDR": "node1:29500"}, ValueError),
        ({"MASTER_PORT": "-1"}, ValueError),
        ({"MASTER_PORT": "70000"}, ValueError),
    ],
)
def test_a_variable_that_makes_no_sense_is_named_with_its_value(variable, kind):
    ((name, value),) = variable.items()
    with pytest.raises(kind, match=f"{name}='?{value}"):
        DistributedConfig.from_environment({**CONFIG.to_environment(), **variable})


def test_an_ipv6_number_in_the_environment_may_have_brackets():
    environ = {**CONFIG.to_environment(), "MASTER_ADDR": "[fd00::1]"}
    assert DistributedConfig.from_environment(environ).coordinator_addr == "[fd00::1]:29500"


def test_a_variable_that_is_empty_counts_as_none():
    environ = {**CONFIG.to_environment(), "PHALANX_AGGREGATOR": "", "PHALANX_COMPRESSION": ""}
    assert DataParallelConfig.from_environment(environ) == DataParallelConfig(CONFIG)


def test_fields_of_other_types_are_refused_when_they_are_written_down_too():
    with pytest.raises(ValueError, match="coordinator_addr must be text"):
        DistributedConfig(1, 0, 29500)
    with pytest.raises(TypeError, match=r"takes a DistributedConfig, not \{"):
        DataParallelConfig({"world_size": 1, "rank": 0, "coordinator_addr": "a:1"})
    with pytest.raises(TypeError, match=r"takes a CompressionConfig.* not TopK\(0.1\)"):
        DataParallelConfig(CONFIG, "compressed", TopK(0.1))
    with pytest.raises(ValueError, match="there is no aggregator"):
        DataParallelConfig(CONFIG, LocalAggregator())
    with pytest.raises(ValueError, match="is no method"):
        CompressionConfig(["top_k"], {"ratio": 0.1})
    with pytest.raises(ValueError, match="has to be a dict"):
        CompressionConfig("half", None)
    with pytest.raises(ValueError, match="error_feedback='no' True or False"):
        CompressionConfig("half", {}, "no")


@pytest.mark.parametrize(
    "variables",
    [
        {"PHALANX_AGGREGATOR": "gossip"},
        {"PHALANX_AGGREGATOR": "compressed"},
        {"PHALANX_COMPRESSION": '{"method": "top_k", "options": {"ratio": 0.1}}'},
        {"PHALANX_AGGREGATOR": "compressed", "PHALANX_COMPRESSION": "{}"},
        {"PHALANX_AGGREGATOR": "local"},
    ],
)
def test_aggregators_that_cannot_be_are_refused_from_the_environment(variables):
    with pytest.raises(ValueError, match="PHALANX_AGGREGATOR"):
        DataParallelConfig.from_environment({**CONFIG.to_environment(), **variables})


def test_so_are_they_when_they_are_written_down():
    with pytest.raises(ValueError, match="no aggregator 'gossip'; there are local"):
        DataParallelConfig(CONFIG, "gossip")
    with pytest.raises(ValueError, match="takes a compression"):
        DataParallelConfig(CONFIG, "compressed")
    with pytest.raises(ValueError, match="averages nothing, and there are 3 ranks"):
        DataParallelConfig(CONFIG, "local")


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("top_k", {}, "ratio"),
        ("top_k", {"ratio": 2.0}, "between 0 and 1"),
        ("top_k", {"ratio": 0.1, "size": 3}, "size"),
        ("top_k", {"ratio": "0.1"}, "between 0 and 1, not '0.1'"),
        ("top_k", {"ratio": None}, "between 0 and 1"),
        ("random_k", {"ratio": math.nan}, "between 0 and 1"),
        ("power_sgd", {"rank": 1.5}, "rank 1 or more, not 1.5"),
        ("quantized", {"bits": 3}, "8, 4 or 1"),
        ("quantized", {"bits": 8.0}, "8, 4 or 1"),
        ("quantized", {"block": 1.5}, "at least 1, not 1.5"),
        ("quantized", {"stochastic": "maybe"}, "True, False or None"),
        ("half", {"dtype": "float33"}, "'float33' is no dtype"),
        ("half", {"dtype": "int8"}, "casts to"),
        ("gossip", {}, "is no method; there are top_k"),
    ],
)
def test_compressors_that_cannot_be_are_refused_at_once(method: str, options, words: str):
    with pytest.raises(ValueError, match=words):
        CompressionConfig(method, options)


@pytest.mark.parametrize("text", COMPRESSIONS)
def test_a_compression_is_built_as_it_says(text: str):
    assert repr(COMPRESSIONS[text].build()) == text


def test_a_config_builds_its_aggregator_over_its_rank_s_backend():
    kinds = {
        "all_reduce": AllReduceAggregator,
        "parameter_server": ParameterServer,
        "compressed": CompressedAggregator,
    }

    def run(backend: Backend) -> None:
        config = DistributedConfig(backend.world_size, backend.rank)
        for name, kind in kinds.items():
            compression = (
                COMPRESSIONS["ErrorFeedback(TopK(0.01))"] if name == "compressed" else None
            )
            aggregator = DataParallelConfig(config, name, compression).build(backend)
            assert type(aggregator) is kind
            assert aggregator.aggregate([torch.ones(3)])[0].shape == (3,)
        with pytest.raises(MisuseError, match="the config is of rank 1 of 3, and the backend"):
            DataParallelConfig(CONFIG).build(backend)

    simulate(run, 2)
    alone = DataParallelConfig(DistributedConfig(1, 0), "local")
    assert list(simulate(lambda b: type(alone.build(b)), 1)) == [LocalAggregator]


class OfOnesOwn(GradientAggregator):
    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def aggregate(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self.backend.rank * gradient for gradient in gradients]


def test_an_aggregator_of_one_s_own_is_named_by_its_module():
    def run(backend: Backend) -> None:
        ranks = DistributedConfig(2, backend.rank)
        config = DataParallelConfig(ranks, f"{__name__}:OfOnesOwn")
        assert DataParallelConfig.from_json(config.to_json()) == config
        assert DataParallelConfig.from_environment(config.to_environment()) == config
        (found,) = config.build(backend).aggregate([torch.ones(1)])
        assert found.item() == backend.rank
        for name, error, words in (
            (f"{__name__}:Nothing", AttributeError, "has no attribute 'Nothing'"),
            ("no_such_module:Name", ImportError, "No module named 'no_such_module'"),
            (f"{__name__}:Backend.__repr__", TypeError, "is no GradientAggregator"),
        ):
            with pytest.raises(error, match=words):
                DataParallelConfig(ranks, name).build(backend)

    simulate(run, 2)


def test_only_connecting_needs_an_address():
    with pytest.raises(ValueError, match="connect needs coordinator_addr"):
        DistributedConfig(1, 0).connect()


def test_a_config_connects_its_rank():
    import threading

    port = unused_port()
    met: dict[int, list[float]] = {}

    def run(rank: int) -> None:
        config = DataParallelConfig(DistributedConfig(2, rank, f"127.0.0.1:{port}"))
        with config.config.connect(timeout=20.0) as backend:
            met[rank] = config.build(backend).aggregate([torch.tensor([2.0 * rank])])[0].tolist()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert met == {0: [1.0], 1: [1.0]}


def test_under_torchrun_whose_store_has_the_port_it_says_what_to_do(monkeypatch):
    import socket

    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with socket.create_server(("127.0.0.1", 0)) as store:
        config = DistributedConfig(2, 0, f"127.0.0.1:{store.getsockname()[1]}")
        with pytest.raises(BackendUnavailableError, match=r"in use.* take phalanx.init\(\)"):
            config.connect(timeout=5.0)

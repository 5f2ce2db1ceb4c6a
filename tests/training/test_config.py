"""Configurations: checked, the same again from JSON and from the environment, and built."""

from __future__ import annotations

import pytest
import torch

from phalanx import (
    AllReduceAggregator,
    Backend,
    CompressedAggregator,
    CompressionConfig,
    DataParallelConfig,
    DistributedConfig,
    InvalidRankError,
    InvalidWorldSizeError,
    LocalAggregator,
    MisuseError,
    ParameterServer,
    simulate,
)

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
        ('{"world_size": 2, "rank": 0}', "coordinator_addr"),
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
    with pytest.raises(ValueError, match="'gossip' is none; there are local"):
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
        ("quantized", {"bits": 3}, "8, 4 or 1"),
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
        config = DistributedConfig(backend.world_size, backend.rank, "a:1")
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
    alone = DataParallelConfig(DistributedConfig(1, 0, "a:1"), "local")
    simulate(lambda b: type(alone.build(b)), 1)
    assert list(simulate(lambda b: type(alone.build(b)), 1)) == [LocalAggregator]


def test_a_config_connects_its_rank():
    import socket
    import threading

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
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

"""Configurations: a rank and its group, and the averaging of gradients; from and to text."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Literal, TypeVar

import msgspec
import torch

from phalanx.aggregation import (
    AllReduceAggregator,
    CompressedAggregator,
    GradientAggregator,
    LocalAggregator,
    ParameterServer,
)
from phalanx.backends import DEFAULT_TIMEOUT, Backend, TcpBackend
from phalanx.compression import Compressor, ErrorFeedback, Half, PowerSGD, Quantized, RandomK, TopK
from phalanx.errors import (
    BackendUnavailableError,
    InvalidRankError,
    InvalidWorldSizeError,
    MisuseError,
)
from phalanx.wire.control import learned, parse_address

T = TypeVar("T", bound="_Config")


_VARIABLES = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
_COMPRESSORS: Mapping[str, Callable[..., Compressor]] = MappingProxyType(
    {
        "top_k": TopK,
        "random_k": RandomK,
        "power_sgd": PowerSGD,
        "quantized": Quantized,
        "half": Half,
    }
)
_AGGREGATORS: Mapping[str, Callable[[Backend], GradientAggregator]] = MappingProxyType(
    {
        "local": lambda backend: LocalAggregator(),
        "all_reduce": AllReduceAggregator,
        "parameter_server": ParameterServer,
    }
)


class _Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    def to_json(self) -> str:
        """Return it as JSON, which `from_json` reads."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls: type[T], text: str | bytes) -> T:
        """Return the config in JSON. Raise ValueError, which names the field, for other text."""
        try:
            return msgspec.json.decode(text, type=learned(cls))
        except msgspec.DecodeError as error:
            if isinstance(error.__cause__, ValueError):  # raised by __post_init__
                raise error.__cause__ from None
            raise ValueError(f"{cls.__name__} from JSON: {error}") from None


class DistributedConfig(_Config, frozen=True):
    """A rank, the number of ranks, and the address of their rendezvous.

    world_size        1 or more
    rank              0 <= rank < world_size
    coordinator_addr  `"host:port"` of rank 0, which only `connect` needs

    Raises `InvalidWorldSizeError`, `InvalidRankError`, or ValueError for another form of address.
    In the environment: WORLD_SIZE and RANK; MASTER_ADDR and MASTER_PORT, both or neither.
    """

    world_size: int
    rank: int
    coordinator_addr: str | None = None

    def __post_init__(self) -> None:
        if type(self.world_size) is not int or self.world_size < 1:
            raise InvalidWorldSizeError(
                f"world_size must be a number of at least 1, not {self.world_size!r}"
            )
        if type(self.rank) is not int or not 0 <= self.rank < self.world_size:
            raise InvalidRankError(
                f"rank {self.rank!r} is not one of {self.world_size}: ranks count from 0, the last "
                f"is {self.world_size - 1}",
                peer=self.rank if type(self.rank) is int else None,
            )
        if not isinstance(self.coordinator_addr, str | None):
            raise ValueError(  # noqa: TRY004 - as for every other field
                f'coordinator_addr must be text, "host:port", not {self.coordinator_addr!r}'
            )
        if self.coordinator_addr is not None:
            parse_address(self.coordinator_addr)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> DistributedConfig:
        """Return the config of these variables. Raise ValueError, which names the variable."""
        numbers, address = {}, None
        names = _VARIABLES if environ.keys() & _VARIABLES[2:] else _VARIABLES[:2]
        for name in names:
            if name not in environ:
                raise ValueError(f"{name} is not in the environment; {', '.join(names)} have to be")
            if name != "MASTER_ADDR":
                try:
                    numbers[name] = int(environ[name])
                except ValueError:
                    raise ValueError(
                        f"{name}={environ[name]!r} in the environment is no number"
                    ) from None
        host = environ.get("MASTER_ADDR", "").removeprefix("[").removesuffix("]")
        if ":" in host:  # an IPv6 address, which is in brackets before a port
            try:
                ipaddress.IPv6Address(host)
            except ValueError:
                raise ValueError(
                    f"MASTER_ADDR={environ['MASTER_ADDR']} in the environment is no host; a port "
                    "goes into MASTER_PORT"
                ) from None
            host = f"[{host}]"
        if "MASTER_PORT" in numbers:
            address = f"{host}:{numbers['MASTER_PORT']}"
        try:
            return cls(numbers["WORLD_SIZE"], numbers["RANK"], address)
        except ValueError as error:
            found = ", ".join(f"{name}={environ[name]}" for name in names)
            raise type(error)(f"the environment has {found}: {error}") from None

    def to_environment(self) -> dict[str, str]:
        """Return the variables for `from_environment` and `phalanx.init`."""
        place = () if self.coordinator_addr is None else parse_address(self.coordinator_addr)
        values = (self.world_size, self.rank, *place)
        return {name: str(value) for name, value in zip(_VARIABLES, values, strict=False)}

    def connect(self, *, timeout: float = DEFAULT_TIMEOUT) -> TcpBackend:
        """Return this rank's backend. Blocks until all are connected; raises as `TcpBackend` does.

        Rank 0 listens at `coordinator_addr`. Under torchrun, whose own store listens at
        MASTER_PORT, `phalanx.init()` gives the backend instead.
        """
        if self.coordinator_addr is None:
            raise ValueError("connect needs coordinator_addr, where rank 0 listens: 'host:port'")
        try:
            return TcpBackend(self.rank, self.world_size, self.coordinator_addr, timeout=timeout)
        except BackendUnavailableError as error:
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                raise
            raise BackendUnavailableError(
                f"{error}. Under torchrun its own store listens at MASTER_PORT: take "
                "phalanx.init() for the backend, and give it to build()",
                rank=self.rank,
            ) from error


class CompressionConfig(_Config, frozen=True):
    """A compressor.

    method          top_k, random_k, power_sgd, quantized or half
    options         arguments of its class, by name: `{"ratio": 0.01}`, `{"dtype": "float16"}`
    error_feedback  whether it is wrapped in `ErrorFeedback`

    Raises ValueError for options that the method does not take.
    """

    method: Literal["top_k", "random_k", "power_sgd", "quantized", "half"]
    options: dict[str, bool | int | float | str | None] = {}
    error_feedback: bool = False

    def __post_init__(self) -> None:
        self.build()

    def build(self) -> Compressor:
        """Return a new compressor of this configuration."""
        if not isinstance(self.method, str) or self.method not in _COMPRESSORS:
            raise ValueError(
                f"compression: {self.method!r} is no method; there are {', '.join(_COMPRESSORS)}"
            )
        if not isinstance(self.options, dict) or not isinstance(self.error_feedback, bool):
            raise ValueError(  # noqa: TRY004 - as for every other field
                f"compression: options={self.options!r} has to be a dict, such as "
                f'{{"ratio": 0.01}}, and error_feedback={self.error_feedback!r} True or False'
            )
        options: dict[str, object] = dict(self.options)
        if isinstance(name := options.get("dtype"), str):
            options["dtype"] = getattr(torch, name, None)
            if not isinstance(options["dtype"], torch.dtype):
                raise ValueError(f"compression: {name!r} is no dtype of torch's")  # noqa: TRY004
        try:
            compressor = _COMPRESSORS[self.method](**options)
        except TypeError as error:
            raise ValueError(
                f"compression: {self.method} cannot be made with the options {self.options}: "
                f"{error}"
            ) from None
        return ErrorFeedback(compressor) if self.error_feedback else compressor


class DataParallelConfig(_Config, frozen=True):
    """A rank's data-parallel training.

    config       the rank and its group
    aggregator   local, all_reduce, parameter_server or compressed; or one of your own, as text that
                 `build` imports, `"package.module:Name"`: `Name(backend)` is the aggregator
    compression  of the aggregator "compressed", and of no other

    Raises ValueError for a name that does not exist, or a compression that is missing or not used.
    In the environment, beside those of `DistributedConfig`: PHALANX_AGGREGATOR, and
    PHALANX_COMPRESSION as JSON.
    """

    config: DistributedConfig
    aggregator: str = "all_reduce"
    compression: CompressionConfig | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.config, DistributedConfig):
            raise TypeError(f"config takes a DistributedConfig, not {self.config!r}")
        if not isinstance(self.compression, CompressionConfig | None):
            raise TypeError(
                "compression takes a CompressionConfig, such as "
                f'CompressionConfig("top_k", {{"ratio": 0.01}}), not {self.compression!r}'
            )
        names = [*_AGGREGATORS, "compressed"]
        text = self.aggregator if isinstance(self.aggregator, str) else ""
        if text not in names and ":" not in text:
            raise ValueError(
                f"there is no aggregator {self.aggregator!r}; there are {', '.join(names)}, and "
                "those of your own, 'package.module:Name'"
            )
        if (self.aggregator == "compressed") != (self.compression is not None):
            raise ValueError(
                f"aggregator={self.aggregator!r} and compression={self.compression!r}: the "
                "aggregator 'compressed' takes a compression, and no other does"
            )
        if self.aggregator == "local" and self.config.world_size > 1:
            raise ValueError(
                f"aggregator='local' averages nothing, and there are {self.config.world_size} ranks"
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> DataParallelConfig:
        """Return the config of these variables. Raise ValueError, which names the variable."""
        config = DistributedConfig.from_environment(environ)
        aggregator = environ.get("PHALANX_AGGREGATOR") or "all_reduce"
        text = environ.get("PHALANX_COMPRESSION")
        try:
            compression = CompressionConfig.from_json(text) if text else None
            return cls(config, aggregator, compression)
        except ValueError as error:
            raise ValueError(
                f"the environment has PHALANX_AGGREGATOR={aggregator} and PHALANX_COMPRESSION="
                f"{text or ''}: {error}"
            ) from None

    def to_environment(self) -> dict[str, str]:
        """Return the variables that `from_environment` reads."""
        variables = {**self.config.to_environment(), "PHALANX_AGGREGATOR": self.aggregator}
        if self.compression is not None:
            variables["PHALANX_COMPRESSION"] = self.compression.to_json()
        return variables

    def build(self, backend: Backend) -> GradientAggregator:
        """Return the aggregator, over a backend; `MisuseError` if that is not the config's rank.

        TypeError if one of your own is no `GradientAggregator`; and the errors of its import.
        """
        if (backend.rank, backend.world_size) != (self.config.rank, self.config.world_size):
            raise MisuseError(
                f"the config is of rank {self.config.rank} of {self.config.world_size}, and the "
                f"backend is rank {backend.rank} of {backend.world_size}",
                rank=backend.rank,
            )
        if self.compression is not None:
            return CompressedAggregator(backend, self.compression.build())
        made = (_AGGREGATORS.get(self.aggregator) or resolve_name(self.aggregator))(backend)
        if not isinstance(made, GradientAggregator):
            raise TypeError(f"{self.aggregator}(backend) is no GradientAggregator, but {made!r}")
        return made

"""Objects become bytes and come back as they were; bytes that are no object do no harm."""

from __future__ import annotations

import collections
import enum
import math
import random
import struct
import sys
import tracemalloc

import pytest
import torch
from collective_reference import same
from forms import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from phalanx import DistributedError, UnsupportedObjectError, UnsupportedOperationError
from phalanx.errors import MalformedObjectError
from phalanx.wire.codec import DEPTH, DIMENSIONS, DTYPES, decode, encode

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
tensors = st.sampled_from(
    [
        torch.tensor(3.5),
        torch.arange(6).reshape(2, 3).t(),
        torch.empty(0, 3, dtype=torch.float16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j, float("nan")]).conj(),
    ]
)
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
objects = st.recursive(
    keys | tensors | st.integers(-(2**200), 2**200),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def back(obj: object) -> object:
    return decode(memoryview(encode(obj)))


def assert_alike(one: object, two: object) -> None:
    """Equal, of the same types, to the last bit of every float, and in the same order."""
    assert type(one) is type(two)
    if isinstance(one, Tensor):
        assert isinstance(two, Tensor)
        assert same(one, two)
    elif isinstance(one, float):
        assert isinstance(two, float)
        assert struct.pack("<d", one) == struct.pack("<d", two)
    elif isinstance(one, (list, tuple)):
        assert isinstance(two, (list, tuple))
        assert len(one) == len(two)
        for left, right in zip(one, two, strict=True):
            assert_alike(left, right)
    elif isinstance(one, dict):
        assert isinstance(two, dict)
        assert_alike([*one.items()], [*two.items()])
    else:
        assert one == two


@settings(max_examples=examples(300))
@given(objects)
def test_an_object_comes_back_as_it_was(obj: object) -> None:
    assert_alike(back(obj), obj)


@pytest.mark.parametrize(
    "obj",
    [
        *(0, -1, 127, 128, -128, -129, 255, 2**63, -(2**63) - 1, 10**5000, -(10**5000)),
        *(0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, sys.float_info.min, 5e-324),
        *("", "\0", "naïve", "\U0001f600", "x" * 300, b"", b"\0\xff" * 200),
        *([], (), {}, [()], ([],), {(): []}, {None: None, "": b"", (1, (2.5, "a")): True}),
        {1: "int", "1": "str", b"1": "bytes", (1,): "tuple", False: "bool"},
        [[True, 1, 1.0], (True, 1, 1.0)],
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_types_and_values_survive(obj: object) -> None:
    assert_alike(back(obj), obj)


def test_the_order_of_a_dict_survives() -> None:
    obj = dict.fromkeys(["z", "a", "m"])
    assert list(back(obj)) == ["z", "a", "m"]  # type: ignore[call-overload]


def test_what_is_shared_comes_back_as_copies() -> None:
    shared = [1]
    first, second = back([shared, shared])  # type: ignore[misc]
    assert first == second == [1]
    assert first is not second


def test_as_deep_as_is_promised() -> None:
    obj: object = 1
    for _ in range(DEPTH):
        obj = [obj]
    assert back(obj) == obj
    with pytest.raises(UnsupportedObjectError, match=rf"is inside of {DEPTH} others"):
        encode([obj])


# ----------------------------------------------------------------------------------------- tensors


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_tensor_of_any_dtype_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 256, (6 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        bits %= 2
    flat = bits.view(dtype)
    for shape in [(6,), (2, 3), (1, 6, 1)]:
        tensor = flat.view(shape)
        result = back({"t": (tensor,)})["t"][0]  # type: ignore[index]
        assert (result.shape, result.dtype) == (tensor.shape, dtype)
        assert torch.equal(result.contiguous().view(-1).view(torch.uint8), bits)
    for shape in [(0,), (0, 4), (3, 0, 2)]:
        result = back(torch.empty(shape, dtype=dtype))
        assert isinstance(result, Tensor)
        assert (result.shape, result.dtype) == (shape, dtype)
    scalar = back(flat[0])
    assert isinstance(scalar, Tensor)
    assert scalar.shape == ()


def test_every_dtype_of_torch_is_known_but_those_that_need_a_scale_beside_them() -> None:
    every = {str(d) for d in vars(torch).values() if isinstance(d, torch.dtype)}
    unknown = every - {str(d) for d in DTYPES.values()}
    assert all(name.startswith(("torch.qint", "torch.quint")) for name in unknown)


def test_tensors_arrive_contiguous_and_plain_without_gradient_and_in_memory_of_their_own() -> None:
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    content = encode([weight, weight.t(), (weight * 2)])
    results = decode(memoryview(content))
    assert isinstance(results, list)
    content[:] = bytes(len(content))
    for result, expected in zip(results, [weight, weight.t(), weight * 2], strict=True):
        assert type(result) is Tensor
        assert result.is_contiguous()
        assert not result.requires_grad
        assert torch.equal(result, expected.detach())
        result.zero_()


def test_a_tensor_may_be_the_key_of_a_dict() -> None:
    ((key, value),) = back({torch.ones(2): "ones"}).items()  # type: ignore[attr-defined]
    assert (key.tolist(), value) == ([1.0, 1.0], "ones")


# ---------------------------------------------------------------------------------------- refusals


class Color(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


class Scaled(Tensor):
    """A tensor that means more than its elements."""


Point = collections.namedtuple("Point", "x y")

REFUSED = [
    ({"a": [0, 1, 2, {1}]}, r'obj\["a"\]\[3\] is a set, which cannot be sent; what can is None, '),
    (object(), r"^obj is a object"),
    ((1, bytearray(b"x")), r"^obj\[1\] is a bytearray"),
    ({(1, frozenset()): 0}, r"^obj\.keys\(\)\[1\] is a frozenset"),
    ({"k": {1.5: 2j}}, r'^obj\["k"\]\[1\.5\] is a complex'),
    ([[Color.RED]], r"^obj\[0\]\[0\] is a Color"),
    (Text("a"), "^obj is a Text"),
    (Point(1, 2), "^obj is a Point"),
    (collections.OrderedDict(), "^obj is a OrderedDict"),
    (collections.defaultdict(list), "^obj is a defaultdict"),
    ({"s": "ok\ud800"}, r'^obj\["s"\] is a str that is no text.* character 2 .*\\ud800'),
    ({"\udfff": 1}, r"^obj\.keys\(\).* is a str that is no text"),
    (lambda: 0, "^obj is a function"),
    (torch.float32, "^obj is a dtype"),
    (torch.nn.Linear(1, 1), "^obj is a Linear"),
    ([torch.empty(2, device="meta")], r"^obj\[0\] is a tensor that cannot be sent: it is on meta"),
    (torch.eye(2).to_sparse(), r"it is torch\.sparse_coo"),
    (torch.empty((1,) * (DIMENSIONS + 1)), "has 65 dimensions, and 64 is the most"),
    (torch.ones(1).as_subclass(Scaled), "^obj is a tensor that cannot be sent: it is a Scaled"),
    ({10**5000: {1}}, r"^obj\[<int>\] is a set"),
    ({"x" * 1000: {1}}, r'^obj\["x{10,50}.*\] is a set'),
]


@pytest.mark.parametrize(("obj", "match"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_cannot_be_sent_is_refused_and_the_error_says_where_it_is(
    obj: object, match: str
) -> None:
    with pytest.raises(UnsupportedObjectError, match=match.replace('"', "['\"]")) as info:
        encode(obj)
    assert isinstance(info.value, TypeError)
    assert isinstance(info.value, UnsupportedOperationError)
    assert len(str(info.value)) < 300


def test_what_contains_itself_is_refused() -> None:
    circle: list[object] = [1]
    circle.append({"me": (circle,)})
    with pytest.raises(UnsupportedObjectError, match=r"obj\[1\]\['me'\]\[0\] contains itself"):
        encode(circle)
    table: dict[str, object] = {}
    table["self"] = table
    with pytest.raises(UnsupportedObjectError, match=r"obj\['self'\] contains itself"):
        encode(table)


# ----------------------------------------------------------------------------------- hostile bytes


def malformed(content: bytes, match: str) -> None:
    with pytest.raises(MalformedObjectError, match=match) as info:
        decode(memoryview(content))
    assert isinstance(info.value, ValueError)
    assert isinstance(info.value, DistributedError)


HUGE = b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f"  # 2**63 - 1


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "1 bytes are announced, and 0 came"),
        (b"?", "no object begins with byte 63"),
        (b"NN", "1 bytes are left over"),
        (b"f1234567", "8 bytes are announced, and 7 came"),
        (b"i\x02\x00", "2 bytes are announced, and 1 came"),
        (b"s" + HUGE, "9223372036854775807 bytes are announced, and 0 came"),
        (b"b\x80", "1 bytes are announced, and 0 came"),
        (b"b" + b"\x80" * 9 + b"\x01", "more than 63 bits"),
        (b"l" + HUGE + b"N", "objects are announced in 1 bytes"),
        (b"t\x03NN", "3 objects are announced in 2 bytes"),
        (b"d\x02NNN", "2 objects are announced in 3 bytes"),
        (b"d\x01l\x00N", "a list as the key of a dict"),
        (b"d\x01t\x01d\x00N", "a tuple as the key of a dict"),
        (b"d\x02i\x01\x05Ni\x01\x05N", "the key 5 twice"),
        (b"d\x02TNi\x01\x01N", "the key 1 twice"),
        (b"s\x01\xff", "not UTF-8"),
        (b"s\x03\xed\xa0\x80", "not UTF-8"),
        (b"x\x03int\x00", "dtype 'int', which torch has not"),
        (b"x\x06__name\x00", "dtype '__name', which torch has not"),
        (b"x\x05qint8\x00", "which torch has not"),
        (b"x\x07float32\x01" + HUGE, "bytes are announced, and 0 came"),
        (b"x\x07float32\x02" + HUGE + HUGE, "bytes are announced, and 0 came"),
        (b"x\x07float32\x41", "a tensor of 65 dimensions"),
        (b"x\x07float32\x03\x00" + HUGE + HUGE, "torch cannot make"),
        (b"l\x01" * (DEPTH + 1) + b"N", f"more than {DEPTH} levels"),
        (b"t\x01" * 100000 + b"N", f"more than {DEPTH} levels"),
        (b"d\x01N" * (DEPTH + 1) + b"N", f"more than {DEPTH} levels"),
    ],
)
def test_bytes_that_are_no_object_are_refused(content: bytes, match: str) -> None:
    malformed(content, match)


def decode_if_possible(content: bytes) -> None:
    try:
        obj = decode(memoryview(content))
    except MalformedObjectError:
        return
    assert_alike(back(obj), obj)


@settings(max_examples=examples(400))
@given(st.binary(max_size=60))
def test_any_bytes_are_an_object_or_malformed(content: bytes) -> None:
    decode_if_possible(content)


@settings(max_examples=examples(150))
@given(objects, st.randoms(use_true_random=False))
def test_a_damaged_object_is_another_object_or_malformed(
    obj: object, chance: random.Random
) -> None:
    whole = bytes(encode(obj))
    for _ in range(10):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            place = chance.randrange(max(1, len(damaged) - 1))
            damage = chance.choice(["change", "cut", "insert", "tag"])
            if damage == "change":
                damaged[place] = chance.randrange(256)
            elif damage == "tag":
                damaged[place] = chance.choice(b"NTFifsbltdx\xff\x7f")
            elif damage == "insert":
                damaged[place:place] = bytes(chance.choices(range(256), k=chance.randint(1, 9)))
            else:
                del damaged[place + 1 : place + chance.randint(2, 9)]
        decode_if_possible(bytes(damaged))


@settings(max_examples=examples(100))
@given(objects)
def test_no_proper_beginning_of_an_object_is_one(obj: object) -> None:
    whole = bytes(encode(obj))
    for end in range(max(0, len(whole) - 40), len(whole)):
        with pytest.raises(MalformedObjectError):
            decode(memoryview(whole)[:end])


def test_no_memory_is_taken_for_what_is_only_announced() -> None:
    claims = [b"l" + HUGE, b"b" + HUGE, b"i" + HUGE, b"x\x05uint8\x01" + HUGE]
    tracemalloc.start()
    try:
        for claim in claims:
            malformed(claim + b"N" * 1000, "announced")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20

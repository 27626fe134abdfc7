"""State as JSON and tensors, and back to the last bit; what cannot be stored is named with its path."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch

from forgather_cli.documents.encoding import Encoded, decode
from forgather_cli.documents.fields import FieldError
from forgather_cli.errors import SetupError


def round_trip(state: Any) -> Any:
    encoded = Encoded()
    encoded.add("callbacks.mine", state)
    document = json.loads(json.dumps(encoded.documents["callbacks.mine"], allow_nan=False))
    return decode(document, encoded.tensors.__getitem__)


def same(a: Any, b: Any) -> bool:
    """Equal in type and to the last bit, order of keys included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(same(ka, kb) and same(va, vb) for (ka, va), (kb, vb) in pairs)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype.str, a.shape, a.tobytes()) == (b.dtype.str, b.shape, b.tobytes())
    if isinstance(a, torch.Tensor):
        bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, float):
        return math.isnan(b) if math.isnan(a) else (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b)


PLAIN = [
    None, True, False, 0, -1, 2**63 - 1, 2**63, -(2**200), 10**5000, 0.1, -0.0, 1e-320, math.nan, math.inf, -math.inf,
    "", "ä\U0001f600", "lone \ud800", b"", b"\x00\xff", [], (), {}, (1, (2.0, [3, ()])), {"a": {"b": (None,)}},
    {1: "int", 1.5: "float", None: "none", False: "bool", "1": "str", (1, "x"): "tuple"},
    {"$": "looks like a tag", "x": 1}, {"$": "tuple", "items": []}, {"": 0}, {math.inf: 1, 2**70: 2},
    OrderedDict([("b", 1), ("a", (2,))]), Counter("hello"), {"z": 1, "a": 2}, random.getstate(),
    np.random.RandomState(3).get_state(),
]  # fmt: skip


@pytest.mark.parametrize("state", PLAIN, ids=range(len(PLAIN)))
def test_plain_values_round_trip(state: Any) -> None:
    assert same(round_trip(state), state)
    assert same(round_trip({"nested": [state, (state,)]}), {"nested": [state, (state,)]})


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i2").reshape(2, 3), np.array(3.5), np.zeros((0, 4), np.float16), np.array(["ab", "c"]),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.array([1 + 2j]), np.array(["2020-01-01"], "M8[D]"),
        np.array([True, False]), np.float32(1.1), np.int64(-7), np.bool_(True), np.float64(math.nan), np.str_("ä"),
        np.datetime64("2021-05-05"), np.array([b"ab"]),
    ],
    ids=repr,
)  # fmt: skip
def test_numpy_round_trips(array: Any) -> None:
    result = round_trip({"a": array})["a"]
    assert same(result, array)
    assert not isinstance(result, np.ndarray) or result.flags.writeable


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)], ids=str)
def test_tensors_of_every_dtype_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, (*shape, 16), dtype=torch.uint8)
    tensor = (torch.randn(shape) * 5).to(dtype) if dtype is not torch.bool else tensor[..., 0].bool()
    assert same(round_trip([tensor])[0], tensor)


def test_tensors_are_copies_and_views_become_contiguous() -> None:
    base, numbers = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4)
    encoded = Encoded()
    encoded.add("c", {"view": base.t(), "conj": torch.tensor([1 + 2j]).conj(), "param": torch.nn.Parameter(base)})
    base.zero_()
    state = decode(encoded.documents["c"], encoded.tensors.__getitem__)
    for name, expected in {"view": numbers.t(), "conj": torch.tensor([1 - 2j]), "param": numbers}.items():
        assert torch.equal(state[name], expected)
    assert not state["param"].requires_grad


class Color(IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


class Mine:
    pass


WITHIN_ITSELF: dict[str, Any] = {}
WITHIN_ITSELF["self"] = [WITHIN_ITSELF]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"history": [1, 2, 3, {4}]}, "callbacks.mine.state['history'][3]: cannot store a value of type set in a"),
        ({"a": (1, Mine())}, f"callbacks.mine.state['a'][1]: cannot store a value of type {__name__}.Mine in a"),
        ({"e": Color.RED}, f"callbacks.mine.state['e']: cannot store a value of type {__name__}.Color"),
        ({"p": Point(1, 2)}, "callbacks.mine.state['p']: cannot store a value of type"),
        ({"d": defaultdict(int)}, "callbacks.mine.state['d']: cannot store a value of type collections.defaultdict"),
        ({"f": print}, "callbacks.mine.state['f']: cannot store a value of type builtin_function_or_method"),
        ({"o": np.array([{}], object)}, "callbacks.mine.state['o']: cannot store a value of type numpy object array"),
        ({"r": np.zeros(1, "i4,f4")}, "callbacks.mine.state['r']: cannot store a value of type numpy"),
        ({"s": torch.eye(2).to_sparse()}, "callbacks.mine.state['s']: cannot store a value of type torch.sparse_coo"),
        ({"m": torch.empty(2, device="meta")}, "callbacks.mine.state['m']: cannot store a value of type torch.strided"),
        ({frozenset({1}): 1}, "callbacks.mine.state key frozenset({1}): cannot store a value of type frozenset"),
        ({b"k": 1}, "callbacks.mine.state: cannot store a key of type bytes"),
        (WITHIN_ITSELF, "callbacks.mine.state: is nested too deeply for a checkpoint, or contains itself"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_stored_is_named_with_its_path(state: Any, message: str) -> None:
    with pytest.raises(SetupError) as caught:
        Encoded().add("callbacks.mine", state)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "document",
    [
        {"$": "reduce", "args": []}, {"$": "tuple"}, {"$": "array", "dtype": "O", "shape": [1], "tensor": "x"},
        {"$": "numpy", "dtype": "f4", "hex": "zz"}, {"$": "tensor", "tensor": "missing"}, {"$": ["tuple"]},
        {"$": "tensor", "tensor": "x", "dtype": "load", "shape": [1]}, {"$": "dict", "items": [[[], 1]]},
    ],
    ids=str,
)  # fmt: skip
def test_documents_of_strangers_are_errors_not_code(document: Any) -> None:
    with pytest.raises(FieldError, match="its encoding holds what none writes"):
        decode(document, {"x": torch.zeros(8, dtype=torch.uint8)}.__getitem__)

"""State dicts go into JSON and tensors, and come back as they were; nothing else comes back, and nothing is run."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rankstep.checkpoint.tree import DEEPEST, Tensors, decode, encode, tensor_facts
from rankstep.errors import CheckpointError


def there_and_back(value):
    tensors = Tensors()
    text = json.dumps(encode(value, "it", tensors), allow_nan=False)
    return decode(json.loads(text), {name: t.clone() for name, t in tensors.named.items()})


def same(a, b):
    """Equal in value and in type, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.complex_numbers(allow_nan=False),
    st.binary(),
    st.sampled_from([torch.float32, torch.device("cpu"), torch.device("cuda:1")]),
)
keys = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(keys, inner),
        st.dictionaries(st.text(), inner),
        st.dictionaries(keys, inner).map(OrderedDict),
        st.frozensets(st.integers()),
        st.sets(st.text()),
    ),
    max_leaves=20,
)


@given(trees)
def test_every_tree_comes_back_as_it_was(value):
    assert same(there_and_back(value), value)


def test_a_changed_tree_is_not_the_same():
    value = {"a": [1, (2.0, "b")], 3: {4}}
    assert same(there_and_back(value), value)
    assert not same(there_and_back(value), {"a": [1, (2, "b")], 3: {4}})
    assert not same(there_and_back(value), {"a": [1, [2.0, "b"]], 3: {4}})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.arange(6).reshape(2, 3),
        torch.tensor([True, False]),
        torch.randn(4).to(torch.bfloat16),
        torch.randn(4).to(torch.float8_e4m3fn).view(torch.uint8),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(3, dtype=torch.complex128),
        torch.randn(3, dtype=torch.complex128).conj(),
        torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(4, 5).t(),
        torch.randn(4, 5)[:, 1:3],
        nn.Parameter(torch.randn(2)),
    ],
    ids=str,
)
def test_tensors_keep_their_bits_and_strides(tensor):
    back = there_and_back({"t": tensor})["t"]
    assert same(back, tensor.detach().resolve_conj())
    dense = tensor.is_contiguous() or sorted(tensor.stride()) == sorted(
        torch.empty_like(tensor).stride()
    )
    assert back.stride() == tensor.stride() or not dense or not tensor.numel()


def test_sparse_tensors_come_back():
    tensor = torch.sparse_coo_tensor([[0, 2], [1, 0]], [3.0, 4.0], (3, 2), check_invariants=True)
    back = there_and_back([tensor])[0]
    assert back.is_sparse
    assert torch.equal(back.to_dense(), tensor.to_dense())


def test_numpy_comes_back():
    value = {"a": np.arange(6, dtype=np.uint32).reshape(2, 3), "b": np.float16(2.5), "c": np.True_}
    assert same(there_and_back(value), value)


def test_other_mappings_keep_what_they_are():
    counter = there_and_back({"milestones": Counter({3: 1, 7: 2})})["milestones"]
    assert type(counter) is Counter
    assert counter == {3: 1, 7: 2}
    # Its factory may be any function, so it comes back as a plain dict.
    assert there_and_back(defaultdict(list, {1: [2]})) == {1: [2]}


def test_a_tied_tensor_is_kept_once():
    tensors = Tensors()
    weight = torch.randn(3)
    coded = encode({"a": weight, "b": weight.detach(), "c": weight[1:]}, "m", tensors)
    assert list(tensors.named) == ["m.a", "m.c"]
    assert coded["b"]["$tensor"] == "m.a"


def test_equal_names_do_not_collide():
    tensors = Tensors()
    encode({"a.b": torch.zeros(1)}, "m", tensors)
    encode({"a": {"b": torch.ones(1)}}, "m", tensors)
    assert [float(t) for t in tensors.named.values()] == [0.0, 1.0]


def test_functions_stay_with_whoever_was_built_with_them():
    assert there_and_back({"last_epoch": 3, "scale": math.sqrt, "f": lambda: 1}) == {
        "last_epoch": 3
    }


class Custom:
    """Any class of a user's."""


class Subclass(torch.Tensor):
    """A tensor that is more than its memory."""


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"deep": [Custom()]}, r"it\.deep\.0 is a .*Custom, which could only be pickled"),
        ([lambda: 1], r"it\.0 is a builtins\.function"),
        ([Path("x")], r"it\.0 is a pathlib"),
        ([np.array([None])], r"it\.0 is a numpy\.ndarray"),
        ([torch.ones(2).as_subclass(Subclass)], r"it\.0 is a .*Subclass; checkpoints hold plain"),
        ([torch.ones(2, device="meta")], r"it\.0 is a tensor that the safetensors format does not"),
    ],
)
def test_what_could_only_be_pickled_is_refused_by_name(value, named):
    with pytest.raises(CheckpointError, match=named):
        encode(value, "it", Tensors())


def test_a_state_that_contains_itself_is_refused():
    state = {}
    state["me"] = state
    with pytest.raises(CheckpointError, match=f"more than {DEEPEST} containers"):
        encode(state, "it", Tensors())


@pytest.mark.parametrize(
    ("coded", "named"),
    [
        ({"$exec": "import os"}, "holds a '\\$exec', which this Rankstep does not know"),
        ({"$tensor": "gone"}, "names a tensor 'gone', which is in none of its files"),
        ({"$tensor": "t", "stride": [10**15]}, "impossible strides"),
        ({"$tensor": "t", "stride": [-1]}, "impossible strides"),
        ({"$tensor": "t", "stride": [1, 1]}, "malformed"),
        ({"$dtype": "os"}, "'os' is no dtype"),
        ({"$dtype": 3}, "3 is no dtype"),
        ({"$device": "nowhere:0"}, "malformed"),
        ({"$array": "AAAA", "dtype": "|O", "shape": [1]}, "an array has the dtype object"),
        ({"$array": "AAAA", "dtype": "<f4", "shape": [10**18]}, "malformed"),
        ({"$array": "no base64", "dtype": "<f4", "shape": [1]}, "malformed"),
        ({"$tuple": 3}, "malformed"),
        ({"$dict": [[{"$dict": []}, 1]]}, "malformed"),
        ({"$dict": [[1]]}, "malformed"),
        ({"$float": "many"}, "malformed"),
        ({"$sparse": [{"$tensor": "i"}, {"$tensor": "t"}], "shape": [1]}, "malformed"),
    ],
)
def test_malformed_json_is_refused(coded, named):
    named_tensors = {"t": torch.ones(3), "i": torch.tensor([[5, 6, 7]])}
    with pytest.raises(CheckpointError, match=named):
        decode([coded], named_tensors)


def test_deep_json_is_refused_and_not_followed():
    deep = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(CheckpointError, match="nested deeper"):
        tensor_facts(deep)
    with pytest.raises(CheckpointError, match="malformed"):
        decode(deep, {})


def test_references_are_found_with_what_was_noted():
    tensors = Tensors()
    coded = encode({"a": [torch.ones(2, 3).t()], "b": 1}, "m", tensors)
    assert tensor_facts(coded) == {"m.a.0": {"$tensor": "m.a.0", "stride": [1, 3], "on": "cpu"}}
    with pytest.raises(CheckpointError, match="name is 3"):
        tensor_facts([{"$tensor": 3}])

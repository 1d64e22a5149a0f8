"""Views of storages, against numpy's strides."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zckpt.base.errors import CorruptError, UnsupportedError
from zckpt.containers.tensor_ref import MAX_FRAGMENTS, StorageRef
from zckpt.core.dtypes import BF16, F32, I16, U8
from zckpt.core.overlaps import first_gap
from zckpt.storage.location import locate

STORAGE = np.arange(97, dtype="<i2")


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    path = tmp_path_factory.mktemp("views") / "storage"
    path.write_bytes(b"head" + STORAGE.tobytes())
    return StorageRef("0", I16, len(STORAGE), locate(path).store(), 4)


@st.composite
def views(draw):
    dims = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=4))
    return draw(st.integers(0, 60)), tuple(dim for dim, _ in dims), tuple(step for _, step in dims)


@st.composite
def permuted(draw):
    """What transpose, permute, narrow and expand give: nearly foldable, the interesting cases."""
    array = np.arange(60).reshape(
        draw(st.sampled_from([(60,), (5, 12), (3, 4, 5), (2, 3, 2, 5), (60, 1), (1, 5, 1, 12)]))
    )
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    array = array[tuple(slice(draw(st.integers(0, 1)), None) for _ in range(array.ndim))]
    if draw(st.booleans()):
        array = np.broadcast_to(array, (draw(st.integers(1, 3)), *array.shape))
    first = int(array.reshape(-1)[0]) if array.size else 0
    return first, array.shape, tuple(step // array.itemsize for step in array.strides)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(view=st.one_of(views(), permuted()))
def test_fragments_walk_a_view_as_numpy_does(storage, elements, view):
    offset, shape, stride = view
    last = offset + sum((dim - 1) * step for dim, step in zip(shape, stride))
    if math.prod(shape) and last >= len(STORAGE):
        with pytest.raises(CorruptError, match="is too small for its tensor"):
            storage.view(offset, shape, stride)
        return
    ref = storage.view(offset, shape, stride)
    expected = np.lib.stride_tricks.as_strided(STORAGE[offset:], shape, [2 * step for step in stride])
    assert elements(ref) == expected.tobytes()
    assert first_gap(ref.fragments(), ref.numel, 2) is None
    assert ref.is_contiguous == bool(expected.flags.c_contiguous)
    if ref.is_contiguous:
        assert len(ref.fragments()) == min(1, ref.numel)


@pytest.mark.parametrize(
    ("shape", "stride", "fragments"),
    [
        ((), (), 1),
        ((0, 3), (3, 1), 0),
        ((2, 3, 4), (12, 4, 1), 1),
        ((4, 3), (8, 1), 1),  # columns of a wider matrix: one pitched fragment
        ((3, 4), (1, 3), 1),  # transposed
        ((2, 3, 4), (0, 0, 0), 1),  # a scalar, expanded
        ((5, 4), (0, 1), 1),  # a row, repeated
        ((2, 3, 3, 2), (18, 1, 6, 3), 2),  # channels last: height and width fold
        ((1, 4, 1), (99, 1, 7), 1),  # strides of single indices say nothing
    ],
)
def test_number_of_fragments(storage, shape, stride, fragments):
    assert len(storage.view(0, shape, stride).fragments()) == fragments


@pytest.mark.parametrize(
    ("offset", "shape", "stride"),
    [
        (-1, (1,), (1,)),
        (0, (-1,), (1,)),
        (1, (2,), (-1,)),
        (0, (2, 2), (1,)),
        (0, (True,), (1,)),
        (0, ("2",), (1,)),
        (0, (2**63,), (0,)),
        (0, (2**40, 2**40), (0, 0)),
        (0, (1,) * 200, (1,) * 200),
        (2**70, (), ()),
        (97, (), ()),
        (0, (98,), (1,)),
        (0, (2,), (2**62,)),
    ],
)
def test_impossible_views_do_not_exist(storage, offset, shape, stride):
    with pytest.raises(CorruptError) as caught:
        storage.view(offset, shape, stride)
    assert caught.value.file == storage.store.path and str(caught.value)


@pytest.mark.parametrize(
    ("offset", "shape", "stride", "found"),
    [
        (-3, (2,), (1,), "offset -3"),
        (0, (4, -2), (2, 1), "size -2"),
        (0, (2,), (-1,), "stride -1"),
        (0, ("2",), (1,), "size '2'"),
    ],
)
def test_what_is_impossible_of_a_view_is_named(storage, offset, shape, stride, found):
    with pytest.raises(CorruptError) as error:
        storage.view(offset, shape, stride)
    assert error.value.found == found and "from 0" in error.value.expected


def test_a_view_may_have_another_dtype(storage):
    ref = storage.view(1, (2,), (1,), F32)
    assert (ref.byte_offset, ref.nbytes, ref.storage_nbytes) == (8, 8, 194)
    with pytest.raises(CorruptError):
        storage.view(48, (1,), (1,), F32)
    with pytest.raises(CorruptError, match="without a dtype"):
        StorageRef("0", None, 4, storage.store, 0).view(0, (4,), (1,))
    assert StorageRef("0", None, 4, storage.store, 0).view(0, (4,), (1,), U8).nbytes == 4


def test_place_tells_tied_from_merely_overlapping(storage):
    assert storage.view(0, (2, 3), (3, 1)).place == storage.view(0, (2, 3), (3, 1)).place
    assert storage.view(0, (2, 3), (3, 1)).place != storage.view(0, (3, 2), (2, 1)).place
    assert storage.view(0, (2,), (1,)).place != storage.view(1, (2,), (1,)).place


def test_scattered_tensors_are_refused_before_memory_is_full(storage):
    ref = storage.view(0, (MAX_FRAGMENTS + 1, 2, 2), (0, 1, 3), BF16)
    with pytest.raises(UnsupportedError, match="scattered"):
        ref.fragments()

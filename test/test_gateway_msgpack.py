"""The gateway's codec: it reads what openpi's clients write, and nothing else costs more than its own size."""
import struct
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from worldmodel_ros.serving.gateway.msgpack import Bounds, WireError, decode, encode

raw = msgspec.msgpack.encode


def array(data=b'\0' * 8, dtype='<f4', shape=(2,), **more):
    return raw({b'__ndarray__': True, b'data': data, b'dtype': dtype, b'shape': shape, **more})


@pytest.mark.parametrize('value', [
    np.arange(12, dtype=np.uint8).reshape(2, 2, 3), np.float32(1.5) * np.ones((4, 2), np.float32), np.zeros((0, 7)),
    np.array(3), np.array([True, False]), np.array([1, 2], '>i4')])
def test_arrays_come_out_as_they_went_in(value):
    out = decode(encode({'a': [value]}))['a'][0]
    assert out.dtype == value.dtype and out.shape == value.shape and np.array_equal(out, value)


def test_maps_lists_and_scalars_come_out_too():
    value = {'a': {'b': [1, 2.5, None, True, 'x', b'y']}, 'n': -3}
    assert decode(encode(value)) == value
    assert decode(encode({'n': np.float64(2.0)})) == {'n': 2.0}
    scalar = decode(raw({b'__npgeneric__': True, b'data': 3, b'dtype': '<i8'}))
    assert scalar == 3 and scalar.dtype == np.int64


@pytest.mark.parametrize('data, reason', [
    (b'', 'truncated'), (b'\xc1', 'code 0xc1'), (raw({'a': 1}) + b'\0', '1 bytes too many'), (raw('abc')[:-1], 'truncated'),
    (b'\xdd\xff\xff\xff\xff', 'truncated'), (b'\xdf\x7f\xff\xff\xff\x01', 'truncated'), (b'\xc6\xff\xff\xff\xff', 'truncated'),
    (b'\xdc\x00', 'truncated'), (b'\x91' * 50 + b'\xc0', 'in each other'), (b'\xd9\x01\xff', 'no MessagePack'),
    (b'\xc7\x01\x05\x00', 'an extension'), (b'\xd4\x05\x00', 'an extension'), (b'\x81\x80\x01', 'no MessagePack'),
    (raw({1: 2}), 'a key of a map is a int'), (raw({b'data': 2}), 'a key of a map is a bytes'),
    (array(dtype='|O'), 'only numbers'), (array(dtype='<c8'), 'only numbers'), (array(dtype='|V8'), 'only numbers'),
    (array(dtype='<U2'), 'only numbers'), (array(dtype=['<f4']), 'only numbers'), (array(shape=(3,)), 'has 12 bytes, and 8'),
    (array(shape=(2 ** 31, 2 ** 31, 4)), 'bytes, and 8 came'), (array(shape=(-1,)), 'whole numbers'),
    (array(shape=(1 << 40, 0), data=b''), 'whole numbers'), (array(shape=[1] * 9), 'whole numbers'),
    (array(shape=(True, 2)), 'whole numbers'), (array(shape=2), 'whole numbers'), (array(data='xxxxxxxx'), 'without data'),
    (raw({b'__ndarray__': True}), 'only numbers'), (raw({b'__npgeneric__': True, b'data': 'x', b'dtype': '<f4'}), 'no number'),
    (raw({b'__npgeneric__': True, b'data': 1 << 40, b'dtype': '|u1'}), 'another size')])
def test_what_is_none_is_refused_with_words(data, reason):
    with pytest.raises(WireError, match=reason):
        decode(data)


def test_more_values_than_allowed_are_refused_before_they_are_made():
    data = b'\xdd' + struct.pack('>I', 8_000_000) + b'\xc0' * 8_000_000  # a list of 64 MB, from 8 MB
    tracemalloc.start()
    with pytest.raises(WireError, match='more than 20000 values'):
        decode(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    with pytest.raises(WireError, match='more than 3 values'):
        decode(raw([1, 2, 3]), Bounds(values=3))


def test_a_large_array_takes_its_own_size_and_no_more():
    data = encode({'a': np.zeros(4 << 20, np.uint8)})
    tracemalloc.start()
    value = decode(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert value['a'].nbytes == 4 << 20 and peak < 1.1 * len(data)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=80))
def test_any_bytes_are_read_or_refused(data):
    try:
        decode(data)
    except WireError:
        pass


@settings(max_examples=80, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers(-2 ** 63, 2 ** 64 - 1) | st.text() | st.binary(),
                    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12),
       st.data())
def test_any_value_comes_back_and_damaged_it_is_read_or_refused(value, data):
    encoded = encode([value])
    assert decode(encoded, Bounds(depth=40)) == [value]
    at = data.draw(st.integers(0, len(encoded) - 1))
    damaged = encoded[:at] + bytes([data.draw(st.integers(0, 255))]) + encoded[at + 1:]
    try:
        decode(damaged)
    except WireError:
        pass

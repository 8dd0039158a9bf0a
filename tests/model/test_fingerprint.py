import numpy as np
import pytest

from offbeat.model.fingerprint import fingerprint


def random_bytes(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def test_the_order_of_iteration_does_not_matter():
    items = [("b", random_bytes(10)), ("a", random_bytes(20, 1)), ("c", random_bytes(0))]
    assert fingerprint(items) == fingerprint(reversed(items))


@pytest.mark.parametrize("position", [0, 5_000, 9_999])
def test_any_byte_of_a_small_tensor_counts(position):
    data = random_bytes(10_000)
    changed = data.copy()
    changed[position] ^= 1
    assert fingerprint([("w", data)]) != fingerprint([("w", changed)])


@pytest.mark.parametrize("position", [0, 4_095, -4_096, -1])
def test_both_ends_of_a_large_tensor_count(position):
    data = random_bytes(3 << 20)
    changed = data.copy()
    changed[position] ^= 1
    assert fingerprint([("w", data)]) != fingerprint([("w", changed)])


def test_a_change_spread_over_a_large_tensor_counts_and_few_bytes_are_read():
    data = random_bytes(3 << 20)
    everywhere = data.copy()
    everywhere[::4096] ^= 1
    assert fingerprint([("w", data)]) != fingerprint([("w", everywhere)])
    between = data.copy()
    between[4096:40_000] ^= 1  # the second page begins near byte 49,800
    assert fingerprint([("w", data)]) == fingerprint([("w", between)])


def test_names_and_lengths_count():
    data = random_bytes(8)
    prints = {
        fingerprint([("a", data)]),
        fingerprint([("b", data)]),
        fingerprint([("a", data[:4]), ("b", data[4:])]),
        fingerprint([("a", data[:5]), ("b", data[5:])]),
        fingerprint([]),
    }
    assert len(prints) == 5


def test_a_strided_view_equals_its_copy():
    data = random_bytes(100)
    assert fingerprint([("w", data[::2])]) == fingerprint([("w", data[::2].copy())])


def test_other_arrays_and_repeated_names_are_refused():
    with pytest.raises(ValueError, match="uint8"):
        fingerprint([("w", np.zeros(3, np.float32))])
    with pytest.raises(ValueError, match="'w' twice"):
        fingerprint([("w", random_bytes(3)), ("w", random_bytes(3))])

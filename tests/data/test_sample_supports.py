"""Supports as arrays: their forms, their bytes, and the way into batches and rows."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import zstandard

from drawn_supports import as_supports, supports_at_random
from offbeat.data import wire
from offbeat.data.batch import Batch, SharedPrompts
from offbeat.data.packing import pack_row
from offbeat.data.sample_supports import BITS, KEPT, LEFT_OUT, Supports, check_supports, join_supports, pack_supports, unpack_supports
from offbeat.errors import DataError

V = 70
TOKENS = np.random.default_rng(1).integers(0, V, 12).astype(np.int32)


def masks_of(supports: Supports) -> np.ndarray:
    """[L, V] bool, by asking for every token."""
    return np.stack([supports.hold(np.full(len(supports), token)) for token in range(V)], axis=1)


def test_all_forms_say_the_same():
    mask = np.random.default_rng(0).random((1, V)) < 0.5
    for form in (LEFT_OUT, KEPT, BITS):
        assert np.array_equal(masks_of(as_supports(mask, [form])), mask)
    assert masks_of(Supports.whole_vocabulary(3)).all() and Supports.whole_vocabulary(3).are_whole.all()
    supports, masks = supports_at_random(TOKENS, V)
    assert np.array_equal(masks_of(supports), masks) and set(supports.forms.tolist()) == {LEFT_OUT, KEPT, BITS}
    which = np.array([5, 5, 0, 11])
    assert np.array_equal(masks_of(supports.at_indices(which)), masks[which])
    again = Supports.of_pieces(list(supports.forms_and_words))
    assert all(np.array_equal(getattr(again, name), getattr(supports, name)) for name in ("forms", "sizes", "words"))
    assert not list(Supports.whole_vocabulary(0).forms_and_words)
    # An id beyond the bits, such as an image's, is in no support of bits.
    assert not as_supports(mask, [BITS]).hold(np.array([1 << 20])).any() and Supports.whole_vocabulary(1).hold(np.array([1 << 20])).all()


def test_supports_come_back_from_their_bytes():
    empty = Supports.whole_vocabulary(0)
    for given in (supports_at_random(TOKENS, V)[0], Supports.whole_vocabulary(5), empty, as_supports(np.ones((1, V), bool), [KEPT])):
        for found in (unpack_supports(pack_supports(given)), wire.decode(Supports, wire.encode(given))):
            for name in ("forms", "sizes", "words"):
                value = getattr(found, name)
                assert np.array_equal(value, getattr(given, name)) and value.dtype == getattr(given, name).dtype
    assert len(pack_supports(Supports.whole_vocabulary(10_000))) < 100
    wide = as_supports(np.random.default_rng(0).random((200, 50_000)) < 1e-4, [KEPT] * 200)  # five tokens each
    assert np.array_equal(unpack_supports(pack_supports(wide)).words, wide.words) and len(pack_supports(wide)) < 14 * 200
    short = zstandard.compress(msgspec.msgpack.encode((b"\1", b"\2\0\0\0", b"\5\0\0\0")))  # two words are announced, and one comes
    for bytes_ in (b"", b"nothing", pack_supports(Supports.whole_vocabulary(2))[:-3], short):
        with pytest.raises(DataError, match="these bytes are not supports"):
            unpack_supports(bytes_)


def test_supports_are_those_of_their_tokens():
    supports, _ = supports_at_random(TOKENS, V)
    assert check_supports(supports, TOKENS) is supports
    lost = as_supports(np.arange(V)[None] == [[3], [4]], [KEPT, BITS])
    for given, tokens, why in (
        (supports, TOKENS[1:], "must have 11 entries like tokens, got 12"), ([1], TOKENS[:1], "must be Supports, got list"),
        (lost, np.array([3, 5]), "token 5 is not"), (lost, np.array([5, 4]), "token 5 is not"),
    ):
        with pytest.raises(DataError, match=why):
            check_supports(given, tokens)


def test_sequences_without_supports_are_whole_beside_others_with_some():
    supports, masks = supports_at_random(TOKENS, V)
    joined = join_supports([None, supports, Supports.whole_vocabulary(2)], [3, 12, 2])
    assert joined is not None and np.array_equal(masks_of(joined), np.concatenate([np.ones((3, V)), masks, np.ones((2, V))]))
    assert join_supports([None, Supports.whole_vocabulary(2)], [3, 2]) is None and join_supports([], []) is None
    # Of a single token that is kept, nothing is left to choose: that is no whole support.
    assert join_supports([as_supports(np.arange(V)[None] == 3, [KEPT])], [1]) is not None


def test_a_row_has_the_support_of_each_of_its_targets():
    tokens = np.array([1, 2, 3, 4, 1, 2, 5, 6], np.int32)
    batch = Batch.of_next_tokens(
        tokens, np.tile([False, False, True, True], 2), lengths=[4, 4], columns={"loss_weights": np.ones(8)}, losses=(),
        shared=SharedPrompts(np.zeros(2, np.int64), np.full(2, 2)))
    supports, masks = supports_at_random(np.array([3, 4, 5, 6]), V)
    batch = wire.decode(Batch, wire.encode(replace(batch, supports=supports)))
    row = pack_row(batch, share_prefix=True)
    assert row.supports is not None and np.array_equal(masks_of(row.supports), masks) and row.supports.hold(row.target).all()
    picked = Batch.concatenate([batch.select([1]), replace(batch, supports=None).select([0])])
    assert picked.supports is not None and np.array_equal(masks_of(picked.supports), np.concatenate([masks[2:], np.ones((2, V))]))
    with pytest.raises(DataError, match="supports of a batch must have 4 entries, got 3"):
        replace(batch, supports=Supports.whole_vocabulary(3))

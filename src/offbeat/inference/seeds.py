"""Seeds for the parts of a split request, so that its samples equal the whole request's. Called by dialects; pure.

The embedded engine gives sample i of a request with seed s the key mix(mix(s) + GOLDEN * (i + 1)); see `engine.sampler.row_keys`. As mix
is a bijection, for every i there is a seed whose samples 0, 1, ... are samples i, i + 1, ... of s.
"""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_UNMIX = tuple(pow(factor, -1, 1 << 64) for factor in _MIX)


def seed_from(seed: int, first: int) -> int:
    """Return the seed whose samples 0, 1, ... equal samples `first`, `first` + 1, ... of `seed`; `seed` itself if `first` is 0."""
    return _unmix((_mix(seed & _MASK) + _GOLDEN * first) & _MASK) if first else seed


def _mix(word: int) -> int:
    word = ((word ^ word >> 30) * _MIX[0]) & _MASK
    word = ((word ^ word >> 27) * _MIX[1]) & _MASK
    return word ^ word >> 31


def _unmix(word: int) -> int:
    word = (_unshift(word, 31) * _UNMIX[1]) & _MASK
    word = (_unshift(word, 27) * _UNMIX[0]) & _MASK
    return _unshift(word, 30)


def _unshift(word: int, bits: int) -> int:
    """The inverse of `word ^ word >> bits`."""
    shifted = word >> bits
    while shifted:
        word ^= shifted
        shifted >>= bits
    return word

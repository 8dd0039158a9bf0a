"""Line breaks around an image are encoded as a whole text with them would be."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from offbeat.data.image_edges import EDGE, Edges

PLACEHOLDER = 1 << 30


@pytest.fixture
def backend(tmp_path):
    """Knows up to four line breaks as one token."""
    breaks = ["\n" * count for count in range(1, 5)]
    vocabulary = {token: index for index, token in enumerate([*breaks, "a", "b"])}
    backend = Tokenizer(models.BPE(vocabulary, [("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n")]))
    backend.save(str(tmp_path / "tokenizer.json"))
    return backend


@pytest.mark.parametrize("text", ["a#b", "a\n#b", "a\n#\nb", "#", "##", "a\n##\n", "\n#a#\n\n"])
def test_an_edge_is_encoded_with_the_line_breaks_beside_it(backend, tmp_path, text):
    tokens, origins, expected = [], [], []
    for place, part in enumerate(text.split("#")):
        if place:
            tokens += [EDGE, PLACEHOLDER, EDGE]
            origins += [-place] * 3
        own = backend.encode(part).ids
        tokens += own
        origins += [0] * len(own)
    for place, part in enumerate(text.replace("#", "\n\n#\n\n").split("#")):
        expected += [PLACEHOLDER] * bool(place) + backend.encode(part).ids
    found, origin = Edges(str(tmp_path), "\n\n").write(np.array(tokens, np.int32), np.array(origins))
    assert found.tolist() == expected
    assert [-each for each, token in zip(origin, found, strict=True) if token == PLACEHOLDER] == list(range(1, text.count("#") + 1))
    assert len(origin) == len(found)
    assert all(each < 0 for each, token in zip(origin, found, strict=True) if set(backend.decode([token])) == {"\n"} and token > 0)

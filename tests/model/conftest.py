"""Ways in which a model's head makes its logits, for a vocabulary of `V` tokens."""

import pytest

from offbeat.model import head
from offbeat.model.head import HeadSizes

V = 49


@pytest.fixture(params=["all at once", "chunks that are kept", "chunks that are made again", "by kernel", "by kernel, made again"])
def chunks(request, monkeypatch):
    if request.param != "all at once":
        kept, passes = 5 * V * 4 if "again" in request.param else 1 << 20, 0 if "kernel" in request.param else 2 * V * 4
        monkeypatch.setattr(
            head, "CPU_SIZES", HeadSizes(chunk_bytes=3 * V * 4, chunk_rows=1 << 30, kept_bytes=kept, pass_bytes=passes))

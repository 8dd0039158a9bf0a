"""What ranks have in common; `test_train_worker.py` calls the rest of it on a real rank."""

import pytest

from offbeat.cluster.rank_worker import RankWorker


def test_only_public_methods_can_be_called() -> None:
    for name in ("_load", "handle", "nothing"):
        with pytest.raises(LookupError, match="has no method"):
            RankWorker().handle(name, b"")

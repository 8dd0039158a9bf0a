"""A mixture of experts that computes with other weights than were published: refused at its first proof, right engines never.

Each version is one step of sign descent at a learning rate of 1e-6, from float32 weights that lie anywhere between two numbers of the
published format, as after many steps. No canary can tell such versions apart in bfloat16.
"""

import pytest

from expert_drills import FAULTS, Trainer, load
from offbeat.engine.engine import EmbeddedEngine
from offbeat.errors import EngineError, RefusedError
from offbeat.weights.proof import BY_WEIGHTS


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EmbeddedEngine:
    return load(tmp_path_factory.mktemp("experts"), request.param)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_spoilt_mixture_is_refused_at_once_and_a_right_one_is_proven_by_its_weights(engine: EmbeddedEngine, fault) -> None:
    trainer = Trainer(engine)
    for _ in range(2):
        assert trainer.publish().means == BY_WEIGHTS
        verdict = trainer.publish(fault)
        assert trainer.was_spoilt and verdict.refused and "its weights have fingerprint" in verdict.reason
    assert trainer.publish().means == BY_WEIGHTS


def test_right_engines_are_proven_in_many_publishes(engine: EmbeddedEngine) -> None:
    trainer = Trainer(engine)
    assert {trainer.publish().means for _ in range(40)} == {BY_WEIGHTS}


def test_nothing_is_served_that_was_not_delivered_or_that_is_gone_after_a_sleep(engine: EmbeddedEngine) -> None:
    trainer = Trainer(engine)
    with pytest.raises(RefusedError, match="is not staged"):
        engine.switch(engine.version + 1, "recompute")
    engine.sleep(keep_weights=False)
    with pytest.raises(RefusedError, match="its weights are gone"):
        engine.wake()
    with pytest.raises(EngineError, match="it sleeps"):
        engine.fingerprinter()
    assert trainer.publish().means == BY_WEIGHTS

"""The engine's figures as Prometheus reads them."""

from prometheus_client import generate_latest

from offbeat.engine.loader import load_engine
from offbeat.engine.metrics import registry_of
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Request, SamplingParams, ScoreJob


def test_the_figures_are_those_of_the_engine_at_the_time_of_asking(model_folder, adapter_folder) -> None:
    engine = load_engine(EngineOptions(model=model_folder("qwen3"), version=4, max_adapters=2))
    registry = registry_of(engine)
    assert registry.get_sample_value("offbeat_engine_generated_tokens_total") == 0
    engine.submit(Request(id="a", prompt=[5, 6, 7], params=SamplingParams(max_new_tokens=4, ignore_eos=True), n=2))
    engine.submit(ScoreJob(id="b", tokens=[5, 6]))
    assert registry.get_sample_value("offbeat_engine_waiting") == 1 == registry.get_sample_value("offbeat_engine_scores_waiting")
    while engine.has_work:
        engine.step()
    assert registry.get_sample_value("offbeat_engine_generated_tokens_total") == 8
    assert registry.get_sample_value("offbeat_engine_samples_total", {"reason": "length"}) == 2
    assert registry.get_sample_value("offbeat_engine_weight_version") == 4
    assert registry.get_sample_value("offbeat_engine_running") == 0
    for seed in range(3):
        engine.adapters.add(f"t@{seed}", f"/{seed}", engine.adapters.read(adapter_folder("qwen3", seed)))
    assert registry.get_sample_value("offbeat_engine_adapters") == 2
    assert registry.get_sample_value("offbeat_engine_adapter_evictions_total") == 1
    assert b"# HELP offbeat_engine_running Samples being decoded." in generate_latest(registry)

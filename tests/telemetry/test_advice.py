"""What a run is told about its own publishing."""

from offbeat.config.load import load_config
from offbeat.cpu import Cpu
from offbeat.telemetry import advice as advice_module
from offbeat.telemetry.advice import PublishingAdvice, ways_to_publish_less, ways_to_shorten_steps

SLOW = {"step/publish_s": 6.0, "step/total_s": 20.0}


def config(*overrides):
    return load_config(None, [("run.name", "mine"), *overrides])


def test_a_run_that_publishes_for_long_is_told_once_what_would_help(monkeypatch):
    monkeypatch.setattr(advice_module, "this_cpu", lambda: Cpu("Server", "AMX", has_bf16=True))
    advice = PublishingAdvice(config())
    assert advice.look({"eval/accuracy": 0.5}) == ""
    assert advice.look(SLOW) == "", "the first step may be slow for any reason"
    text = advice.look(SLOW)
    assert text.startswith("publishing takes 6.0 of 20.0 s a step; model.lora.rank = 16 ")
    assert 'weights.dir = "/dev/shm/mine"' in text and 'model.dtype = "bfloat16"' in text
    assert [advice.look(SLOW) for _ in range(5)] == [""] * 5


def test_a_run_that_publishes_fast_is_told_nothing():
    advice = PublishingAdvice(config())
    for publish_s, total_s in ((0.9, 1.0), (0.9, 1.0), (6.0, 60.0), (6.0, 60.0), (6.0, 20.0), (6.0, 60.0), (6.0, 20.0)):
        assert advice.look({"step/publish_s": publish_s, "step/total_s": total_s}) == ""


def test_nothing_is_advised_that_a_run_does_already_or_cannot_do(monkeypatch):
    assert ways_to_publish_less(config(("model.lora.rank", "8"))) == []
    done = [("weights.dir", "/dev/shm/x"), ("model.dtype", "bfloat16"), ("weights.interrupt", "keep")]
    assert [way.split(" =")[0] for way in ways_to_publish_less(config(*done))] == ["model.lora.rank"]
    monkeypatch.setattr(advice_module, "this_cpu", lambda: Cpu("Laptop", "AVX2", has_bf16=False))
    assert not any("bfloat16" in way for way in ways_to_publish_less(config())), "it would be slow there"
    afar = ways_to_publish_less(config(("cluster.launcher", "ray")))
    assert not any("weights.dir" in way for way in afar)


def test_a_slow_first_step_on_cpus_names_what_makes_it_smaller():
    text = ways_to_shorten_steps(config(("rollout.max_new_tokens", "256")))
    assert "it has 64 prompts of 8 samples with up to 256 new tokens each; a smaller rollout.consumer_batch_size (16 to begin" in text
    assert "rollout.max_new_tokens or rollout.group_size" in text
    assert "to begin with" not in ways_to_shorten_steps(config(("rollout.consumer_batch_size", "16")))


def test_devices_and_engines_elsewhere_are_not_told_to_take_smaller_steps():
    for setting in (("train.devices_per_rank", "1"), ("inference.devices_per_engine", "1"), ("inference.urls", '["http://127.0.0.1:9"]')):
        assert ways_to_shorten_steps(config(setting)) == ""

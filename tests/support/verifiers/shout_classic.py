"""An environment of verifiers' classic API."""
import verifiers as vf
from datasets import Dataset


def loud(completion, answer, **_):
    return 1.0 if completion else 0.0


def length(completion, **_):
    return float(len(completion))


def load_environment(num=4):
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"word {i}"}], "answer": str(i)} for i in range(num)])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[loud, length], weights=[1.0, 0.0]))

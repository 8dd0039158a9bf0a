"""lm-evaluation-harness, unmodified, evaluates what `offbeat engine` serves: its scores are those of the model's own log-probabilities."""

import json
import math
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from offbeat.engine.options import EngineOptions
from offbeat.engine.server import EngineServer

COMMAND = Path(__file__).parents[2] / ".venv-agents-lm" / "bin" / "lm_eval"
QUESTIONS = [
    {"question": "What is 3 + 4?", "choices": ["seven", "eight", "twenty-one"], "label": 0},
    {"question": "Which of these is green?", "choices": ["milk", "the grass in May", "coal"], "label": 1},
    {"question": "Who counts the tokens?", "choices": ["nobody does", "the trainer", "the engine counts them"], "label": 2},
    {"question": "Ist es kalt? Änderung: €", "choices": ["ja", "nein"], "label": 0}]
STOP, MAX_TOKENS = "\n", 12
TASKS = {
    "our_choices": """
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "our_answers": f"""
output_type: generate_until
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{choices[label]}}}}"
generation_kwargs: {{until: ["\\n", "Question:"], max_gen_toks: {MAX_TOKENS}}}
metric_list: [{{metric: exact_match}}]
""",
    "our_texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: byte_perplexity}]
""",
}


@dataclass(frozen=True)
class Model:
    """The model that is served, and the numbers that it should be found to have."""

    folder: Path
    hf: GPT2LMHeadModel
    tokenizer: PreTrainedTokenizerFast

    @classmethod
    def made(cls, folder: Path, *, bos: bool) -> "Model":
        """Write a model with random weights and a tokenizer of byte pairs, which puts a token before a text if `bos`."""
        fast = Fast(models.BPE())
        fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        texts = [text for row in QUESTIONS for text in (f"Question: {row['question']}\nAnswer:", *row["choices"])]
        fast.train_from_iterator(texts, trainers.BpeTrainer(
            vocab_size=320, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
        if bos:
            fast.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<eos>")
        torch.manual_seed(3)
        hf = GPT2LMHeadModel(GPT2Config(
            vocab_size=len(tokenizer), n_embd=48, n_layer=2, n_head=4, n_positions=128, eos_token_id=0, initializer_range=0.3)).eval()
        hf.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return cls(folder, hf, tokenizer)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    @torch.no_grad()
    def rows_after(self, ids: list[int]) -> torch.Tensor:
        """[T, V] log-probabilities after each token."""
        return self.hf(torch.tensor([ids])).logits[0].log_softmax(-1)

    def score(self, given: list[int], following: list[int]) -> tuple[float, bool]:
        """Log-probability of tokens after others, and whether each of them is the likeliest."""
        rows_TV = self.rows_after([*given, *following])[len(given) - 1 : -1]
        return (
            float(rows_TV.gather(1, torch.tensor(following)[:, None]).sum()), rows_TV.argmax(-1).tolist() == following)

    def write(self, prompt: str) -> str:
        """The likeliest continuation, up to a stop string."""
        ids = given = self.ids(prompt)
        while len(ids) < len(given) + MAX_TOKENS and (token := int(self.rows_after(ids)[-1].argmax())) != 0:
            ids = [*ids, token]
        return str(self.tokenizer.decode(ids[len(given):])).partition(STOP)[0].partition("Question:")[0]


def evaluate(url: str, model: Model, folder: Path, *, batch_size: int, **arguments: str) -> dict[str, Any]:
    """Run the three tasks; returns their results and, by task, what was told of each row."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}\ntest_split: test\n{task}")
    given = {
        "model": model.folder.name, "base_url": f"{url}/v1/completions", "tokenizer": str(model.folder), "tokenizer_backend": "huggingface",
        "max_length": "128", "max_retries": "1", **arguments}
    assert COMMAND.exists(), f"{COMMAND} does not exist; `make test-agents` installs it"
    done = subprocess.run(
        [COMMAND, "--model", "local-completions", "--model_args", ",".join(f"{name}={value}" for name, value in given.items()),
         "--tasks", ",".join(TASKS), "--include_path", folder, "--batch_size", str(batch_size), "--output_path", folder / "out",
         "--log_samples"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}, cwd=folder, capture_output=True, text=True, check=False,
        timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    (results,) = (folder / "out").rglob("results_*.json")
    told = {"results": json.loads(results.read_text())["results"]}
    for name in TASKS:
        (samples,) = (folder / "out").rglob(f"samples_{name}_*.jsonl")
        told[name] = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    return told


@pytest.mark.parametrize(("bos", "arguments", "batch_size"), [
    (False, {"tokenized_requests": "True"}, 3), (False, {"tokenized_requests": "False", "num_concurrent": "4"}, 1),
    (True, {"tokenized_requests": "True", "add_bos_token": "True"}, 1), (True, {"tokenized_requests": "False", "add_bos_token": "True"}, 3),
], ids=["tokens", "texts", "tokens after BOS", "texts after BOS"])
def test_scores_are_those_of_the_models_log_probabilities(
    bos: bool, arguments: dict[str, str], batch_size: int, tmp_path: Path
) -> None:
    model = Model.made(tmp_path / "measured", bos=bos)
    server = EngineServer(EngineOptions(model=str(model.folder)))
    try:
        told = evaluate(server.start(), model, tmp_path, batch_size=batch_size, **arguments)
    finally:
        server.stop()
    right, right_norm, exact, nll, num_bytes = 0, 0, 0, 0.0, 0
    for row, chosen, answered, text in zip(QUESTIONS, told["our_choices"], told["our_answers"], told["our_texts"], strict=True):
        prompt = f"Question: {row['question']}\nAnswer:"
        scores = []
        for choice, ((logprob, is_greedy),) in zip(row["choices"], chosen["resps"], strict=True):
            whole, given = model.ids(f"{prompt} {choice}"), model.ids(prompt)
            expected, likeliest = model.score(given, whole[len(given):])
            assert float(logprob) == pytest.approx(expected, abs=1e-3) and str(is_greedy) == str(likeliest)
            scores.append(expected)
        normed = [score / len(choice) for score, choice in zip(scores, row["choices"], strict=True)]
        right += scores.index(max(scores)) == row["label"]
        right_norm += normed.index(max(normed)) == row["label"]
        written = model.write(prompt)
        assert answered["resps"] == [[written]]
        exact += written == row["choices"][row["label"]]
        expected, _ = model.score([0], model.ids(row["question"]))  # which lm_eval gives a prefix of its own
        assert float(text["resps"][0][0]) == pytest.approx(expected, abs=1e-3)
        nll, num_bytes = nll - expected, num_bytes + len(row["question"].encode())
    results = told["results"]
    assert results["our_choices"]["acc,none"] == right / len(QUESTIONS)
    assert results["our_choices"]["acc_norm,none"] == right_norm / len(QUESTIONS)
    assert results["our_answers"]["exact_match,none"] == exact / len(QUESTIONS)
    assert results["our_texts"]["byte_perplexity,none"] == pytest.approx(math.exp(nll / num_bytes), rel=1e-4)

"""A search tool over a folder of local texts, for `search_towns.toml`; and the texts, the questions and what to imitate first.

    python examples/search_towns.py .models/smollm2-135m-instruct runs/towns

The towns are invented, so no model knows them: what is right can only come from the texts.
"""

import argparse
import itertools
import json
import random
from functools import cache
from pathlib import Path

from offbeat import Row
from offbeat.agents.environments.schema import tool_of
from offbeat.agents.tools.search import TextIndex
from offbeat.chat.messages import Message, ToolCall
from offbeat.chat.rendering import Renderer
from offbeat.data.tokenizer import load_tokenizer

TEXTS = Path("runs/towns/texts")
NUM_TO_IMITATE = 400
FACTS = {
    "river": ("The river of {town} is the {value}.", "Which river flows through {town}?",
              ("Tiss", "Orrel", "Wend", "Marl", "Ashel", "Brune")),
    "stone": ("The houses of {town} are built of {value}.", "What are the houses of {town} built of?",
              ("granite", "slate", "limestone", "brick", "basalt", "oak")),
    "market": ("In {town} the market is held on {value}.", "On which day is the market of {town}?",
               ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")),
}


@cache
def index() -> TextIndex:
    return TextIndex(TEXTS, num_hits=2)


def search(query: str) -> str:
    """Search the guide to the towns and return the best passages.

    Args:
        query: a few words, such as the name of a town.
    """
    return index().search(query)


def names_it(completion: str, row: Row) -> float:
    """1 for an answer with the right name; less for one that says much besides."""
    words = completion.replace(".", " ").split()
    return float(row.answer in words) * min(1.0, 8 / max(len(words), 1))


def main() -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415 (takes seconds, and the tool's processes do without)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder with the tokenizer")
    parser.add_argument("out", type=Path, help="folder for the texts and the two files")
    args = parser.parse_args()
    rng = random.Random(0)
    towns = ["".join(parts) for parts in itertools.product(
        ("Arven", "Bel", "Cor", "Dun", "Elm", "Fen", "Gal", "Hart", "Ister", "Kes"), ("ford", "wick", "holm", "bury", "stead", "mouth"))]
    known = {town: {kind: rng.choice(values) for kind, (_, _, values) in FACTS.items()} for town in towns}
    (args.out / "texts").mkdir(parents=True, exist_ok=True)
    for town, values in known.items():
        said = " ".join(FACTS[kind][0].format(town=town, value=value) for kind, value in values.items())
        (args.out / "texts" / f"{town}.md").write_text(f"# {town}\n\n{said}\n")
    questions = [(town, FACTS[kind][1].format(town=town), values[kind]) for town, values in known.items() for kind in FACTS]
    rng.shuffle(questions)
    with (args.out / "questions.jsonl").open("w") as file:
        for _, question, answer in questions:
            file.write(json.dumps({"prompt": question, "answer": answer}) + "\n")

    renderer, tokenizer, tool = Renderer(load_tokenizer(args.model)), AutoTokenizer.from_pretrained(args.model), tool_of(search)
    found = TextIndex(args.out / "texts", num_hits=2)
    with (args.out / "imitate.jsonl").open("w") as file:
        for town, question, answer in rng.choices(questions, k=NUM_TO_IMITATE // 2):
            asked, called = Message("user", question), ToolCall("1", "search", json.dumps({"query": town}))
            written = f'<tool_call>\n{{"name": "search", "arguments": {called.arguments}}}\n</tool_call>'
            told = [asked, Message("assistant", calls=(called,)), Message("tool", found.search(town), call_id="1", name="search")]
            for messages, said in (([asked], written), (told, f"{answer}.")):
                prompt = tokenizer.decode(renderer.prompt(messages, [tool]), skip_special_tokens=False)
                file.write(json.dumps({"prompt": prompt, "answer": said}) + "\n")


if __name__ == "__main__":
    main()

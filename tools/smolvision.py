"""Makes a small model that reads images, and pictures to teach it: dots of colours to be counted. `make smolvision` calls it.

No pretrained model of images is in a package, so this one is shaped as SmolVLM (Idefics3) with random weights: a small language part of its
own, or with `--language` one that is pretrained, such as SmolLM2-135M, whose weights it takes over.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from transformers import AutoModelForCausalLM, AutoTokenizer, Idefics3Config, Idefics3ForConditionalGeneration, PreTrainedTokenizerFast

from offbeat.data.tokenizer import DEFAULT_ALPHABET, character_tokenizer

COLOURS = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220)}
_SIDE, _CELLS, _PATCH = 48, 4, 12
_SCALE = 1
_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
# Nothing stands between a question and its answer. So the token from which a number is predicted is the last letter of the colour that is
# asked for, and a small model need not learn first to look for it.
_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}{% endfor %}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(".models/smolvision"), help="folder of the model")
    parser.add_argument("--pictures", type=Path, default=Path(".models/smolvision-dots"), help="folder of rows and pictures")
    parser.add_argument("--language", help="folder of a pretrained Llama-like language part; a small random one without it")
    parser.add_argument("--rows", type=int, default=3000, help="rows to train on; a tenth as many are held out")
    args = parser.parse_args()
    make_model(args.model, args.language)
    make_rows(args.pictures / "train.jsonl", args.rows, seed=0)
    make_rows(args.pictures / "heldout.jsonl", args.rows // 10, seed=1)
    print(f"{args.model} and {args.pictures}")
    return 0


def make_model(folder: Path, language: str | None) -> None:
    """Write the model, its tokenizer and its processor."""
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    if language is None:
        tokenizer: PreTrainedTokenizerFast = character_tokenizer(DEFAULT_ALPHABET, chat_template=_TEMPLATE).hf
        text = {
            "model_type": "llama", "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 4, "max_position_embeddings": 256}
        state = None
    else:
        tokenizer = AutoTokenizer.from_pretrained(language)
        tokenizer.chat_template = _TEMPLATE
        pretrained = AutoModelForCausalLM.from_pretrained(language, dtype=torch.float32)
        text, state = pretrained.config.to_dict(), pretrained.model.state_dict()
    tokenizer.add_special_tokens({"additional_special_tokens": list(_TOKENS)})
    tokenizer.save_pretrained(folder)
    text |= {"vocab_size": max(len(tokenizer), text.get("vocab_size", 0)), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
             "pad_token_id": tokenizer.pad_token_id, "tie_word_embeddings": True}
    config = Idefics3Config(
        text_config=text, scale_factor=_SCALE, image_token_id=tokenizer.convert_tokens_to_ids("<image>"), tie_word_embeddings=True,
        vision_config={
            "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": _SIDE,
            "patch_size": _PATCH})
    config.pad_token_id = tokenizer.pad_token_id
    model = Idefics3ForConditionalGeneration(config)
    if state is not None:
        rows = state["embed_tokens.weight"]
        with torch.no_grad():
            model.model.text_model.embed_tokens.weight[: len(rows)] = rows
        del state["embed_tokens.weight"]
        model.model.text_model.load_state_dict(state, strict=False)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "Idefics3ImageProcessor", "processor_class": "Idefics3Processor", "do_image_splitting": False,
        "size": {"longest_edge": _SIDE}, "max_image_size": {"longest_edge": _SIDE},
        "image_seq_len": (_SIDE // _PATCH) ** 2 // _SCALE**2}, indent=2) + "\n", encoding="utf-8")


def make_rows(path: Path, count: int, *, seed: int) -> None:
    """Write rows and their pictures: dots of three colours on a grid, and the question how many are of one."""
    folder, random = path.parent / path.stem, np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        places = random.permutation(_CELLS * _CELLS)
        image, counts, first = Image.new("RGB", (_SIDE, _SIDE), "white"), {}, 0
        for name, colour in COLOURS.items():
            counts[name] = int(random.integers(0, 5))
            for place in places[first : first + counts[name]]:
                _draw(image, int(place), colour)
            first += counts[name]
        image.save(folder / f"{number}.png")
        asked = list(COLOURS)[int(random.integers(len(COLOURS)))]
        question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": f"how many {asked}"}]}
        rows.append({"messages": [question], "images": [f"{path.stem}/{number}.png"], "answer": str(counts[asked])})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _draw(image: Image.Image, place: int, colour: tuple[int, int, int]) -> None:
    size = _SIDE // _CELLS
    x, y = size * (place % _CELLS), size * (place // _CELLS)
    ImageDraw.Draw(image).ellipse((x + 2, y + 2, x + size - 3, y + size - 3), fill=colour)


if __name__ == "__main__":
    sys.exit(main())

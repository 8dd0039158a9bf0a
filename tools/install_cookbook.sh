#!/usr/bin/env bash
# Install the public Tinker cookbook, unmodified, in an environment of its own, with what two of its recipes need.
# Usage: tools/install_cookbook.sh DIR; `make cookbook` runs it. PYTHON chooses another Python.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1

tools/install_tinker.sh "$venv" 0.38.0
install=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet -c tests/sdk/constraints.txt)
# Without its dependencies: it names more than these recipes use, and a release of tml-renderers that is not everywhere yet.
"${install[@]}" --no-deps tinker-cookbook==0.6.1 tml-renderers
"${install[@]}" aiohttp blobfile chz cloudpickle datasets math-verify pillow pylatexenc pyrage rich scipy termcolor tiktoken
"$venv/bin/python" -c 'import tinker_cookbook.recipes.math_rl.train, tinker_cookbook.recipes.sl_loop'

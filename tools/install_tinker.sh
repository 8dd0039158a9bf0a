#!/usr/bin/env bash
# Install one version of the public Tinker client in an environment of its own, with what the tests of it need.
# Usage: tools/install_tinker.sh DIR VERSION; `make test-tinker` runs it. PYTHON chooses another Python.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 version=$2 python=${PYTHON:-python3}

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check install --quiet -c tests/sdk/constraints.txt \
  "tinker==$version" torch numpy psutil pytest pytest-timeout
"$venv/bin/python" -c 'import tinker, torch; print("tinker", tinker.__version__, "with torch", torch.__version__)'

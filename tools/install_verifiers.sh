#!/usr/bin/env bash
# Install verifiers in an environment of its own, for agent.python: its pins of openai and mcp do not fit others.
# Usage: tools/install_verifiers.sh DIR [VERSION]; `make verifiers` runs it. PYTHON chooses another Python. VERSION is 0.4.0, which plays
# tasksets, or 0.3.1, which plays modules with load_environment(), too.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
version=${2:-0.4.0}

"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check install --quiet -c "tests/agents_sdk/constraints-verifiers-$version.txt" "verifiers==$version"
"$venv/bin/python" -c 'import verifiers.v1'

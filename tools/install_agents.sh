#!/usr/bin/env bash
# Install public clients and agent libraries, unmodified, for the tests of agents; `make test-agents` runs it.
# Usage: tools/install_agents.sh DIR NAME, where NAME is one of the environments below. No environment holds all of them, because two majors
# of openai are in use. PYTHON chooses another Python.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 name=$2 python=${PYTHON:-python3}

case $name in
  a) packages=(openai openai-agents 'pydantic-ai-slim[openai,anthropic]' langgraph langchain-openai smolagents anthropic mcp) ;;
  b) packages=('litellm[mcp]') ;;  # without its extra, it cannot complete a chat that has tools
  camel) packages=(camel-ai) ;;  # needs an older pydantic, and an older mcp than it says
  lm) packages=('lm-eval[api]' transformers) ;;  # which reads the tokenizers of models
  *) echo "unknown environment '$name'; use a, b, camel or lm" >&2; exit 2 ;;
esac
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check install --quiet -c "tests/agents_sdk/constraints-$name.txt" "${packages[@]}"
"$venv/bin/python" -m pip --disable-pip-version-check check

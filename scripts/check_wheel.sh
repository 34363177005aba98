#!/usr/bin/env bash
# Builds the wheel and the source distribution into dist/, checks both with twine, installs the wheel in a new
# environment and uses it away from the checkout: `faser generate`, the Python API, `faser serve`, and the server itself
# over a model repository that the package wrote, as in NVIDIA's container. Dependencies come from .venv.
# --quick: builds into a temporary folder, takes the demo pair's engines from the user's cache, and starts no server.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
unset PYTHONPATH # set for the checkout
[ -x "$VENV/bin/twine" ] || ensure_venv dev

work="$(mktemp -d)"
dist="$ROOT/dist"
[ "${1:-}" != --quick ] || dist="$work/dist"
finish() {
  stop_server
  rm -rf "$work"
}
trap finish EXIT

say "building"
rm -f "$dist"/faser_backend-*
"$VENV/bin/python" -m build --no-isolation --outdir "$dist" "$ROOT" >"$work/log" 2>&1 || {
  tail -n 30 "$work/log" >&2
  die "neither wheel nor source distribution: the log ends above"
}
"$VENV/bin/twine" check --strict "$dist"/faser_backend-*

say "installing in a new environment"
"$VENV/bin/python" -m venv --without-pip "$work/venv"
"$VENV/bin/python" -m pip --python "$work/venv/bin/python" install -q --disable-pip-version-check --no-deps --no-index \
  "$dist"/faser_backend-*.whl
# The packages of .venv, after those of the new environment; an editable install's finder does not run from here.
site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
site "$VENV/bin/python" >"$(site "$work/venv/bin/python")/dependencies.pth"

VENV="$work/venv"
cd "$work"
"$VENV/bin/python" - "$work" <<'PY'
import importlib.util
import sys
from importlib.metadata import files
from faser_backend.places import DEMO_PAIR, MODEL_REPO, MODEL_REPO_LLMAPI, data_folder

names = {file.parts[0] for file in files("faser-backend") if not file.parts[0].startswith((".", "faser_backend-"))}
assert names == {"faser_backend"}, names
for name in ("engines", "plugins", "lab", "lab.bench", "lab.simulation", "lab.train_head"):
    place = importlib.util.find_spec(f"faser_backend.{name}").origin
    assert place.startswith(sys.argv[1]), place
for name in ("lab.abuse", "lab.checks", "lab.gpu", "lab.peers"):
    assert importlib.util.find_spec(f"faser_backend.{name}") is None, name
assert str(data_folder()).startswith(sys.argv[1]), data_folder()
for file in (MODEL_REPO / "ensemble/1/model.py", MODEL_REPO_LLMAPI / "tensorrt_llm/config.pbtxt", DEMO_PAIR / "prompts.jsonl"):
    assert file.is_file(), file
PY

[ "${1:-}" = --quick ] || export XDG_CACHE_HOME="$work/cache"
say "faser generate"
"$VENV/bin/faser" generate --prompt "def f(x):" --max-tokens 32
[ "${1:-}" != --quick ] || exit 0
say "the Python API"
"$VENV/bin/python" "$ROOT/examples/offline_batch.py"

ask() { # PORT MODEL: one request
  curl -sS --fail --max-time 60 -d '{"text_input": "def f(x):", "max_tokens": 8}' \
    "http://127.0.0.1:$1/v2/models/$2/generate" | grep -q '"text_output":"def f(x):' || die "$2 did not answer"
}

say "faser serve"
start_server "$work/serve.log" --no-decoupled
ask "$HTTP_PORT" ensemble
stop_server

say "tritonserver over a model repository that the wheel wrote"
# Without `faser serve`: Triton's own program starts, and its Python stub finds the installed package.
install="$("$VENV/bin/python" - <<'PY'
import os
from faser_backend.triton.server import find_triton

found = find_triton()
os.makedirs("backends/python")
for file in [*(found.backends / "python").glob("[!_]*"), found.stub]:
    os.symlink(file, f"backends/python/{file.name}")
print(found.binary, os.pathsep.join(map(str, found.libraries)))
PY
)"
"$VENV/bin/python" -m faser_backend.triton.model_configs . >/dev/null
mapfile -t ports < <(free_ports 3)
env PATH="$VENV/bin:$PATH" LD_LIBRARY_PATH="${install#* }" "${install%% *}" --model-repository=model_repo \
  --backend-directory=backends --http-port="${ports[0]}" --grpc-port="${ports[1]}" --metrics-port="${ports[2]}" \
  --http-address=127.0.0.1 --grpc-address=127.0.0.1 --metrics-address=127.0.0.1 --allow-gpu-metrics=false \
  --backend-config="python,shm-region-prefix-name=$(basename "$work")" >"$work/triton.log" 2>&1 &
SERVER_PID=$!
await_server "${ports[0]}" "$work/triton.log"
ask "${ports[0]}" ensemble

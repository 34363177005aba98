#!/usr/bin/env bash
# NVIDIA's perf_analyzer against a real server: streaming gRPC on `ensemble` at 1, 4 and 16 requests
# in flight, greedy completions of held-out prompts. Prints its report; tables (CSV) and single requests
# (JSON) are in build/perf_analyzer. Options go to `faser serve`, e.g. `bash scripts/perf_analyzer.sh --policy none`.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

MAX_TOKENS=${MAX_TOKENS:-100}
CONCURRENCIES=${CONCURRENCIES:-1 4 16}
PERF_ANALYZER="$ROOT/build/perf_analyzer"
PERF_ANALYZER_VERSION=2.50.0 # the last tritonclient that has it

# download_wheel FOLDER PLATFORM REQUIREMENT: one wheel for Linux x86-64, without what it depends on.
download_wheel() {
  "$VENV/bin/python" -m pip download -q --disable-pip-version-check --no-deps -d "$1" \
    --only-binary=:all: --platform "$2" "$3"
}

# The binary is in an old client wheel (later ones dropped it). It is linked against CUDA's runtime
# and Debian's libb64; both come as packages, and no GPU is used.
fetch_perf_analyzer() {
  local missing
  if [ ! -x "$PERF_ANALYZER/perf_analyzer" ]; then
    say "fetching perf_analyzer into build/"
    mkdir -p "$PERF_ANALYZER/wheels"
    download_wheel "$PERF_ANALYZER/wheels" manylinux1_x86_64 "tritonclient==$PERF_ANALYZER_VERSION"
    download_wheel "$PERF_ANALYZER/wheels" manylinux1_x86_64 "nvidia-cuda-runtime-cu12>=12,<13"
    "$VENV/bin/python" - "$PERF_ANALYZER" <<'PY'
import pathlib, sys, zipfile

tool = pathlib.Path(sys.argv[1])
for wheel in (tool / "wheels").glob("*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            base = name.rsplit("/", 1)[-1]
            if base == "perf_analyzer" or base.startswith("libcudart.so"):
                (tool / base).write_bytes(archive.read(name))
(tool / "perf_analyzer").chmod(0o755)
PY
  fi
  if LD_LIBRARY_PATH="$PERF_ANALYZER" ldd "$PERF_ANALYZER/perf_analyzer" | grep -q 'libb64.* not found'; then
    apt_install libb64-0d
  fi
  missing="$(LD_LIBRARY_PATH="$PERF_ANALYZER" ldd "$PERF_ANALYZER/perf_analyzer" | awk '/not found/ {print $1}')"
  [ -z "$missing" ] || die "perf_analyzer needs libraries that are missing: $missing"
}

perf_analyzer() { LD_LIBRARY_PATH="$PERF_ANALYZER" "$PERF_ANALYZER/perf_analyzer" "$@"; }

ensure_venv light
fetch_perf_analyzer

work="$(mktemp -d -t faser-perf.XXXXXX)"
trap 'stop_server; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

# end_id -1 is no token, so lengths are fixed.
"$VENV/bin/python" - "$MAX_TOKENS" >"$work/inputs.json" <<'PY'
import json, sys

fixed = {"max_tokens": [int(sys.argv[1])], "end_id": [-1], "stream": [True], "exclude_input_in_output": [True]}
prompts = [json.loads(line)["prompt"] for line in open("models/demo/prompts.jsonl", encoding="utf-8")]
print(json.dumps({"data": [{"text_input": [text], **fixed} for text in prompts if len(text) <= 1000]}))
PY
say "starting Triton"
start_server "$work/server.log" "$@"
for concurrency in $CONCURRENCIES; do
  say "$concurrency in flight"
  perf_analyzer -m ensemble -u "127.0.0.1:$GRPC_PORT" -i grpc --async --streaming \
    --input-data "$work/inputs.json" --concurrency-range "$concurrency:$concurrency" \
    --measurement-interval 5000 --max-trials 5 --stability-percentage 25 \
    --profile-export-file "$PERF_ANALYZER/profile-$concurrency.json" -f "$PERF_ANALYZER/profile-$concurrency.csv" |
    grep -E 'hroughput|latency|rror' || die "perf_analyzer failed at concurrency $concurrency"
done

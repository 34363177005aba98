#!/usr/bin/env bash
# From a fresh machine to a streamed answer: environment, engines, a real Triton server, one
# completion of a prompt that the models never saw, with its acceptance figures.
# `--model smollm2` asks a public chat model a question instead, through its chat template.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

MODEL=demo
while [ $# -gt 0 ]; do
  case "$1" in
    --model)
      MODEL="${2:-}"
      shift $(($# > 1 ? 2 : 1))
      ;;
    *) die "unknown option $1; usage: bash scripts/demo.sh [--model demo|smollm2]" ;;
  esac
done
case "$MODEL" in
  demo | smollm2) ;;
  *) die "--model = $MODEL: must be demo or smollm2" ;;
esac

log="$(mktemp -t faser-demo.XXXXXX.log)"
trap 'stop_server; rm -f "$log"' EXIT
trap 'exit 130' INT TERM

# build_smollm2: builds its engine into $engine, unless one there loads. N-grams draft: with 4-bit target weights, a call
# of the head in models/smollm2-head takes more time than it saves. With 16-bit weights it pays
# (`faser build --weights fp16 --draft models/smollm2-head`; its README has the figures).
build_smollm2() {
  engine=build/smollm2
  ensure_smollm2
  "$VENV/bin/python" -c 'import sys; from pathlib import Path; from faser_backend.manifest import EngineManifest as m; m.load(Path(sys.argv[1]))' \
    "$engine" 2>/dev/null && return
  say "building the engine in $engine"
  mkdir -p build
  "$VENV/bin/faser" build --target "$SMOLLM2" --draft ngram --output "$engine"
}

ensure_venv light
if [ "$MODEL" = smollm2 ]; then
  build_smollm2
  say "starting Triton"
  start_server "$log" --engine-dir "$engine"
  ask=(--chat --prompt "What is the capital of France?" --temperature 0 --max-tokens 64)
else
  say "starting Triton (the first start builds the demo pair's engines)"
  start_server "$log"
  ask=()
fi
say "ready after $((SECONDS))s: gRPC on 127.0.0.1:$GRPC_PORT, HTTP on 127.0.0.1:$HTTP_PORT"
"$VENV/bin/python" scripts/demo_client.py --url "http://127.0.0.1:$HTTP_PORT" ${ask[@]+"${ask[@]}"}
say "shutting the server down"
stop_server
say "done in $(awk "BEGIN {printf \"%.1f\", $SECONDS / 60}") minutes"

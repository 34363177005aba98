#!/usr/bin/env bash
# From a fresh machine to a streamed answer: environment, engines, a real Triton server, one
# completion of a prompt that the models never saw, with its acceptance figures.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

log="$(mktemp -t faser-demo.XXXXXX.log)"
trap 'stop_server; rm -f "$log"' EXIT
trap 'exit 130' INT TERM

ensure_venv light
say "starting Triton (the first start builds the demo pair's engines)"
start_server "$log"
say "ready after $((SECONDS))s: gRPC on 127.0.0.1:$GRPC_PORT, HTTP on 127.0.0.1:$HTTP_PORT"
"$VENV/bin/python" scripts/demo_client.py --url "127.0.0.1:$GRPC_PORT"
say "shutting the server down"
stop_server
say "done in $(awk "BEGIN {printf \"%.1f\", $SECONDS / 60}") minutes"

#!/usr/bin/env bash
# NVIDIA's perf_analyzer against a real server: streaming gRPC on `ensemble` at 1, 4 and 16 requests
# in flight. Writes benchmarks/results/perf_analyzer.md. Options go to `faser serve`,
# e.g. `bash scripts/perf_analyzer.sh --policy none`.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
. "$ROOT/scripts/load_tools.sh"
cd "$ROOT"

MAX_TOKENS=${MAX_TOKENS:-100}
CONCURRENCIES=${CONCURRENCIES:-1 4 16}
NAME=${NAME:-perf_analyzer}

ensure_venv light
fetch_perf_analyzer

work="$(mktemp -d -t faser-perf.XXXXXX)"
trap 'stop_server; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

"$VENV/bin/python" -m lab.bench.load_clients inputs "$work" --max-tokens "$MAX_TOKENS"
say "starting Triton"
start_server "$work/server.log" "$@"
for concurrency in $CONCURRENCIES; do
  say "$concurrency in flight"
  perf_analyzer -m ensemble -u "127.0.0.1:$GRPC_PORT" -i grpc --async --streaming \
    --input-data "$work/perf_analyzer.json" --concurrency-range "$concurrency:$concurrency" \
    --measurement-interval 5000 --max-trials 5 --stability-percentage 25 \
    --profile-export-file "$work/profile-$concurrency.json" |
    grep -E 'Throughput|Avg latency|rror' || die "perf_analyzer failed at concurrency $concurrency"
done
stop_server
"$VENV/bin/python" -m lab.bench.load_clients table "$work" --name "$NAME" --max-tokens "$MAX_TOKENS" \
  --command "bash scripts/perf_analyzer.sh${*:+ $*}"

#!/usr/bin/env bash
# Load clients that nobody here wrote, against an unmodified server with the demo pair:
# `bash scripts/load_clients.sh [--quick] [CLIENT ...]`, the first three by default.
#   perf_analyzer  NVIDIA's; streaming gRPC on `ensemble`, a sweep of requests in flight and one of rates
#   aiperf         NVIDIA's; its template endpoint against `generate_stream`
#   sglang         its bench_serving with the backend for TensorRT-LLM, against `generate_stream`
#   sglang_openai  the same against OpenAI's API, its completions
#   guidellm       the same API, texts of its own
# Writes benchmarks/results/load_clients.{md,png}, or load_clients_openai.md where all that run ask OpenAI's API; with
# --quick, for a look at whether they run, into build/load_clients.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
. "$ROOT/scripts/load_tools.sh"
cd "$ROOT"

MAX_TOKENS=${MAX_TOKENS:-64}
TOKENIZER="$ROOT/models/demo/target"
OUTPUT=benchmarks/results
NUM_REQUESTS=80          # per load, as many as there are prompts
CONCURRENCIES="1 4 16"   # of aiperf and sglang
RATE=8                   # requests/s, of aiperf and sglang
CONCURRENCY_SWEEP=1:16:5 # of perf_analyzer: first:last:step
RATE_SWEEP=4:16:4
SECONDS_PER_LOAD=10 # of guidellm
NUM_WINDOWS=3 # perf_analyzer measures the requests in so many windows

title="bash scripts/load_clients.sh${*:+ $*}"
clients=() name=load_clients_openai asks_openai=
for argument in "$@"; do
  case "$argument" in
    --quick)
      OUTPUT=build/load_clients NUM_REQUESTS=24 CONCURRENCIES="1 4" CONCURRENCY_SWEEP=1:4:3 RATE_SWEEP=8:16:8
      SECONDS_PER_LOAD=5
      ;;
    perf_analyzer | aiperf | sglang) clients+=("$argument") name=load_clients ;;
    sglang_openai | guidellm) clients+=("$argument") asks_openai=1 ;;
    *) die "$argument: must be --quick, perf_analyzer, aiperf, sglang, sglang_openai or guidellm" ;;
  esac
done
[ ${#clients[@]} -gt 0 ] || clients=(perf_analyzer aiperf sglang) name=load_clients

# measure LABEL COMMAND...: runs a client, shows what it said if it fails, and notes the first command of its label.
measure() {
  local label="$1" log="$work/client.log"
  shift
  say "$label"
  if [[ " $noted " != *" ${label%% *} "* ]]; then
    noted+=" ${label%% *}"
    printf '%s\n' "$*" | sed "s|$work/||g; s|$ROOT/||g; s|^sglang_|python -m sglang.|" >>"$work/commands.txt"
  fi
  "$@" >"$log" 2>&1 || {
    tail -n 40 "$log" >&2
    die "$label failed; what it said is above"
  }
}

run_perf_analyzer() {
  local sweep range options
  for sweep in concurrency request_rate; do
    range="$CONCURRENCY_SWEEP" options=()
    [ $sweep = concurrency ] || range="$RATE_SWEEP" options=(--request-distribution poisson)
    # As many windows of counted requests as are the least: any measurement is stable enough.
    measure "perf_analyzer-$sweep $range" perf_analyzer -m ensemble -u "127.0.0.1:$GRPC_PORT" -i grpc --async \
      --streaming --input-data "$work/perf_analyzer.json" "--${sweep/_/-}-range" "$range" "${options[@]}" \
      --measurement-mode count_windows --measurement-request-count $((NUM_REQUESTS / NUM_WINDOWS)) \
      --max-trials $NUM_WINDOWS --stability-percentage 999 \
      -f "$work/perf_analyzer-$sweep.csv" --profile-export-file "$work/perf_analyzer-$sweep.json"
  done
}

run_aiperf() {
  local load sweep value options
  for load in $(printf 'concurrency-%s ' $CONCURRENCIES) "request_rate-$RATE"; do
    sweep=${load%-*} value=${load#*-} options=()
    [ "$sweep" = concurrency ] || options=(--arrival-pattern poisson)
    measure "aiperf-$sweep $value" aiperf profile -m ensemble -u "http://127.0.0.1:$HTTP_PORT" \
      --endpoint-type template --custom-endpoint /v2/models/ensemble/generate_stream --streaming \
      --extra-inputs "payload_template:$work/aiperf_template.json" --extra-inputs response_field:text_output \
      --tokenizer "$TOKENIZER" --input-file "$work/aiperf.jsonl" --custom-dataset-type single_turn \
      "--${sweep/_/-}" "$value" "${options[@]}" --request-count "$NUM_REQUESTS" --random-seed 0 \
      --warmup-request-count 4 --no-server-metrics --no-gpu-telemetry --ui none --artifact-dir "$work/aiperf-$load"
  done
}

# bench_sglang CLIENT BACKEND PORT MODEL DATASET OPTION VALUE [OPTION...]: one load.
bench_sglang() {
  local client="$1" backend="$2" port="$3" model="$4"
  shift 4
  measure "$client-$1$2 $3" sglang_bench_serving --backend "$backend" --host 127.0.0.1 --port "$port" \
    --ready-check-timeout-sec 0 --model "$model" --tokenizer "$TOKENIZER" --dataset-name "$@" \
    --num-prompts "$NUM_REQUESTS" --warmup-requests 4 --seed 0 --disable-tqdm \
    --output-file "$work/$client-results.jsonl" --output-details
}

# It asks for answers of fixed length by an end id that no token has. random-ids is text of its own.
run_sglang() {
  local value ours=(--dataset-path "$work/sglang.jsonl" --sharegpt-output-len "$MAX_TOKENS")
  local to=(sglang trt "$HTTP_PORT" "$TOKENIZER")
  for value in $CONCURRENCIES; do bench_sglang "${to[@]}" custom --max-concurrency "$value" "${ours[@]}"; done
  bench_sglang "${to[@]}" custom --request-rate "$RATE" "${ours[@]}"
  bench_sglang "${to[@]}" random-ids --max-concurrency 4 --random-input-len 128 --random-output-len "$MAX_TOKENS" \
    --random-range-ratio 1
}

run_sglang_openai() {
  local value ours=(--dataset-path "$work/sglang.jsonl" --sharegpt-output-len "$MAX_TOKENS")
  local to=(sglang_openai sglang-oai "$OPENAI_PORT" demo)
  for value in $CONCURRENCIES; do bench_sglang "${to[@]}" custom --max-concurrency "$value" "${ours[@]}"; done
  bench_sglang "${to[@]}" custom --request-rate "$RATE" "${ours[@]}"
}

# The demo pair has no chat template, and chats are what it asks for unless told otherwise.
run_guidellm() {
  local value
  for value in $CONCURRENCIES; do
    measure "guidellm-concurrency $value" guidellm run --profile "kind=concurrent,streams=$value" \
      --backend "kind=openai_http,target=http://127.0.0.1:$OPENAI_PORT,model=demo,request_format=/v1/completions" \
      --constraint "kind=max_duration,seconds=$SECONDS_PER_LOAD" --disable-console \
      --data "kind=synthetic_text,prompt_tokens=64,output_tokens=$MAX_TOKENS" \
      --tokenizer "kind=hf_auto,model=$TOKENIZER" --output "kind=json,path=$work/guidellm-$value.json"
  done
}

ensure_venv light
for client in "${clients[@]}"; do "fetch_${client%_openai}"; done

work="$(mktemp -d -t faser-load.XXXXXX)" noted=
trap 'stop_server; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

"$VENV/bin/python" -m lab.bench.load_clients inputs "$work" --max-tokens "$MAX_TOKENS"
say "starting Triton"
door=()
if [ -n "$asks_openai" ]; then
  OPENAI_PORT=$(free_ports 1)
  door=(--openai-port "$OPENAI_PORT" --model-name demo)
fi
start_server "$work/server.log" "${door[@]}"
[ -z "$asks_openai" ] || until grep -q '^ready: ' "$work/server.log"; do sleep 0.3; done
versions=()
for client in "${clients[@]}"; do
  version="${client%_openai}" version="${version^^}_VERSION"
  versions+=("$client ${!version}")
  "run_$client"
done
stop_server
"$VENV/bin/python" -m lab.bench.load_clients table "$work" --output "$OUTPUT" --max-tokens "$MAX_TOKENS" \
  --name "$name" --command "$title" --versions "${versions[@]}"

#!/usr/bin/env bash
# Runs other projects' clients of OpenAI's API against loopback servers, each in its own environment:
# `bash scripts/ecosystem_clients.sh [CLIENT ...]`, all by default. Completions use the demo pair, chats SmolLM2.
# Writes benchmarks/results/ecosystem.md when all have run; fails if one of them failed.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

# client | model | requirements, itself last | program in scripts/ecosystem
# guidellm and lm-eval need a tokenizer in Hugging Face's format, which is beside the demo pair.
CLIENTS=(
  "guidellm|demo|guidellm==0.8.1|guidellm_client.py"
  "lm-eval|demo|transformers==5.24.0 lm-eval[api]==0.4.13|lm_eval_client.py"
  "openai-agents|smollm2|openai-agents==0.24.0|openai_agents_client.py"
  "pydantic-ai|smollm2|pydantic-ai-slim[openai]==2.68.0|pydantic_ai_client.py"
  "instructor|smollm2|instructor==1.17.0|instructor_client.py"
  "litellm|smollm2|litellm==1.110.2|litellm_client.py"
  "langchain-openai|smollm2|langchain-openai==1.7.4|langchain_client.py"
  "llama-index|smollm2|llama-index-llms-openai-like==0.8.1|llama_index_client.py"
)
FOLDER="$ROOT/build/ecosystem"
UV="$FOLDER/uv/bin/uv"

# install CLIENT REQUIREMENT: creates its environment if missing.
install() {
  [ -x "$UV" ] || {
    "$VENV/bin/python" -m venv "$FOLDER/uv"
    "$FOLDER/uv/bin/python" -m pip install -q --disable-pip-version-check uv
  }
  [ "$(cat "$FOLDER/$1/.installed" 2>/dev/null)" = "$2" ] && return
  say "installing $2"
  "$UV" venv -q --clear --python "$VENV/bin/python" "$FOLDER/$1"
  # shellcheck disable=SC2086  # several requirements
  "$UV" pip install -q --python "$FOLDER/$1/bin/python" $2
  printf '%s' "$2" >"$FOLDER/$1/.installed"
}

# serve LOG [OPTION...]: a server with OpenAI's API at OPENAI_BASE_URL.
serve() {
  local port
  port="$(free_ports 1)"
  export OPENAI_BASE_URL="http://127.0.0.1:$port/v1"
  start_server "$1" --openai-port "$port" --model-name served "${@:2}"
  until grep -q '^ready: ' "$1"; do sleep 0.3; done
}

# run_client CLIENT REQUIREMENT PROGRAM: one row of the table.
run_client() {
  local said="$work/said" outcome=ok
  say "$1"
  "$FOLDER/$1/bin/python" "scripts/ecosystem/$3" >"$said" 2>&1 || outcome=failed
  [ "$outcome" = ok ] || tail -n 30 "$said" >&2
  printf '| %s | %s | %s | %s |\n' "$1" "${2##*==}" "$(tail -n 1 "$said" | tr '|' '/' | cut -c1-160)" "$outcome" | tee -a "$work/rows"
}

wanted=" $* "
work="$(mktemp -d -t faser-ecosystem.XXXXXX)"
trap 'stop_server; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
ensure_venv light
ensure_smollm2
export OPENAI_API_KEY=none MODEL=served TOKENIZER="$ROOT/models/demo/target" OPENAI_AGENTS_DISABLE_TRACING=1
export LITELLM_LOCAL_MODEL_COST_MAP=True HF_HUB_OFFLINE=1
mkdir -p "$FOLDER"

serve_demo() { serve "$work/demo.log"; }

serve_smollm2() {
  "$VENV/bin/faser" build --target "$SMOLLM2" --draft ngram --output "$work/smollm2" >"$work/build.log" 2>&1
  serve "$work/smollm2.log" --engine-dir "$work/smollm2" --draft ngram
}

for model in demo smollm2; do
  SERVER_PID=
  for row in "${CLIENTS[@]}"; do
    IFS='|' read -r client asks requirement program <<<"$row"
    [ "$asks" = "$model" ] && [[ "$wanted" == "  " || "$wanted" == *" $client "* ]] || continue
    install "$client" "$requirement"
    [ -n "$SERVER_PID" ] || {
      say "starting a server with $model"
      "serve_$model"
    }
    run_client "$client" "$requirement" "$program"
  done
  stop_server
done

[ "$wanted" = "  " ] && cat - "$work/rows" >benchmarks/results/ecosystem.md <<EOF
# Clients of OpenAI's API

Written by \`bash scripts/ecosystem_clients.sh\`. Programs of at most 40 lines (\`scripts/ecosystem\`) use each client as its
own documentation does and check what they get; guidellm and lm-eval ask the demo pair, the others SmolLM2-135M-Instruct.

| client | version | what it did | outcome |
|---|---|---|---|
EOF
! grep -q '| failed |$' "$work/rows"

#!/usr/bin/env bash
# Runs all checks: installs what tests need, lints, type-checks, runs every test.
# CI calls exactly this. Arguments go to pytest, e.g. `bash scripts/test.sh -k sampler`.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

ensure_venv dev
say "pyright, beside all that follows"
"$VENV/bin/pyright" --pythonpath "$VENV/bin/python" &
(ensure_smollm2) || say "SmolLM2 could not be fetched: its tests are skipped"

say "ruff"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
# Three workers for two cores, with one thread each: tests of servers mostly wait, and numeric libraries that use every
# core slow each other down. A file stays with one worker, so that its servers start once. Bytecode is kept, because
# hundreds of processes start.
export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
"$VENV/bin/python" -m pytest -n 3 --dist loadfile "$@"
wait $! || die "pyright found errors, which stand above"

#!/usr/bin/env bash
# Runs all checks: installs what tests need, lints, type-checks, runs every test.
# CI calls exactly this. Arguments go to pytest, e.g. `bash scripts/test.sh -k sampler`.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

ensure_venv dev
(ensure_smollm2) || say "SmolLM2 could not be fetched: its tests are skipped"

say "ruff"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
say "pyright"
"$VENV/bin/pyright" --pythonpath "$VENV/bin/python"
say "pytest"
# Two workers with one thread each: servers mostly wait for models, and numeric libraries that use every core slow each
# other down. A file stays with one worker, so that its servers start once.
export OMP_NUM_THREADS=1
exec "$VENV/bin/python" -m pytest -n 2 --dist loadfile "$@"

#!/usr/bin/env bash
# Everything that must hold: installs what tests need, lints, type-checks, runs every test.
# CI calls exactly this. Arguments go to pytest, e.g. `bash scripts/test.sh -k sampler`.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

ensure_venv dev

say "ruff"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
say "pyright"
"$VENV/bin/pyright" --pythonpath "$VENV/bin/python"
say "pytest"
exec "$VENV/bin/python" -m pytest "$@"

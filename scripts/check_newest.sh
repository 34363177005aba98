#!/usr/bin/env bash
# Installs the newest versions that the dependencies' bounds allow into build/newest, prints them, and runs a selection
# of the tests with them. Downloads almost a gigabyte, so it needs a CI job of its own.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
unset PYTHONPATH

TESTS=(cli/test_cli cli/test_cli_chat api/test_llm test_examples cpu/test_runner text/test_structured_output
  text/test_chat text/test_answer_stream engines/test_gguf_tokenizer test_files)

VENV="$ROOT/build/newest"
rm -rf "$VENV"
create_venv
install() { "$VENV/bin/python" -m pip install -q --disable-pip-version-check "$@"; }
say "installing the newest versions"
install "torch==2.13.0" # any build serves the tests: the CPU build if there is one, see ensure_venv
install --upgrade --upgrade-strategy eager -e "$ROOT[test]"
check_server_libraries
"$VENV/bin/python" - <<'PY'
import re
from importlib.metadata import requires, version

for requirement in requires("faser-backend") or []:
    if "extra ==" not in requirement or 'extra == "test"' in requirement:
        wanted = requirement.partition(";")[0].strip()
        name = re.match(r"[\w.-]+", wanted)[0]
        print(f"{version(name):>12}  {wanted}")
PY
export OMP_NUM_THREADS=1
TESTS=("${TESTS[@]/#/tests/}")
exec "$VENV/bin/python" -m pytest "${TESTS[@]/%/.py}"

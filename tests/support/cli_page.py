"""docs/cli.md, typer's reference of the `faser` command: `python -m tests.support.cli_page` writes it."""

from __future__ import annotations

import html
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
COMMAND = ["faser_backend.cli.main", "utils", "docs", "--name", "faser", "--title", "The faser command"]


def cli_page() -> str:
    done = subprocess.run([sys.executable, "-m", "typer", *COMMAND], capture_output=True, text=True, check=True)
    return html.unescape(done.stdout).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(cli_page())

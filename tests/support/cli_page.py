"""docs/cli.md, typer's reference of the `faser` command: `python -m tests.support.cli_page` writes it."""

import html
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
COMMAND = ["faser_backend.cli.main", "utils", "docs", "--name", "faser", "--title", "The faser command"]


def cli_page() -> str:
    done = subprocess.run([sys.executable, "-m", "typer", *COMMAND], capture_output=True, text=True, check=True)
    usage_and_help = (
        r"\*\*Usage\*\*:\n\n```console\n\$ faser [\w-]+ \[OPTIONS\](?: \[<MODEL>\])?\n```\n\n|\* `--help`.*\n"
    )
    return re.sub(usage_and_help, "", html.unescape(done.stdout)).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(cli_page())

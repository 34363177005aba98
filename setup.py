"""Build steps that pyproject.toml cannot express: folders at the root that a wheel carries inside the package.

They stay where documents and scripts name them; `faser_backend/places.py` finds them in either place.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
FOLDERS = ("model_repo", "model_repo_llmapi", "models/demo")


class BuildWithData(build_py):
    """Copies FOLDERS to faser_backend/_data of what is built; an editable install finds them at the root."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        data = Path(self.build_lib) / "faser_backend" / "_data"
        shutil.rmtree(data, ignore_errors=True)  # of an earlier build
        for folder in FOLDERS:
            shutil.copytree(ROOT / folder, data / folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))


setup(cmdclass={"build_py": BuildWithData})

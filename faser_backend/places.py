"""Paths of the project's data files: in a checkout at its root, in an installed wheel inside the package.

`setup.py` copies the folders of FOLDERS into the wheel.
"""

from __future__ import annotations

from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[1]  # the folder that faser_backend is imported from
INSTALLED = Path(__file__).resolve().with_name("_data")


def data_folder() -> Path:
    """The folder that holds model_repo, model_repo_llmapi and models/demo."""
    return INSTALLED if INSTALLED.is_dir() else PACKAGES


MODEL_REPO = data_folder() / "model_repo"
MODEL_REPO_LLMAPI = data_folder() / "model_repo_llmapi"
GPU_DEVICE = Path("/dev/nvidiactl")  # of NVIDIA's driver
DEMO_PAIR = data_folder() / "models" / "demo"

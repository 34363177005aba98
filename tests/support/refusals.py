"""Builds that are refused, and edits of the files that they read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faser_backend.engines.build import build_engines
from faser_backend.engines.checkpoint import CheckpointError


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def refuses_build(target: Path, draft: Path, *words: str, **options: Any) -> None:
    """Asserts that a build fails with one line that has these words, and writes nothing beside the draft."""
    before = {*draft.parent.iterdir()}
    with pytest.raises(CheckpointError) as caught:
        build_engines(target, draft, draft.parent / "out", **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000
    assert [word for word in words if word not in message] == [], message
    assert {*draft.parent.iterdir()} == before

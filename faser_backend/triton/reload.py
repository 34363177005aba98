"""`faser reload`: replaces the engine directory of a running server.

Triton loads model `tensorrt_llm` a second time. New requests go to the new engine once it is ready, and the old engine
closes after its last answer. Until then both are in memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ConfigError
from faser_backend.manifest import read_manifest_fields
from faser_backend.serving.parameters import given_parameters
from faser_backend.triton.admin import Administration
from faser_backend.triton.launch import check_engine
from faser_backend.triton.server import ENGINE_MODEL

DIRECTORY_KEY, LOAD_KEY = "gpt_model_path", "loaded_at"


def reload_engine(admin: Administration, engine_dir: Path, timeout_s: float, lora: Sequence[str] | None = None) -> Path:
    """Loads this directory into the server, with other options unchanged. Returns the directory that it replaces.

    lora: adapters instead of those that are loaded; None: the same.
    Raises ManifestError or ConfigError if the directory does not fit, and AdminError if the server refuses it. After
    an error the old engine keeps serving.
    """
    config = admin.config(ENGINE_MODEL)
    parameters = given_parameters(config)
    served = parameters.get(DIRECTORY_KEY)
    if served is None:
        raise ConfigError(f"model {ENGINE_MODEL} has no {DIRECTORY_KEY}: its configuration names no directory")
    new = check_engine(engine_dir, EngineConfig.from_parameters(parameters), None)
    # The OpenAI server and clients keep sending the old ids, so another vocabulary needs another server.
    old_hash, new_hash = (str(read_manifest_fields(each).get("vocab_hash"))[:12] for each in (Path(served), new))
    if old_hash != new_hash:
        limit = f"vocabulary {new_hash} differs from the running engine's, {old_hash}; start another server for it"
        raise ConfigError(f"--engine-dir = {new}: {limit}")
    config["parameters"][DIRECTORY_KEY] = {"string_value": str(new.resolve())}
    if lora is not None:
        config["parameters"]["lora"] = {"string_value": "\n".join(lora)}
    config["parameters"][LOAD_KEY] = {"string_value": str(time.time_ns())}  # Triton ignores an unchanged configuration
    admin.load(ENGINE_MODEL, config, timeout_s)
    return Path(served)

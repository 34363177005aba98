"""Formats of matrices, keys and values: given ones, defaults, and their report by a build."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from faser_backend.core.errors import ManifestError
from faser_backend.cpu.kernels import attention
from faser_backend.engines.build import build_engines
from faser_backend.engines.checkpoint import CheckpointError
from faser_backend.manifest import MANIFEST_FILE, EngineManifest
from tests.support.tiny_models import write_checkpoint


def round_matrices(source: Path, dtype: torch.dtype) -> None:
    """Rounds all matrices except routers as a format does, in place."""
    path = source / "model.safetensors"
    tensors = load_file(path)
    is_stored = {name: tensor.ndim == 2 and not name.endswith("mlp.gate.weight") for name, tensor in tensors.items()}
    rounded = {name: t.to(dtype).float() if is_stored[name] else t for name, t in tensors.items()}
    assert any(not torch.equal(rounded[name], tensors[name]) for name in tensors)
    save_file(rounded, path, metadata={"format": "pt"})


HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize(
    ("dtypes", "asked", "chosen"),
    [
        (HALVES, None, "fp16"),
        (HALVES[1:] * 2, None, "fp16"),
        ((torch.float32, torch.float16), None, "fp32"),
        ((torch.bfloat16, torch.float32), None, "fp32"),
        (HALVES, "fp32", "fp32"),
        ((torch.float32, torch.float32), "fp16", "fp16"),
    ],
)
def test_keys_and_values_are_as_precise_as_both_checkpoints_unless_one_asks(tmp_path, dtypes, asked, chosen):
    pair = [write_checkpoint(tmp_path / name, dtype=dtype) for name, dtype in zip("td", dtypes, strict=True)]
    manifest = build_engines(*pair, tmp_path / "engine", kv_cache_dtype=asked)
    assert manifest.kv_cache_dtype == chosen
    assert EngineManifest.load(tmp_path / "engine") == manifest


def test_a_target_alone_decides_for_itself_and_other_runtimes_by_their_dtype(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source", dtype=torch.bfloat16)
    assert build_engines(source, None, tmp_path / "alone").kv_cache_dtype == "fp16"
    with monkeypatch.context() as patched:
        patched.setattr(attention, "has_halves", lambda: False)
        assert build_engines(source, None, tmp_path / "slow").kv_cache_dtype == "fp32", "what this CPU can serve"
    for dtype in ("fp32", "bf16"):
        built = build_engines(source, source, tmp_path / dtype, runtime="torch", dtype=dtype)
        assert built.kv_cache_dtype == dtype


def test_the_command_says_what_keys_and_values_are_kept_in(run, tmp_path):
    """The command reports it only if it differs from the dtype of the arithmetic."""
    source = write_checkpoint(tmp_path / "source", dtype=torch.float16)
    command = ("build", "--target", source, "--draft", source, "--output", tmp_path / "engine")
    status, said, _ = run(*command)
    assert (
        status == 0 and "fp32, products bf16, KV cache fp16, target weights fp16, draft weights int8, context" in said
    )
    status, said, _ = run(*command, "--kv-cache-dtype", "fp32")
    assert status == 0 and "KV cache" not in said


def test_formats_that_cannot_be_are_refused(tmp_path):
    source = write_checkpoint(tmp_path / "source")

    def refusal(draft: Path | None = source, **options: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            build_engines(source, draft, tmp_path / "engine", **options)
        assert not (tmp_path / "engine").exists()
        return str(caught.value)

    assert refusal(weights="q4") == "weights of target = 'q4': must be one of fp32, fp16, bf16, int8, int4"
    assert "weights of draft = 'int8': only for runtimes of a CPU" in refusal(draft_weights="int8", runtime="torch")
    assert "weights of draft = 'fp16': there is no draft model" in refusal(None, draft_weights="fp16")
    assert refusal(kv_cache_dtype="bf16") == "kv_cache_dtype = 'bf16': on 'llvm' must be one of fp32, fp16"
    assert refusal(runtime="torch", dtype="bf16", kv_cache_dtype="fp16") == (
        "kv_cache_dtype = 'fp16': on 'torch' must be one of bf16"
    )
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"][3, 4] = 70000.0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert "lm_head: weights are not finite, or too large for fp16" in refusal(weights="fp16")


def test_a_manifest_with_an_unknown_format_is_malformed(tmp_path):
    build_engines(write_checkpoint(tmp_path / "source"), None, tmp_path / "engine")
    path = tmp_path / "engine" / MANIFEST_FILE
    path.write_text(path.read_text().replace('"name": "fp32"', '"name": "fp31"', 1))
    with pytest.raises(ManifestError, match="weight_format = 'fp31': must be one of"):
        EngineManifest.load(tmp_path / "engine")

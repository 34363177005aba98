"""The export stage: the trained pair in Hugging Face layout, checked against `transformers`, and its card."""

import json
import platform
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from .card import write_card
from .corpus import END_OF_TEXT, END_OF_TEXT_ID, VOCAB_SIZE, check_lossless
from .model import DRAFT_SHAPE, HEAD_DIM, NORM_EPS, ROPE_THETA, TARGET_SHAPE, Llama, ModelShape
from .training import load_model

MAX_LEN = 1024
MAX_TOTAL_BYTES = 30_000_000


def model_config(shape: ModelShape) -> dict:
    """config.json of a Llama; the rotary base in the way of transformers 5 and in that of older readers."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": END_OF_TEXT_ID,
        "dtype": "float16",
        "eos_token_id": END_OF_TEXT_ID,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.mlp_size,
        "max_position_embeddings": MAX_LEN,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_heads,
        "pad_token_id": None,
        "pretraining_tp": 1,
        "rms_norm_eps": NORM_EPS,
        "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
    }


def tokenizer_config() -> dict:
    """tokenizer_config.json, for AutoTokenizer: prompts begin with no token, and no token is padding."""
    return {
        "add_bos_token": False,
        "bos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "model_max_length": MAX_LEN,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def export_model(model: Llama, tokenizer_json: str, folder: Path) -> None:
    """Configs of model, generation and tokenizer, tokenizer.json, model.safetensors (fp16, tied head left out)."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", model_config(model.shape))
    ends = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID}
    write_json(folder / "generation_config.json", ends)
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    (folder / "tokenizer.json").write_text(tokenizer_json)
    weights = {n: p.detach().half().contiguous() for n, p in model.named_parameters()}
    assert all(bool(w.isfinite().all()) for w in weights.values())
    path = folder / "model.safetensors"
    save_file(weights, str(path), metadata={"format": "pt"})
    path.chmod(0o644)


@torch.no_grad()
def check_with_transformers(model: Llama, folder: Path, windows: np.ndarray) -> float:
    """Largest difference of the logits of `transformers` from ours on `windows` `[rows, len]`; fails above 0.02."""
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for p in model.parameters():
        p.copy_(p.half().float())
    ids = torch.from_numpy(windows.astype(np.int64))
    difference = float((theirs(ids).logits - model(ids)).abs().max())
    assert difference < 0.02, f"transformers disagrees by {difference}"
    return difference


def export(build_dir: Path, models_dir: Path, run: dict) -> None:
    """Writes `models_dir`/{target,draft}, prompts.jsonl, metrics.json and README.md.

    `run` are the plans (steps, learning rates, ...) that the stages were called with.
    """
    tokenizer_json = (build_dir / "tokenizer.json").read_text()
    held_out = np.load(build_dir / "held_out.npy")
    differences = {}
    for name, weights, shape in (("target", "target", TARGET_SHAPE), ("draft", "draft_refined", DRAFT_SHAPE)):
        model = load_model(shape, build_dir / f"{weights}.safetensors")
        export_model(model, tokenizer_json, models_dir / name)
        windows = held_out[: 2 * MAX_LEN].reshape(2, MAX_LEN)
        differences[name] = check_with_transformers(model, models_dir / name, windows)
    (models_dir / "prompts.jsonl").write_text((build_dir / "prompts.jsonl").read_text())
    prompts = [json.loads(line) for line in (models_dir / "prompts.jsonl").read_text().splitlines()]
    check_lossless(Tokenizer.from_file(str(models_dir / "target" / "tokenizer.json")), [p["prompt"] for p in prompts])
    metrics = {
        "corpus": json.loads((build_dir / "corpus.json").read_text()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "run": run,
        "training": {
            name: training_summary(build_dir, name) for name in ("target", "draft_warm", "draft", "draft_refined")
        },
        "samples": {"num_rows": len(np.load(build_dir / "samples.npy", mmap_mode="r"))},
        "figures": json.loads((build_dir / "figures.json").read_text()),
        "num_prompts": len(prompts),
        "largest_logit_difference_from_transformers": differences,
        "num_bytes": {p.parent.name: p.stat().st_size for p in sorted(models_dir.glob("*/model.safetensors"))},
    }
    write_json(models_dir / "metrics.json", metrics)
    write_card(models_dir / "README.md", metrics)
    total = sum(p.stat().st_size for p in models_dir.rglob("*") if p.is_file())
    assert total <= MAX_TOTAL_BYTES, f"{total} bytes are more than {MAX_TOTAL_BYTES}"
    print(f"exported {total / 1e6:.1f} MB to {models_dir.name}; logits differ by {differences}", flush=True)


def training_summary(build_dir: Path, name: str) -> dict:
    """Steps, minutes and last figures of a stage, from its log."""
    summary: dict = {}
    for line in (build_dir / f"{name}_log.jsonl").read_text().splitlines():
        summary |= json.loads(line)
    summary.pop("held_out_loss", None)  # a quick look at a few windows; the figures say it of all
    summary["minutes"] = round(summary.pop("seconds") / 60, 1)
    return summary

"""A tiny random pair with a byte-level tokenizer; answers are gibberish with many multi-byte characters.

The draft equals the target, so nearly every drafted token is accepted and answers arrive in bursts.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from faser_backend.engines.build import build_engines
from faser_backend.manifest import EngineManifest, FileSpec
from tests.support.chat_templates import CHATML
from tests.support.tiny_models import write_checkpoint

CORPUS = ["def f(x):\n    return x + 1\n", "Größe - naïve café 東京 🙂👍🏽", "the quick brown fox"] * 4
END_ID = 0
MAX_CONTEXT = 2048


def byte_level_tokenizer() -> Tokenizer:
    """Returns a tokenizer of 256 bytes, a special end token (id 0), some merges and one added word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool 🙂>"])
    return tokenizer


def write_pair(directory: Path, max_context: int = MAX_CONTEXT, *, seed: int = 0, num_layers: int = 3) -> Path:
    """Writes directory/{target,draft} in Hugging Face's format."""
    tokenizer = byte_level_tokenizer()
    for name in ("target", "draft"):
        write_checkpoint(
            directory / name,
            seed=seed,
            vocab_size=tokenizer.get_vocab_size(),
            max_position_embeddings=max_context,
            eos_token_id=END_ID,
            num_hidden_layers=num_layers,
        )
        tokenizer.save(str(directory / name / "tokenizer.json"))
    tokenizer_config = {"eos_token": "<|end|>", "chat_template": CHATML}
    (directory / "target" / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return directory


def build_pair(directory: Path, max_context: int = MAX_CONTEXT, *, seed: int = 0, runtime: str = "llvm") -> Path:
    """Builds the engine directory of a new pair with the common tokenizer."""
    pair = write_pair(directory / "pair", max_context, seed=seed)
    build_engines(pair / "target", pair / "draft", directory / "engine", runtime=runtime)
    return directory / "engine"


def copy_without_template(engine_dir: Path, directory: Path) -> Path:
    """Copies the engine directory as if its checkpoint had no template."""
    shutil.copytree(engine_dir, directory)
    path = directory / "prompts.json"
    path.write_text(json.dumps({"chat_template": None, "special_tokens": {}, "adds_begin_token": None}))
    replace(EngineManifest.load(engine_dir), prompts=FileSpec.of(path)).save(directory)
    return directory

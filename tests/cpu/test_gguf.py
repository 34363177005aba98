"""GGUF files on runtime llvm: quantised weights are stored number by number, others as chosen."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file
from transformers import PreTrainedModel

from faser_backend.cli.build import summary
from faser_backend.core.model import WeightFormat
from faser_backend.engines.build import build_engines
from faser_backend.engines.checkpoint import CheckpointError
from faser_backend.engines.gguf_checkpoint import GGUFCheckpoint, GGUFFile
from faser_backend.engines.weights_build import format_of, groups_of, smallest_format
from faser_backend.manifest import EngineManifest, ModelEngine
from tests.cpu.test_runner import BLOCK_SIZE, open_runner
from tests.engines.test_families import MAX_ERROR
from tests.engines.test_gguf_checkpoint import K_QUANTISED, QUANTISED, linear
from tests.support.cpu_products import assert_computed_alike, restore_matrix
from tests.support.gathered_runner import GatheredRunner
from tests.support.gguf_models import add_vocabulary, write_gguf
from tests.support.tiny_models import VOCAB_SIZE, make_rows, random_model, run_all, write_model

TIED = {"tie_word_embeddings": True}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
NAMES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "attention_out": "self_attn.o_proj"}
NAMES |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
OUTSIDE = {"embedding": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}


def write(path: Path, kind: str, others: dict[str, str], variant: str = "linear_rope", **changes) -> PreTrainedModel:
    """Writes a file of 2 layers and returns its model."""
    sizes = K_QUANTISED if "K" in kind + "".join(others.values()) else QUANTISED
    model = random_model(variant, **{**sizes, "num_hidden_layers": 2, **changes})
    edit = linear if variant == "linear_rope" else lambda writer: None
    return write_gguf(model, path, kind=Type[kind], others={k: Type[v] for k, v in others.items()}, edit=edit)


def build(file: Path, directory: Path, **options) -> EngineManifest:
    manifest = build_engines(file, None, directory, kv_block_size=BLOCK_SIZE, kv_cache_dtype="fp32", **options)
    assert EngineManifest.load(directory) == manifest
    return manifest


def restored(model: ModelEngine, directory: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Returns an engine's matrices by Hugging Face name, [num_outputs, num_inputs] float32, as products see them."""
    assert model.weights is not None
    found = {}
    for name, stored in load_file(directory / model.weights.name).items():
        layer, _, part = name.rpartition(".")
        ours = OUTSIDE.get(name) or (f"model.{layer}.{NAMES[part]}.weight" if part in NAMES else None)
        if ours is not None:
            num_outputs, num_inputs = shapes[ours]
            own_format = format_of(name, model.weight_format)
            found[ours] = restore_matrix(stored, num_inputs, num_outputs, own_format).T
    return found


def expected(reference: PreTrainedModel) -> dict[str, np.ndarray]:
    """Returns every matrix of the file by name; a tied head has none."""
    weights = {name: tensor.numpy() for name, tensor in reference.state_dict().items() if tensor.ndim == 2}
    if reference.config.tie_word_embeddings:
        weights.pop("lm_head.weight")
    return weights


def stored_weights(manifest: EngineManifest, directory: Path, reference: PreTrainedModel) -> dict[str, np.ndarray]:
    weights = expected(reference)
    found = restored(manifest.target, directory, {name: array.shape for name, array in weights.items()})
    assert found.keys() == weights.keys()
    return found


EXACT: dict[str, tuple[str, dict[str, str], dict, tuple[str, ...]]] = {
    "Q8_0": ("Q8_0", {}, {}, ("int8",) * 3),
    "Q4_0": ("Q4_0", {}, {}, ("int4",) * 3),
    "Q4_1": ("Q4_1", {}, {}, ("int4",) * 3),
    "Q4_1_with_Q8_0_ends": ("Q4_1", {EMBEDDING: "Q8_0", HEAD: "Q8_0"}, {}, ("int4", "int8", "int8")),
    "Q4_1_with_F32_embedding_tied": ("Q4_1", {EMBEDDING: "F32"}, TIED, ("int4", "fp32", "fp32")),
    "Q8_0_with_F32_ends": ("Q8_0", {EMBEDDING: "F32", HEAD: "F32"}, {}, ("int8", "fp32", "fp32")),
    "Q8_0_with_F16_head": ("Q8_0", {HEAD: "F16"}, {}, ("int8", "int8", "fp16")),
    "Q4_0_and_Q4_1": ("Q4_0", {"blk.1.ffn_down.weight": "Q4_1", "blk.0.attn_v.weight": "Q4_1"}, {}, ("int4",) * 3),
    "Q4_0_and_Q8_0": ("Q4_0", {"blk.0.attn_k.weight": "Q8_0"}, {}, ("int8", "int4", "int4")),
    "F32_and_Q8_0": ("Q8_0", {"blk.0.attn_k.weight": "F32"}, {}, ("fp32", "int8", "int8")),
    "F16": ("F16", {}, TIED, ("fp16",) * 3),
    "BF16": ("BF16", {}, {}, ("bf16",) * 3),
    "F32": ("F32", {}, {}, ("fp32",) * 3),
    "qwen2": ("Q4_0", {EMBEDDING: "Q8_0"}, {"variant": "qwen2"}, ("int4", "int8", "int4")),
    "qwen3": ("Q4_1", {}, {"variant": "qwen3"}, ("int4",) * 3),
}


@pytest.mark.parametrize("name", EXACT)
def test_engines_compute_with_the_weights_of_the_file(name: str, tmp_path: Path) -> None:
    """Equals dequantised weights bit for bit, except the sign of zeros: float32 holds number * scale exactly, and for
    Q4_1 both round the sum with the minimum once."""
    kind, others, changes, formats = EXACT[name]
    file, directory = tmp_path / "model.gguf", tmp_path / "engine"
    reference = write(file, kind, others, **changes)
    manifest = build(file, directory)
    assert manifest.target.weight_format.formats == formats and manifest.target.weight_format.rounded == ""
    found = stored_weights(manifest, directory, reference)
    for matrix, weight in expected(reference).items():
        np.testing.assert_array_equal(found[matrix], weight, err_msg=matrix)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1_with_F32_embedding_tied", "Q8_0_with_F32_ends"])
def test_logits_are_those_of_the_weights_in_float32(name: str, tmp_path: Path) -> None:
    """Merely close: products sum integers before they are scaled."""
    kind, others, changes, _ = EXACT[name]
    file, directory = tmp_path / "model.gguf", tmp_path / "engine"
    write(file, kind, others, **changes)
    build(file, directory, compute="bf16x2")
    reference = GatheredRunner(file, tmp_path, block_size=BLOCK_SIZE)
    rows = make_rows([np.random.default_rng(1).integers(0, VOCAB_SIZE, 20)], [0], [20], np.arange(5)[None])
    assert_computed_alike(run_all(open_runner(directory), rows), run_all(reference, rows), error=MAX_ERROR)


def test_exit_scores_are_of_the_heads_format(tmp_path: Path) -> None:
    """Scores of a head in another format than the layers' are close to ONNX Runtime's from float32."""
    file = tmp_path / "model.gguf"
    write(file, "Q8_0", {EMBEDDING: "F32", HEAD: "F32"})
    options = {"exit_layers": (1,), "kv_cache_dtype": "fp32", "compute": "bf16x2"}
    build_engines(file, file, tmp_path / "llvm", kv_block_size=BLOCK_SIZE, **options)
    runners = (open_runner(tmp_path / "llvm"), GatheredRunner(file, tmp_path, exit_layers=(1,), block_size=BLOCK_SIZE))
    candidates = np.random.default_rng(2).integers(0, VOCAB_SIZE, (9, 4))
    rows = make_rows([np.arange(9)], [0], [9], np.array([[5, 7, 2]]))
    scores = [runner.run_segment_with_scores(0, rows, None, candidates)[1] for runner in runners]
    np.testing.assert_allclose(scores[0], scores[1], rtol=0, atol=MAX_ERROR)


@pytest.mark.parametrize(
    ("kinds", "chosen"),
    [
        (("Q8_0",), "int8"),
        (("Q4_0", "Q4_1"), "int4"),
        (("Q4_0", "Q8_0"), "int8"),
        (("Q4_1", "Q8_0"), "fp16"),  # no integers hold both
        (("Q4_1", "Q6_K"), "fp16"),
        (("Q4_K", "Q6_K", "Q5_0"), "fp16"),
        (("Q8_0", "F16"), "fp16"),
        (("F16",), "fp16"),
        (("BF16",), "bf16"),
        (("F16", "BF16"), "fp32"),
        (("Q8_0", "BF16"), "fp32"),
        (("F32",), "fp32"),
        (("Q8_0", "F32"), "fp32"),
    ],
)
def test_without_a_wish_the_smallest_format_that_holds_the_file_is_taken(kinds: tuple[str, ...], chosen: str) -> None:
    assert smallest_format(kinds) == chosen
    assert smallest_format(kinds, is_draft=True) == (chosen if chosen == "int4" or "F32" in kinds else "int8")


@pytest.mark.parametrize(
    ("kind", "others", "formats", "said"),
    [
        ("Q6_K", {}, ("fp16",) * 3, "16 of Q6_K (embedding, layers.0.q, layers.0.k, ...)"),
        ("Q5_1", {EMBEDDING: "Q8_0"}, ("fp16", "int8", "fp16"), "Q5_1"),
        ("Q4_1", {"blk.0.ffn_down.weight": "Q6_K"}, ("fp16", "int4", "int4"), "1 of Q6_K (layers.0.down)"),
        ("Q4_0", {HEAD: "Q6_K"}, ("int4", "int4", "fp16"), "1 of Q6_K (lm_head)"),
    ],
)
def test_what_no_format_holds_is_rounded_to_halves_and_reported(kind, others, formats, said, tmp_path: Path) -> None:
    reference = write(tmp_path / "model.gguf", kind, others)
    manifest = build(tmp_path / "model.gguf", tmp_path / "engine")
    stored = manifest.target.weight_format
    assert stored.formats == formats and said in stored.rounded
    assert f"rounded again: {stored.rounded}" in summary(tmp_path / "engine", manifest)
    found = stored_weights(manifest, tmp_path / "engine", reference)
    for name, weight in expected(reference).items():
        wanted = weight.astype(np.float16).astype(np.float32)
        assert np.array_equal(found[name], wanted) or np.array_equal(found[name], weight), name


def test_what_is_asked_for_is_stored_and_exact_where_it_can_be(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    reference = write(file, "Q4_0", {EMBEDDING: "Q8_0", "blk.0.attn_k.weight": "Q4_1"})
    inexact = {"fp32": set(), "int8": {"model.layers.0.self_attn.k_proj.weight"}, "int4": {OUTSIDE["embedding"]}}
    for weights, wanted in inexact.items():
        manifest = build(file, tmp_path / weights, runtime="llvm", weights=weights)
        assert manifest.target.weight_format.formats == (weights,) * 3
        assert len(manifest.target.weight_format.rounded) > 0 or not wanted
        found = stored_weights(manifest, tmp_path / weights, reference)
        differ = {name for name, weight in expected(reference).items() if not np.array_equal(found[name], weight)}
        assert differ == wanted


def test_rows_that_pad_a_vocabulary_are_cut_from_blocks_too(tmp_path: Path) -> None:
    texts = ["a", "b", "ab", *(f"token{i}" for i in range(3, 90)), *(f"[PAD{i}]" for i in range(90, VOCAB_SIZE))]
    types = [1] * 90 + [5] * (VOCAB_SIZE - 90)

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        add_vocabulary(writer, texts, types=types, merges=["a b"])

    file = tmp_path / "model.gguf"
    model = write_gguf(random_model("qwen2", **QUANTISED), file, kind=Type.Q8_0, vocabulary=vocabulary)
    manifest = build(tmp_path / "model.gguf", tmp_path / "engine")
    assert (manifest.target.spec.vocab_size, manifest.target.spec.padded_vocab_size) == (90, VOCAB_SIZE)
    weights = expected(model)
    shapes = {name: (90, 64) if name in OUTSIDE.values() else array.shape for name, array in weights.items()}
    found = restored(manifest.target, tmp_path / "engine", shapes)
    for name in OUTSIDE.values():
        np.testing.assert_array_equal(found[name], weights[name][:90])


def with_scale(file: Path, tensor: str, value: float) -> None:
    """Changes the first scale of a tensor."""
    first = GGUFFile(file).tensors[tensor].first_byte
    content = bytearray(file.read_bytes())
    content[first : first + 2] = np.float16(value).tobytes()
    file.write_bytes(content)


def test_scales_that_a_format_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    reference = write(file, "Q4_0", {})
    with_scale(file, "blk.1.ffn_up.weight", 9000.0)  # -8 times that is no half
    with pytest.raises(CheckpointError, match=rf"{file}: layers\.1\.up: weights .* too large for int4"):
        build(file, tmp_path / "engine")
    manifest = build(file, tmp_path / "engine", runtime="llvm", weights="int8")
    found = stored_weights(manifest, tmp_path / "engine", reference)["model.layers.1.mlp.up_proj.weight"]
    np.testing.assert_array_equal(found, GGUFCheckpoint(file).read("model.layers.1.mlp.up_proj.weight"))
    for value in (np.inf, np.nan):
        with_scale(file, "blk.1.ffn_up.weight", value)
        with pytest.raises(CheckpointError, match=rf"{file}: layers\.1\.up: weights are not finite"):
            build(file, tmp_path / "other", runtime="llvm", weights="int8")
    assert not (tmp_path / "other").exists()


def test_the_largest_scales_and_the_smallest_are_exact() -> None:
    scales = np.array([8188.0, -8188.0, 6e-8, -6e-8, 0.0, 1.0], np.float16)
    blocks = np.random.default_rng(0).integers(0, 256, (6, 18), np.uint8)
    blocks[:, :2] = scales.view(np.uint8).reshape(6, 2)
    numbers, found, minimums = groups_of(blocks, "Q4_0", "int4")
    assert minimums is not None and np.array_equal(found[0], scales)
    weights = numbers.astype(np.float32) * scales.astype(np.float32) + minimums.astype(np.float32)
    np.testing.assert_array_equal(weights.T, gguf.quants.dequantize(blocks, Type.Q4_0))


def test_a_half_checkpoint_keeps_ends_that_are_float32(tmp_path: Path) -> None:
    model = random_model("qwen2")
    model.bfloat16().get_input_embeddings().float()
    target = build(write_model(model, tmp_path / "source"), tmp_path / "engine").target
    assert target.weight_format.formats == ("bf16", "fp32", "bf16")
    assert target.weight_format.title == "bf16 (embedding fp32, head bf16)"


def test_unknown_formats_of_ends_are_refused() -> None:
    with pytest.raises(ValueError, match="weight_format = 'int5': must be one of fp32, "):
        WeightFormat("int4", embedding="int5")

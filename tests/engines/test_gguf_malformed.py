"""GGUF files that are refused: each gets an error of one line that names the file, and the field where one is wrong."""

import gc
import struct
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Kind
from transformers import PreTrainedModel

from faser_backend.core.errors import FaserError
from faser_backend.engines.build import build_engines
from tests.support.gguf_models import add_vocabulary, write_gguf
from tests.support.tiny_models import random_model

Words = list[str]
Edit = Callable[[gguf.GGUFWriter], object]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_model("qwen2", num_hidden_layers=1)


@pytest.fixture(scope="module")
def good(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("good") / "model.gguf"
    write_gguf(model, file)
    return file.read_bytes()


def refuses(file: Path, words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks for an error of one line with these words, and no files left in the output or the temporary folder."""
    output, temporary = file.parent / "out", file.parent / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = sorted(path.name for path in file.parent.iterdir())
    with pytest.raises(FaserError) as caught:
        build_engines(file, None, output)
    message = str(caught.value)
    assert "\n" not in message and "\x1b" not in message and len(message) < 1000
    assert [word for word in [file.name, *words] if word not in message] == [], message
    caught.value.__traceback__ = None  # its frames keep the checkpoint and its folder alive
    del caught
    gc.collect()
    assert sorted(path.name for path in file.parent.iterdir()) == before and list(temporary.iterdir()) == []


def after(data: bytes, key: str) -> int:
    """Returns the offset at which the type of a key's value begins."""
    return data.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key)


def patched(data: bytes, at: int, layout: str, value: Any) -> bytes:
    new = struct.pack(layout, value)
    return data[:at] + new + data[at + len(new) :]


TOKENS = "tokenizer.ggml.tokens"
ENDS_EARLY = ["ends at byte", "promises"]
DAMAGED: dict[str, tuple[Callable[[bytes], bytes], Words]] = {
    "empty": (lambda d: b"", ["empty file"]),
    "not_gguf": (lambda d: b"GGML" + d[4:], ["magic"]),
    "version_1": (lambda d: patched(d, 4, "<I", 1), ["version 1"]),
    "other_byte_order": (lambda d: patched(d, 4, ">I", 3), ["other order"]),
    "a_billion_tensors": (lambda d: patched(d, 8, "<Q", 10**9), ENDS_EARLY),
    "a_tensor_too_few": (lambda d: patched(d, 8, "<Q", struct.unpack_from("<Q", d, 8)[0] - 1), ["missing"]),
    "no_tensors": (lambda d: patched(d, 8, "<Q", 0), ["vocab_size"]),
    "a_key_without_end": (lambda d: patched(d, 24, "<Q", 2**64 - 1), ENDS_EARLY),
    "text_that_is_no_utf8": (
        lambda d: d.replace(b"\x05\0\0\0\0\0\0\0qwen2", b"\x05\0\0\0\0\0\0\0\xffwen2", 1),
        ["utf-8"],
    ),
    "an_empty_axis": (lambda d: patched(d, after(d, "token_embd.weight") + 4, "<Q", 0), ["shape of token_embd.weight"]),
    "an_axis_without_end": (lambda d: patched(d, after(d, "token_embd.weight") + 4, "<Q", 2**60), ENDS_EARLY),
    "a_type_that_is_not_read": (
        lambda d: patched(d, after(d, "token_embd.weight") + 20, "<I", 24),
        ["type of token_embd.weight = I8", "Q6_K"],
    ),
    "rows_of_broken_blocks": (lambda d: patched(d, after(d, "token_embd.weight") + 20, "<I", 12), ["Q4_K", "256"]),
    "an_offset_elsewhere": (lambda d: patched(d, after(d, "token_embd.weight") + 24, "<Q", 2**50), [str(2**50)[:4]]),
    "numbers_cut_off": (lambda d: d[:-64], ENDS_EARLY),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused(case: str, good: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    damage, words = DAMAGED[case]
    file = tmp_path / "model.gguf"
    file.write_bytes(damage(good))
    refuses(file, words, monkeypatch)


def test_a_file_cut_anywhere_is_refused(good: bytes, tmp_path: Path):
    """The file is cut at each of the header's first thousand bytes, and at some later ones."""
    file = tmp_path / "model.gguf"
    for size in (*range(0, 1000, 7), *range(1000, len(good) - 32, 4093)):
        file.write_bytes(good[:size])
        with pytest.raises(FaserError, match=r"model\.gguf: "):
            build_engines(file, None, tmp_path / "out")


def test_random_bytes_in_the_head_never_crash(good: bytes, tmp_path: Path):
    rng, file, num_refused = np.random.default_rng(0), tmp_path / "model.gguf", 0
    for _ in range(150):
        data = bytearray(good)
        for at in rng.integers(0, 3000, 4):
            data[at] = rng.integers(0, 256)
        file.write_bytes(data)
        try:
            build_engines(file, None, tmp_path / "out")
        except FaserError:
            num_refused += 1
    assert num_refused > 50


def bad(name: str, value: Any, kind: Kind, *words: str) -> tuple[Edit, Words]:
    """Returns an edit that sets a key, and the words of its refusal: the key and these."""
    return lambda writer: writer.add_key_value(name, value, kind), [name, *words]


def tensor(name: str, *shape: int) -> Edit:
    return lambda writer: writer.add_tensor(name, np.ones(shape, np.float32))


BAD_CONTENT: dict[str, tuple[Edit, Words]] = {
    "unknown_architecture": bad("general.architecture", "mamba", Kind.STRING, "'mamba'", "qwen3moe"),
    "architecture_is_a_number": bad("general.architecture", 5, Kind.UINT32, "5"),
    "a_part_of_several": bad("split.count", 3, Kind.UINT16, "3"),
    "layers_are_text": bad("qwen2.block_count", "one", Kind.STRING, "'one'"),
    "no_layers": bad("qwen2.block_count", 0, Kind.UINT32, "0", "1024"),
    "more_layers_than_tensors": (bad("qwen2.block_count", 2, Kind.UINT32)[0], ["model.layers.1.", "missing"]),
    "heads_by_layer": bad("qwen2.attention.head_count", [4, 4], Kind.ARRAY),
    "heads_do_not_divide": bad("qwen2.attention.head_count_kv", 3, Kind.UINT32, "3", "4"),
    "width_is_another": (bad("qwen2.embedding_length", 64, Kind.UINT32)[0], ["[97, 32]", "[97, 64]"]),
    "epsilon_is_no_number": bad("qwen2.attention.layer_norm_rms_epsilon", float("nan"), Kind.FLOAT32, "nan"),
    "partial_rotary": bad("qwen2.rope.dimension_count", 4, Kind.UINT32, "4", "8"),
    "yarn": bad("qwen2.rope.scaling.type", "yarn", Kind.STRING, "'yarn'", "llama3"),
    "no_factor": (bad("qwen2.rope.scaling.type", "linear", Kind.STRING)[0], ["qwen2.rope.scaling.factor", "None"]),
    "other_values": bad("qwen2.attention.value_length", 4, Kind.UINT32, "4"),
    "a_window": bad("qwen2.attention.sliding_window", 64, Kind.UINT32, "64"),
    "both_ways": bad("qwen2.attention.causal", False, Kind.BOOL, "False"),
    "experts_without_a_router": bad("qwen2.expert_count", 8, Kind.UINT32, "8"),
    "an_unknown_scale": bad("qwen2.logit_scale", 2.0, Kind.FLOAT32, "2.0", "not known"),
    "a_key_that_paints": (bad("qwen2.\x1b[31m\n", 1, Kind.UINT32)[0], ["qwen2.\\x1b[31m\\n", "not known"]),
    "alignment_of_three": (bad("general.alignment", 3, Kind.UINT32)[0], ["alignment", "power of two"]),
    "alignment_is_huge": (bad("general.alignment", 1 << 30, Kind.UINT32)[0], ENDS_EARLY),
    "a_name_that_escapes": (tensor("../../etc/passwd", 4), ["../../etc/passwd", "no part"]),
    "a_name_that_paints": (tensor("blk.0.\x1b[2J", 4), ["\\x1b[2J", "no part"]),
    "too_many_values": (bad("general.numbers", [0] * (1 << 13), Kind.ARRAY)[0], ["more than 8192 values"]),
    "tokens_are_numbers": bad(TOKENS, [1] * 97, Kind.ARRAY, "list of str"),
    "an_unknown_tensor": (tensor("blk.0.attn_sinks.weight", 4), ["blk.0.attn_sinks.weight", "no part"]),
    "a_layer_beyond": (tensor("blk.7.attn_norm.weight", 32), ["model.layers.7.input_layernorm.weight", "no part"]),
    "factors_of_another_size": (tensor("rope_freqs.weight", 3), ["rope_freqs.weight", "4 numbers"]),
    "factors_that_nothing_has": (
        lambda w: w.add_tensor("rope_freqs.weight", np.array([1, 2, 3, 4], np.float32)),
        ["rope_freqs.weight[1]", "2.0", "Llama 3.1"],
    ),
    "an_unknown_tokenizer": bad("tokenizer.ggml.model", "t5", Kind.STRING, "'t5'", "gpt2, llama"),
    "no_vocabulary": bad(TOKENS, 5, Kind.UINT32, "5"),
    "a_token_twice": bad(TOKENS, ["a", "b", "ab", *"c" * 94], Kind.ARRAY, f"{TOKENS}[4]", "'c'", "3"),
    "fewer_types_than_tokens": bad("tokenizer.ggml.token_type", [1, 1], Kind.ARRAY, "2", "97"),
    "a_merge_of_three": bad("tokenizer.ggml.merges", ["a b c"], Kind.ARRAY, "tokenizer.ggml.merges[0]", "'a b c'"),
    "a_merge_of_strangers": bad("tokenizer.ggml.merges", ["a zz"], Kind.ARRAY, "zz"),
    "an_end_outside": bad("tokenizer.ggml.eot_token_id", 97, Kind.INT32, "97", "96"),
    "blanks_are_squeezed": bad("tokenizer.ggml.remove_extra_whitespaces", True, Kind.BOOL, "True"),
    "template_is_a_list": bad("tokenizer.chat_template", ["x"], Kind.ARRAY),
    "template_is_huge": bad("tokenizer.chat_template", "x" * ((1 << 20) + 1), Kind.STRING, "1048576"),
}


@pytest.mark.parametrize("case", BAD_CONTENT)
def test_content_that_cannot_be_built_is_refused(
    case: str, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    edit, words = BAD_CONTENT[case]
    monkeypatch.setattr("faser_backend.engines.gguf_checkpoint.MAX_VALUES", 1 << 13)
    write_gguf(model, tmp_path / "model.gguf", edit=edit)
    refuses(tmp_path / "model.gguf", words, monkeypatch)


@pytest.mark.parametrize(
    ("kind", "scale", "words"),
    [
        (Type.Q8_0, np.inf, ["layers.0.up: weights are not finite"]),  # runtime llvm copies them
        (Type.Q4_1, np.nan, ["layers.0.up: weights are not finite"]),
        (Type.F32, np.nan, ["blk.0.ffn_up.weight[0, 0]", "nan", "finite"]),
    ],
)
def test_numbers_that_are_not_finite_are_refused(
    kind: Type, scale: float, words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "model.gguf"
    write_gguf(random_model("qwen2", hidden_size=64, intermediate_size=64, num_hidden_layers=1), file, kind=kind)
    at = next(t.data_offset for t in gguf.GGUFReader(file).tensors if t.name == "blk.0.ffn_up.weight")
    file.write_bytes(patched(file.read_bytes(), at, "<f" if kind == Type.F32 else "<e", scale))
    refuses(file, words, monkeypatch)


def test_more_tokens_than_rows_are_refused(model: PreTrainedModel, tmp_path: Path):
    vocabulary = partial(add_vocabulary, tokens=["a", "b", "ab", *(f"t{i}" for i in range(99))], merges=["a b"])
    write_gguf(model, tmp_path / "model.gguf", vocabulary=vocabulary)
    with pytest.raises(FaserError, match="vocab_size of target = 97: its tokenizer has ids up to 101"):
        build_engines(tmp_path / "model.gguf", None, tmp_path / "out")


def test_rows_that_do_not_pair_up_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A head of one row cannot be split into halves."""
    model = random_model("linear_rope", num_hidden_layers=1)
    edit = partial(gguf.GGUFWriter.add_head_count, count=32)
    write_gguf(model, tmp_path / "model.gguf", edit=edit)
    refuses(tmp_path / "model.gguf", ["rows of blk.0.attn_q.weight = 32", "32 heads"], monkeypatch)

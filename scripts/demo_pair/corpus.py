"""The corpus of the demo pair: the running Python's standard library sources, as text and as token ids.

Every file goes to one side of the split by the SHA-1 of its relative path, so that the
split does not depend on the machine. Knows nothing of models.
"""

import hashlib
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
VOCAB_SIZE = 2048
HELD_OUT_EVERY = 25
# A newline is always a token of its own, so that a prompt that ends in one is cut like the training text.
PIECES = r"\n| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|[ ]+(?=[ ])|\s"
SKIPPED_PARTS = frozenset({"pydoc_data", "encodings", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus: its path relative to the standard library, and its text."""

    path: str
    text: str

    @property
    def is_held_out(self) -> bool:
        return int(hashlib.sha1(self.path.encode()).hexdigest(), 16) % HELD_OUT_EVERY == 0

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())


def read_standard_library() -> list[SourceFile]:
    """Every usable `*.py` of the standard library, sorted by path.

    Left out are tables (`encodings`, `pydoc_data`), installed packages, files that are not
    UTF-8, empty ones, duplicates by content, and those with more than 10 % non-ASCII characters.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files, seen = [], set()
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if SKIPPED_PARTS.intersection(relative.parts):
            continue
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha1(text.encode()).digest()
        is_mostly_ascii = sum(ord(c) > 127 for c in text) * 10 <= len(text)
        if not text.strip() or digest in seen or not is_mostly_ascii:
            continue
        seen.add(digest)
        files.append(SourceFile(relative.as_posix(), text))
    return files


def listing_digest(files: list[SourceFile]) -> str:
    """SHA-256 over the lines `sha1(text) path`: one fingerprint for the whole corpus."""
    lines = (f"{hashlib.sha1(f.text.encode()).hexdigest()} {f.path}\n" for f in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE with the full byte alphabet: lossless on any UTF-8 text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def check_lossless(tokenizer: Tokenizer, texts: list[str]) -> None:
    """Fails unless decode(encode(text)) is the text itself."""
    hard_cases = ["", " ", "\n\n \t x", "\r\n", "naïve 漢字 🙂 \u200d\u0301 \x00\x7f", "    def f():\n\treturn  1"]
    for text in hard_cases + texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text, f"not lossless: {text[:60]!r}"


def encode_files(tokenizer: Tokenizer, files: list[SourceFile], seed: int) -> np.ndarray:
    """The files in a seeded random order, each preceded by end-of-text: ids `[num_tokens]`, uint16.

    No file's text may contain the end-of-text string itself as a special token; none does.
    """
    order = np.random.default_rng(seed).permutation(len(files))
    encodings = tokenizer.encode_batch([files[i].text for i in order], add_special_tokens=False)
    parts = []
    for encoding in encodings:
        parts += [np.array([END_OF_TEXT_ID], np.uint16), np.array(encoding.ids, np.uint16)]
    return np.concatenate(parts)


class WindowSampler:
    """Endless batches of windows of a token stream; each epoch sees every window once.

    The stream is cut at a new random offset in every epoch, so that window borders move. A cut in
    use when `window_len` changes is used up first: longer windows then overlap for the rest of that epoch.
    """

    def __init__(self, stream: np.ndarray, seed: int):
        self.stream = stream  # [num_tokens] uint16
        self.rng = np.random.default_rng(seed)
        self.starts: list[int] = []

    def snapshot(self) -> dict:
        return {"starts": list(self.starts), "rng": self.rng.bit_generator.state}

    def restore(self, snapshot: dict) -> None:
        """Goes on where `snapshot` was taken; an empty one changes nothing."""
        if snapshot:
            self.starts = list(snapshot["starts"])
            self.rng.bit_generator.state = snapshot["rng"]

    def next_batch(self, batch_size: int, window_len: int) -> np.ndarray:
        """Ids `[batch_size, window_len + 1]` int64: inputs and, shifted by one, their labels."""
        rows = []
        while len(rows) < batch_size:
            if not self.starts:
                offset = int(self.rng.integers(window_len))
                starts = np.arange(offset, len(self.stream) - window_len - 1, window_len)
                self.starts = self.rng.permutation(starts).tolist()
            start = self.starts.pop()
            row = self.stream[start : start + window_len + 1]
            if len(row) == window_len + 1:
                rows.append(row)
        return np.stack(rows).astype(np.int64)


def prepare(build_dir: Path, seed: int) -> None:
    """The tokenizer stage: writes tokenizer.json, train.npy, held_out.npy and corpus.json."""
    build_dir.mkdir(parents=True, exist_ok=True)
    files = read_standard_library()
    train = [f for f in files if not f.is_held_out]
    held_out = [f for f in files if f.is_held_out]
    tokenizer = train_tokenizer([f.text for f in train])
    check_lossless(tokenizer, [f.text for f in held_out])
    tokenizer.save(str(build_dir / "tokenizer.json"))
    facts = {"listing_sha256": listing_digest(files), "seed": seed}
    for name, side in (("train", train), ("held_out", held_out)):
        ids = encode_files(tokenizer, side, seed)
        np.save(build_dir / f"{name}.npy", ids)
        facts[name] = {"num_files": len(side), "num_bytes": sum(f.num_bytes for f in side), "num_tokens": len(ids)}
    (build_dir / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(facts), flush=True)

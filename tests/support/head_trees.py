"""For trees that a head drafts: a pair whose head is often right, and a checker of trees against a dense reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from faser_backend.core.record import StepRecord
from faser_backend.engines.build import build_engines
from faser_backend.engines.tensorrt_buckets import TensorRtOptions
from faser_backend.pipeline.engine import Engine
from tests.engines.test_eagle3 import BLOCK_SIZE, Built
from tests.support.eagle3_models import HEAD, NUM_TARGET_LAYERS, ReferenceHead, head_tensors, write_head
from tests.support.tiny_models import VOCAB_SIZE, reference_model, write_checkpoint

LAYER_SHARE = 0.1  # of what random layers add, in the pair that mostly agrees
LATER_RANKS = (1.0, 0.85, 0.7)  # by which the head orders what may follow one, two and three tokens behind a feature
Found = tuple[np.ndarray, np.ndarray, torch.Tensor]


class Agreeing(Built):
    """A target that mostly follows token t by f(t), and a head whose first, second, third choices are f(f(t)) and so
    on, for a hidden state that is mostly t's embedding. What it makes of a row is mostly that state again, so that it
    is right at first choice behind the anchor, at second choice behind that token, at third behind the next."""

    def __init__(self, root: Path, runtime: str = "llvm", *, tensorrt: TensorRtOptions | None = None) -> None:
        self.source = write_checkpoint(root / "target", num_hidden_layers=NUM_TARGET_LAYERS)
        self.target_reference = reference_model(self.source)
        embedding = torch.randn(VOCAB_SIZE, HEAD["hidden_size"], generator=torch.Generator().manual_seed(1))
        follows = torch.from_numpy(np.random.default_rng(1).permutation(VOCAB_SIZE))
        rows = embedding / HEAD["hidden_size"] ** 0.5
        with torch.no_grad():
            for name, weight in self.target_reference.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    weight.mul_(LAYER_SHARE)
            self.target_reference.get_parameter("model.norm.weight").fill_(1.0)
            self.target_reference.get_parameter("model.embed_tokens.weight").copy_(embedding)
            self.target_reference.get_parameter("lm_head.weight")[follows] = rows
        self.target_reference.save_pretrained(self.source)
        config = {name: value for name, value in HEAD.items() if name != "draft_vocab_size"}
        tensors = head_tensors(config)
        for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
            tensors[name] *= LAYER_SHARE
        tensors["fc.weight"] = torch.eye(HEAD["hidden_size"]).repeat(1, 3) / 3
        tensors["norm.weight"] = torch.ones(HEAD["hidden_size"])
        tensors["lm_head.weight"] = torch.zeros(VOCAB_SIZE, HEAD["hidden_size"])
        coming = follows
        for weight in LATER_RANKS:
            coming = follows[coming]
            tensors["lm_head.weight"][coming] += weight * rows
        self.head_dir = write_head(root / "head", tensors, draft_vocab_size=None)
        self.directory = root / "engine"
        options = {"exit_layers": (4,), "kv_block_size": BLOCK_SIZE, "tensorrt": tensorrt}
        self.manifest = build_engines(self.source, self.head_dir, self.directory, runtime=runtime, **options)
        self.reference = ReferenceHead(self.head_dir, embedding)


class ReferenceTree:
    """Greedy results of the head for any path of draft tokens behind committed ones, none of it from a cache."""

    def __init__(self, built: Built, tokens: np.ndarray) -> None:
        self._reference = built.reference
        self._found: dict[tuple[int, ...], Found] = {}
        self._found[()] = self._run(tokens[1:], built.reference.joined(built.features(tokens)[:-1]))

    def children(self, path: tuple[int, ...], count: int) -> list[int]:
        """The best tokens behind a path, the best first."""
        return np.argsort(-self._at(path)[0], kind="stable")[:count].tolist()

    def _at(self, path: tuple[int, ...]) -> Found:
        if path not in self._found:
            _, token_ids, hidden = self._at(path[:-1])
            self._found[path] = self._run(np.append(token_ids, path[-1]), hidden)
        return self._found[path]

    def _run(self, token_ids: np.ndarray, hidden: torch.Tensor) -> Found:
        """Logits [V] behind the last of token_ids [n]; these; and hidden states [n + 1, d] to go on from."""
        logits, made = self._reference.run(token_ids, hidden)
        return logits[-1], token_ids, torch.cat([hidden, made[-1:]])


class TreeChecker:
    """Compares the children of every node of every tree that an engine verifies with the reference's, clients' chains
    aside."""

    def __init__(self, built: Built, engine: Engine) -> None:
        self._built = built
        self.num_equal = self.num_parents = self.num_siblings = self.num_deep = 0  # nodes with children
        self.num_moved = 0  # accepted tokens of other rows than a chain's
        engine.step_runner.observers.append(self.observe)

    def observe(self, record: StepRecord) -> None:
        frontier, path = record.frontier, record.acceptance.path
        if frontier.tree is None:
            return
        for row, sequence in enumerate(record.plan.decodes):
            count, num_tokens = int(frontier.num_drafted[row]), int(record.num_tokens[row])
            if not count or frontier.is_client[row]:
                continue
            assert path is not None and num_tokens > 1
            accepted = path.rows[row, 1 : int(record.acceptance.num_accepted[row]) + 1]
            self.num_moved += int((accepted != np.arange(1, accepted.size + 1)).sum())
            reference = ReferenceTree(self._built, sequence.token_ids[:num_tokens].copy())
            self._check(reference, frontier.drafted[row, :count].tolist(), frontier.tree.parents[row, :count].tolist())

    def _check(self, reference: ReferenceTree, tokens: list[int], parents: list[int]) -> None:
        paths: list[tuple[int, ...]] = [()]
        children: dict[tuple[int, ...], list[int]] = {}
        for token, parent in zip(tokens, parents, strict=True):
            children.setdefault(paths[parent], []).append(token)
            paths.append((*paths[parent], token))
        for path, found in children.items():
            self.num_parents += 1
            self.num_siblings += len(found) > 1
            self.num_deep += len(path) > 1
            self.num_equal += found == reference.children(path, len(found))

"""Engines of runtime torch that draft with a head, on the CPU.

Drafts equal a dense reference's and llvm's, tokens equal plain decoding's, and chains drafted on the device equal those
drafted call by call.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE
from faser_backend.core.request import Request, Sampling
from faser_backend.cuda.draft_loop import TorchDraftLoop
from faser_backend.cuda.runtime import CudaRuntime
from faser_backend.engines.build import build_engines
from faser_backend.pipeline.engine import Engine
from faser_backend.serving.compose import build_engine
from tests.cuda.test_draft_loop import recorded_frontiers
from tests.engines.test_eagle3 import BLOCK_SIZE, Built
from tests.pipeline.test_eagle3_drafting import check_chains, make_requests, open_engine, prune, set_lengths, tokens_of
from tests.support.eagle3_models import HEAD, NUM_TARGET_LAYERS, ReferenceHead, head_tensors, write_head
from tests.support.harness import drive
from tests.support.tiny_models import VOCAB_SIZE, reference_model, write_checkpoint

LAYER_SHARE = 0.1  # by which the layers of the pair that mostly agrees are scaled


class Agreeing(Built):
    """A target that mostly follows token t by f(t), and a head that mostly drafts f(f(t)) from the features of t.

    Only a row beside another position's features would be wrong, so what is accepted tests the reference's order too.
    """

    def __init__(self, root: Path) -> None:
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
        tensors = head_tensors({name: value for name, value in HEAD.items() if name != "draft_vocab_size"})
        for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
            tensors[name] *= LAYER_SHARE
        tensors["fc.weight"] = torch.eye(HEAD["hidden_size"]).repeat(1, 3) / 3
        tensors["norm.weight"] = torch.ones(HEAD["hidden_size"])
        tensors["lm_head.weight"] = torch.zeros(VOCAB_SIZE, HEAD["hidden_size"])
        tensors["lm_head.weight"][follows[follows]] = rows
        self.head_dir = write_head(root / "head", tensors, draft_vocab_size=None)
        self.directory = root / "engine"
        options = {"exit_layers": (4,), "kv_block_size": BLOCK_SIZE}
        self.manifest = build_engines(self.source, self.head_dir, self.directory, runtime="torch", **options)
        self.reference = ReferenceHead(self.head_dir, embedding)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Builds a head that is often right."""
    return Agreeing(tmp_path_factory.mktemp("agreeing"))


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Builds a head that knows only some tokens and is rarely right."""
    return Built(tmp_path_factory.mktemp("random"), runtime="torch", exit_layers=(4,))


def mixed_requests() -> list[Request]:
    """Returns greedy and sampled requests, some with filters, and two with rules, which end first."""
    made = make_requests()
    made[2] = replace(made[2], sampling=Sampling(temperature=1.0, top_k=7, top_p=0.9, seed=2))
    made[4] = replace(made[4], sampling=Sampling(temperature=0.9, repetition_penalty=1.3, seed=4), max_tokens=6)
    made[5] = replace(made[5], sampling=Sampling(presence_penalty=0.7, seed=5), max_tokens=4)
    return made


@pytest.fixture(scope="module")
def plain(built: Built) -> dict[str, list[int]]:
    return tokens_of(built, "none", mixed_requests())


def without_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaRuntime, "open_draft_loop", lambda *_: None)


# -- drafts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "options", "has_loops"),
    [
        ((4,), {}, False),
        ((4,), {"num_kv_blocks": 32}, True),  # one full context: sequences are preempted
        ((5, 0, 2, 0, 0), {}, True),  # rounds without drafts: the head lags behind
    ],
)
def test_every_chain_is_the_reference_s(
    random: Built, monkeypatch, lengths: tuple[int, ...], options: dict[str, object], has_loops: bool
) -> None:
    if not has_loops:
        without_loops(monkeypatch)

    def prepare(engine: Engine) -> None:
        set_lengths(lengths, engine)
        assert isinstance(engine.step_runner.partitions[WHOLE].draft_loop, TorchDraftLoop) == has_loops

    metrics = check_chains(random, "fixed:4", prepare, count=5, **options)
    assert (metrics.num_preemptions > 0) == bool(options)


@pytest.mark.parametrize("name", ["built", "random"])
def test_a_loop_drafts_what_the_host_drafts_call_by_call(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares tokens, lengths, margins and candidates of every frontier."""
    built: Built = request.getfixturevalue(name)
    seen = []
    for _ in range(2):
        engine = open_engine(built, "fixed:4")
        prune(engine)
        frontiers = recorded_frontiers(engine.step_runner)
        seen.append((drive(engine, mixed_requests()).tokens, frontiers))
        engine.close()
        without_loops(monkeypatch)
    (with_loops, frontiers), (stepwise, expected) = seen
    assert with_loops == stepwise and len(frontiers) == len(expected)
    for drafted, wanted in zip(frontiers, expected, strict=True):
        for found, other in zip(drafted, wanted, strict=True):
            assert (found is None) == (other is None)
            assert found is None or np.allclose(found, other, atol=1e-5)


# -- tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "options"), [("fixed:4", {}), ("fixed:4", {"num_kv_blocks": 32}), ("faser", {})])
def test_tokens_equal_plain_decoding(
    built: Built, plain: dict[str, list[int]], policy: str, options: dict[str, object]
) -> None:
    """Greedy and sampled sequences, with penalties and filters, at random times."""
    engine = open_engine(built, policy, **options)
    assert drive(engine, mixed_requests(), seed=1).tokens == plain
    assert policy == "faser" or engine.metrics().num_accepted > 20
    engine.close()


def test_tokens_equal_plain_decoding_in_halves(built: Built, tmp_path: Path) -> None:
    """On a CPU a row's products do not depend on the batch, so there are no near-ties."""
    options = {"runtime": "torch", "dtype": "bf16", "kv_block_size": BLOCK_SIZE}
    build_engines(built.source, built.head_dir, tmp_path, **options)
    found = []
    for policy in ("none", "fixed:4"):
        engine = build_engine(tmp_path, EngineConfig(policy=policy))
        found.append(drive(engine, make_requests(5, is_greedy=True)).tokens)
        assert policy == "none" or engine.metrics().num_accepted > 20
        engine.close()
    assert found[0] == found[1]

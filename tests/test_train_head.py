"""Training a draft head: the target's own dialogues, chains in training, and the checkpoint that engines take."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.build import build_engines
from faser_backend.config import EngineConfig
from faser_backend.core.errors import ConfigError, FaserError
from faser_backend.runtime_spec import CPU_RUNTIMES
from faser_backend.serving.compose import build_engine
from lab.train_head import model, torch_writer
from lab.train_head.begin import TargetTensors, feature_layers, frequent_ids, head_spec, new_head, read_target
from lab.train_head.conversations import RAREST, WritingOptions, draw
from lab.train_head.crew import Crew, working_with
from lab.train_head.export import head_config, save_head
from lab.train_head.model import SoftCrossEntropy
from lab.train_head.run import HeadRun, RunOptions
from lab.train_head.shards import Corpus, Dialogue, shard_paths
from lab.train_head.torch_writer import TorchWriter
from lab.train_head.training import STATE_FILE, Trainer, TrainingOptions
from tests.eagle3_models import NUM_TARGET_LAYERS, ReferenceHead
from tests.harness import drive
from tests.test_eagle3_drafting import make_requests
from tests.tiny_models import VOCAB_SIZE, reference_model, write_checkpoint

MAX_ERROR = 1e-4
NUM_IDS = 60
WRITING = WritingOptions(num_slots=8, num_threads=1, dialogues_per_shard=8, max_question=40, max_answer=24)
TRAINING = TrainingOptions(
    passes=6,
    tokens_per_step=256,
    matrix_rate=0.02,
    rate=0.01,
    warmup_steps=2,
    num_columns=40,
    report_every=1,
    check_every=5,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random, with 8 layers, a chat template, and end ids that come often."""
    directory = tmp_path_factory.mktemp("train_head") / "target"
    ends = list(range(3, 13))
    write_checkpoint(directory, num_hidden_layers=NUM_TARGET_LAYERS, eos_token_id=ends)
    (directory / "chat_template.jinja").write_text("token20{{ messages[0]['content'] }}token21")
    return directory


def run_options(target: Path, root: Path, **changes: Any) -> RunOptions:
    options = RunOptions(
        target=target,
        output=root / "head",
        work=root / "work",
        num_tokens=1500,
        num_ids=NUM_IDS,
        num_kv_heads=4,
        num_threads=1,
        precision="fp32",
        writer="llvm",
        training=TRAINING,
        writing=WRITING,
    )
    return replace(options, **changes)


@pytest.fixture(scope="module")
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> RunOptions:
    """All stages, once."""
    options = run_options(target, tmp_path_factory.mktemp("trained"))
    run = HeadRun(options)
    run.write()
    run.train()
    run.save()
    return options


def trainer_on(trained: RunOptions, directory: Path, **changes: Any) -> Trainer:
    """A fresh one on the data of the trained head."""
    parts, corpus = read_target(trained.target), Corpus(trained.work / "dialogues")
    spec = head_spec(parts.spec, num_kv_heads=4, intermediate_size=parts.spec.intermediate_size)
    directory.mkdir(exist_ok=True)
    return Trainer(
        parts,
        spec,
        np.arange(NUM_IDS),
        corpus,
        directory=directory,
        options=replace(TRAINING, **changes),
        dtype=torch.float32,
        report=lambda line: None,
    )


def check_dialogues(target: Path, dialogues: list[Dialogue]) -> None:
    """Against a dense run of transformers: features, last hidden state, best tokens; greedy answers follow these."""
    reference = reference_model(target)
    assert {dialogue.is_greedy for dialogue in dialogues} == {True, False}
    for dialogue in dialogues:
        with torch.no_grad():
            made = reference(torch.from_numpy(dialogue.token_ids.astype(np.int64))[None], output_hidden_states=True)
            features = torch.cat([made.hidden_states[layer][0] for layer in (2, 4, 5)], dim=-1).numpy()
            normed = reference.model.norm(torch.from_numpy(dialogue.hidden).float()).numpy()
        assert np.abs(features - dialogue.features).max() < 0.02
        assert np.abs(made.hidden_states[-1][0].numpy() - normed).max() < 0.02  # transformers gives it behind the norm
        assert (made.logits[0].argmax(-1).numpy() == dialogue.best_ids).all()
        start = dialogue.answer_start
        assert dialogue.token_ids[start - 1] == 21  # what the template puts before an answer
        if dialogue.is_greedy:
            assert (dialogue.token_ids[start:] == dialogue.best_ids[start - 1 : -1]).all()


def written_in_torch(trained: RunOptions, dtype: torch.dtype, num_slots: int = 20) -> list[Dialogue]:
    options = replace(WRITING, num_slots=num_slots)
    target, engine_dir = TargetTensors(trained.target), trained.work / "engine"
    writer = TorchWriter(target, engine_dir, feature_layers(target.spec), options, seed=1, dtype=dtype)
    dialogues: list[Dialogue] = []
    while len(dialogues) < 16:
        dialogues += writer.step()
    writer.close()
    return dialogues


def test_dialogues_are_what_the_target_says_and_makes_of_it(trained: RunOptions) -> None:
    corpus = Corpus(trained.work / "dialogues")
    assert corpus.num_tokens >= trained.num_tokens
    check_dialogues(trained.target, [shard[i] for shard in corpus.shards for i in range(len(shard))][:12])


def test_the_writer_in_torch_writes_the_same(trained: RunOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several cohorts, and conversations that end in the midst of theirs."""
    monkeypatch.setattr(torch_writer, "COHORT", 7)
    check_dialogues(trained.target, written_in_torch(trained, torch.float32))


def test_the_writer_in_torch_is_as_exact_as_bfloat16(trained: RunOptions) -> None:
    """Another order of the same tokens is farther off than that."""
    reference = reference_model(trained.target)
    for dialogue in written_in_torch(trained, torch.bfloat16)[:6]:
        tokens = torch.from_numpy(dialogue.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            made, other = (reference(ids, output_hidden_states=True) for ids in (tokens, tokens.flip(1)))
        features, wrong = (
            torch.cat([run.hidden_states[layer][0] for layer in (2, 4, 5)], -1).numpy() for run in (made, other)
        )
        size = np.linalg.norm(features)
        assert np.linalg.norm(features - dialogue.features) < 0.05 * size < np.linalg.norm(wrong - dialogue.features)
        best = made.logits[0].gather(1, torch.from_numpy(dialogue.best_ids.astype(np.int64))[:, None])[:, 0]
        assert (made.logits[0].amax(-1) - best).max() < 0.04 * made.logits.abs().max()


@pytest.mark.parametrize(("is_fast", "kind"), [(True, "torch"), (False, "llvm")])
def test_torch_writes_where_its_bfloat16_is_fast(
    trained: RunOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    is_fast: bool,
    kind: str,
) -> None:
    monkeypatch.setattr("lab.train_head.run.has_fast_halves", lambda: is_fast)
    shutil.copytree(trained.work / "engine", tmp_path / "work" / "engine")
    HeadRun(run_options(trained.target, tmp_path, num_tokens=1, writer="auto")).write()
    assert f"8 conversations at once, writer {kind}" in capsys.readouterr().err
    assert Corpus(tmp_path / "work" / "dialogues").num_tokens


def test_the_writer_in_torch_refuses_what_is_no_plain_llama(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "target", attention_bias=True)
    with pytest.raises(ConfigError, match="target: has_qkv_bias = True: writer torch runs plain Llamas alone"):
        TorchWriter(TargetTensors(tmp_path / "target"), tmp_path, (), WRITING, seed=0)


def test_writing_goes_on_where_it_was_cut_off(trained: RunOptions, tmp_path: Path) -> None:
    options = run_options(trained.target, tmp_path, num_tokens=400)
    HeadRun(options).write()
    before = {path: path.read_bytes() for path in shard_paths(options.work / "dialogues")}
    HeadRun(replace(options, num_tokens=900)).write()
    after = shard_paths(options.work / "dialogues")
    assert len(after) > len(before) > 0
    assert all(path.read_bytes() == content for path, content in before.items())
    assert Corpus(options.work / "dialogues").num_tokens >= 900


def test_draws_follow_the_law_and_top_p() -> None:
    rng, logits = np.random.default_rng(0), np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    drawn = np.bincount([draw(logits, 1.0, 1.0, rng) for _ in range(4000)], minlength=4) / 4000
    assert np.abs(drawn - [0.5, 0.3, 0.15, 0.05]).max() < 0.04
    drawn = np.bincount([draw(logits, 1.0, 0.7, rng) for _ in range(4000)], minlength=4) / 4000
    assert np.abs(drawn - [0.625, 0.375, 0, 0]).max() < 0.04
    assert draw(np.array([0.0, np.log(RAREST) - 1]), 1.0, 1.0, rng) == 0


def test_chains_in_training_are_chains_of_drafting(trained: RunOptions, tmp_path: Path) -> None:
    """Every row of every step equals the dense reference that goes on from its own output, one chain at a time."""
    parts = read_target(trained.target)
    spec = head_spec(parts.spec, num_kv_heads=2, intermediate_size=40)
    token_ids = np.arange(NUM_IDS)
    head = new_head(parts, spec, token_ids, seed=0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    layers = feature_layers(parts.spec)
    save_head(tmp_path, head_config(spec, parts.spec, layers, NUM_IDS), dict(head.state_dict()), token_ids)
    reference = ReferenceHead(tmp_path, parts.embedding)
    head.load_state_dict({name: reference.tensors[name].float() for name in head.state_dict()})
    reference.tensors = {name: t.float() if t.is_floating_point() else t for name, t in reference.tensors.items()}
    n, steps, rng = 12, 3, np.random.default_rng(1)
    tokens, features = rng.integers(0, VOCAB_SIZE, n), torch.randn(n, 3 * spec.hidden_size)
    with torch.no_grad():
        chains = head.chains(parts.embedding[torch.from_numpy(tokens)][None], features[None], steps)
    joined = reference.joined(features)
    for row in range(n - steps):
        hidden = joined[: row + 1]
        for step in range(steps):
            logits, made = reference.run(tokens[1 : row + step + 2], hidden)
            found = torch.nn.functional.linear(chains[step][0, row], head.lm_head.weight).detach().numpy()
            assert np.abs(found - logits[-1, :NUM_IDS]).max() < MAX_ERROR
            hidden = torch.cat([hidden, made[-1:]])


def test_the_loss_in_strips_has_the_gradient_of_a_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "STRIP", 4)
    rng = torch.Generator().manual_seed(0)
    hidden, matrix = (torch.randn(n, 8, generator=rng, requires_grad=True) for n in (11, 20))
    wanted = torch.randn(11, 20, generator=rng).softmax(-1)
    plain = -(wanted * torch.nn.functional.linear(hidden, matrix).log_softmax(-1)).sum(-1).mean()
    strips = SoftCrossEntropy.apply(hidden, matrix, wanted)
    assert torch.allclose(plain, strips)
    for wished, found in zip(
        torch.autograd.grad(plain, (hidden, matrix)), torch.autograd.grad(strips, (hidden, matrix)), strict=True
    ):
        assert torch.allclose(wished, found, atol=1e-6)


def test_loss_falls_and_a_run_that_was_cut_off_ends_the_same(trained: RunOptions, tmp_path: Path) -> None:
    whole = trainer_on(trained, tmp_path / "whole")
    whole.run()
    losses = [loss for _, loss in whole.progress.losses]
    assert np.mean(losses[-3:]) < 0.9 * np.mean(losses[:3])
    cut = trainer_on(trained, tmp_path / "cut")
    cut.run(max_steps=3)
    assert not cut.is_done
    resumed = trainer_on(trained, tmp_path / "cut")
    assert resumed.progress.step == 3
    resumed.run()
    assert resumed.is_done
    for name, parameter in whole.head.state_dict().items():
        assert torch.equal(parameter, resumed.head.state_dict()[name]), name


def test_two_processes_share_the_batches_of_one(trained: RunOptions, tmp_path: Path) -> None:
    steps, tokens = {}, {}
    for num_processes in (1, 2):
        work = tmp_path / str(num_processes)
        shutil.copytree(trained.work / "dialogues", work / "dialogues")
        run = HeadRun(replace(trained, work=work, num_processes=num_processes))
        run.train()
        progress = run.trainer(Crew()).progress
        steps[num_processes], tokens[num_processes] = progress.step, progress.num_tokens
        losses = [loss for _, loss in progress.losses]
        assert np.mean(losses[-3:]) < 0.9 * np.mean(losses[:3])
    assert steps[2] == steps[1] // 2 and tokens[2] == pytest.approx(tokens[1], rel=0.1)


def add_two(crew: Crew) -> None:
    crew.average([torch.full((3,), 2.0)])


def test_weights_are_averaged_over_processes() -> None:
    weights = torch.tensor([1.0, 3.0, 5.0])
    with working_with(Crew(0, 2), add_two):
        Crew(0, 2).average([weights])
    assert weights.tolist() == [1.5, 2.5, 3.5]


def end(crew: Crew) -> None:
    sys.exit(3)


def test_a_process_that_ends_ends_all_with_one_error() -> None:
    with (
        pytest.raises(FaserError, match="a process that trained beside this one ended with status 3"),
        working_with(Crew(0, 2), end),
    ):
        Crew(0, 2).average([torch.zeros(1)])


def test_more_data_are_learned_from_in_another_run(trained: RunOptions, tmp_path: Path) -> None:
    trainer = trainer_on(trained, tmp_path / "a", passes=1)
    trainer.run()
    with pytest.raises(ConfigError, match="no data were written"):
        trainer.go_on(new_alone=True)
    before, old = trainer.progress.num_tokens, trainer.head.lm_head.weight.detach().clone()
    trainer.go_on(np.arange(5, NUM_IDS + 5))
    rows = trainer.head.lm_head.weight
    assert torch.equal(rows[:-5], old[5:])
    assert torch.equal(rows[-5:], read_target(trained.target).lm_head[NUM_IDS : NUM_IDS + 5])
    assert not trainer.is_done
    trainer.run()
    assert trainer.progress.num_tokens == 2 * before


@pytest.mark.parametrize("runtime", CPU_RUNTIMES)
def test_a_trained_head_drafts_in_engines(trained: RunOptions, tmp_path: Path, runtime: str) -> None:
    build_engines(trained.target, trained.output, tmp_path / "engine", runtime=runtime)
    requests, tokens, accepted = make_requests(), {}, {}
    for policy in ("none", "fixed:4"):
        engine = build_engine(tmp_path / "engine", EngineConfig.from_options(policy=policy, max_num_seqs=4))
        tokens[policy] = drive(engine, requests).tokens
        accepted[policy] = engine.metrics().num_accepted
        engine.close()
    assert tokens["none"] == tokens["fixed:4"]
    assert accepted["fixed:4"] > 0


def test_what_was_begun_otherwise_is_refused(trained: RunOptions) -> None:
    with pytest.raises(ConfigError, match=f"num_ids = 7: training in .* began with {NUM_IDS}"):
        HeadRun(replace(trained, num_ids=7)).train()
    assert (trained.work / STATE_FILE).exists() and (trained.work / "curve.png").stat().st_size > 1000


def test_frequent_ids_are_the_most_frequent_and_rise() -> None:
    assert frequent_ids(np.array([5, 5, 3, 9]), 10, 4).tolist() == [0, 3, 5, 9]


def test_without_torch_there_is_one_error(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'torch' else found(name, *a)\n"
        "from faser_backend.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "train-head", "--target", str(tmp_path), "--output", str(tmp_path / "head")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "error: train-head needs torch: pip install 'faser-backend[train]'\n"

"""Training a draft head: the target's dialogues, chains in training, and the checkpoint that engines load."""

import importlib.util
import json
import shutil
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ConfigError
from faser_backend.engines.build import build_engines
from faser_backend.lab.train_head.blocks import BlockDraft
from faser_backend.lab.train_head.chains import ChainDraft
from faser_backend.lab.train_head.checkpoint import head_spec, new_head, save_head
from faser_backend.lab.train_head.data import Batch, Corpus, Dialogue, Kind, shard_paths
from faser_backend.lab.train_head.options import HeadOptions
from faser_backend.lab.train_head.run import open_target, save_trained, train, write
from faser_backend.lab.train_head.training import STATE_FILE, Trainer, load_state
from faser_backend.lab.train_head.writing import draw
from faser_backend.manifest import EngineManifest
from faser_backend.serving.compose import build_engine
from tests.engines.test_dflash import Runners
from tests.pipeline.test_eagle3_drafting import make_requests
from tests.support.eagle3_models import NUM_TARGET_LAYERS, ReferenceHead
from tests.support.harness import drive
from tests.support.tiny_models import VOCAB_SIZE, reference_model, write_checkpoint

NUM_IDS = 60
END_IDS = list(range(3, 13))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> HeadOptions:
    """Runs all stages once, on a random target with 8 layers, a chat template and frequent end ids."""
    root = tmp_path_factory.mktemp("train_head")
    write_checkpoint(root / "target", num_hidden_layers=NUM_TARGET_LAYERS, eos_token_id=END_IDS)
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}token20{{ m.content }}token21"
        "{% else %}{{ m.content }}token3 {% endif %}{% endfor %}"
    )
    (root / "target" / "chat_template.jinja").write_text(template)
    tokenizer = root / "target" / "tokenizer.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"pre_tokenizer": {"type": "WhitespaceSplit"}}))
    options = HeadOptions(
        target=root / "target", output=root / "head", work=root / "work", tokens=1500, passes=6, num_ids=NUM_IDS,
        num_kv_heads=4, tokens_per_step=256, matrix_rate=0.02, rate=0.01, num_slots=8, num_threads=1, precision="fp32",
        dialogues_per_shard=8, max_question=40, max_answer=24, round_tokens=200, num_columns=40, warmup_steps=2,
        report_every=1, check_every=5,
    )  # fmt: skip
    write(options)
    train(options)
    save_trained(options)
    return options


@pytest.fixture(scope="module")
def blocks(trained: HeadOptions, tmp_path_factory: pytest.TempPathFactory) -> HeadOptions:
    """Trains a block drafter on the same dialogues."""
    root = tmp_path_factory.mktemp("blocks")
    changes = {"kind": "block", "num_ids": None, "num_layers": 2, "block_size": 5, "mask_id": 1, "output": root / "out"}
    train(options := copied(trained, root, "dialogues", **changes))
    save_trained(options)
    return options


def copied(trained: HeadOptions, work: Path, *names: str, **changes: object) -> HeadOptions:
    """Returns the same options over a copy of these parts of the work folder."""
    for name in names:
        source = trained.folder / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, work / name)
    return trained.model_copy(update={"work": work, **changes})


def test_dialogues_are_the_targets_words(trained: HeadOptions) -> None:
    """Compares states and best tokens with a dense run; greedy answers follow these. Frequent ids are those said."""
    reference, corpus = reference_model(trained.target), Corpus(trained.dialogues)
    assert corpus.num_tokens >= trained.tokens
    learned = np.concatenate([dialogue.token_ids for shard in corpus.shards[1:] for dialogue in shard])
    counts, ids = np.bincount(learned, minlength=VOCAB_SIZE), corpus.frequent_ids(VOCAB_SIZE, 10)
    assert (np.diff(ids) > 0).all() and sorted(counts[ids]) == sorted(counts)[-10:]
    dialogues = [dialogue for shard in corpus.shards for dialogue in shard][:30]
    assert {Kind.GREEDY, Kind.ANSWER} <= {int(kind) for dialogue in dialogues for kind in dialogue.kinds}
    batch = Batch.of(dialogues, open_target(trained), learned=Kind.QUESTION)
    num_greedy = 0
    for row, dialogue in enumerate(dialogues):
        n, tokens = dialogue.num_tokens, torch.from_numpy(dialogue.token_ids.astype(np.int64))
        with torch.no_grad():
            made = reference(tokens[None], output_hidden_states=True)
        features = torch.cat([made.hidden_states[layer][0] for layer in (2, 4, 5)], dim=-1)
        assert torch.allclose(features, batch.features[row, :n], atol=1e-4)
        assert torch.allclose(made.hidden_states[-1][0], batch.normed[row, :n], atol=1e-3)  # returned after the norm
        best, kinds = made.logits[0].argmax(-1), torch.from_numpy(dialogue.kinds)
        is_learned = batch.best_ids[row, : n - 1] >= 0
        assert torch.equal(is_learned, kinds[1:] >= Kind.QUESTION)
        assert torch.equal(batch.best_ids[row, : n - 1][is_learned], best[:-1][is_learned])
        answers = np.flatnonzero(dialogue.kinds >= Kind.ANSWER)
        assert dialogue.token_ids[answers[0] - 1] == 21  # the template's last token before an answer
        said = (kinds[1:] == Kind.GREEDY) & (tokens[1:] != min(END_IDS))  # an answer of full length gets an end
        num_greedy += int(said.sum())
        assert torch.equal(tokens[1:][said], best[:-1][said])
    assert num_greedy > 20
    assert any((np.diff((dialogue.kinds >= Kind.ANSWER).astype(int)) > 0).sum() == 2 for dialogue in dialogues)


def test_writing_goes_on_where_it_was_cut_off(trained: HeadOptions, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in shard_paths(trained.dialogues)}
    options = copied(trained, tmp_path, "dialogues", tokens=Corpus(trained.dialogues).num_tokens + 1)
    write(options)
    after = {path.name: path.read_bytes() for path in shard_paths(options.dialogues)}
    assert len(after) > len(before) and before.items() <= after.items()
    assert Corpus(options.dialogues).num_tokens >= options.tokens


def test_draws_follow_the_distribution_without_rare_tokens() -> None:
    shares = torch.tensor([0.5, 0.3, 0.195, 0.005])
    for is_answer, expected in ((True, shares**1.25 / (shares**1.25).sum()), (False, shares[:3] / 0.995)):
        drawn = draw(shares.log().expand(20_000, 4), torch.full((20_000,), is_answer))
        found = drawn.bincount(minlength=4) / 20_000
        assert (found[: len(expected)] - expected).abs().max() < 0.02 and found[len(expected) :].sum() == 0


def test_chains_in_training_are_chains_of_drafting(trained: HeadOptions, tmp_path: Path) -> None:
    """Compares every row of every step with the dense reference on its own output, one chain at a time."""
    parts = open_target(trained)
    spec = head_spec(parts.spec, num_kv_heads=2, intermediate_size=40)
    head = new_head(parts, spec, np.arange(NUM_IDS), seed=0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    save_head(tmp_path, parts.spec, spec, head.state_dict(), torch.arange(NUM_IDS))
    reference = ReferenceHead(tmp_path, parts.embedding)
    head.load_state_dict({name: reference.tensors[name] for name in head.state_dict()})
    n, steps, rng = 12, 3, np.random.default_rng(1)
    tokens, features = rng.integers(0, VOCAB_SIZE, n), torch.randn(n, 3 * spec.hidden_size)
    with torch.no_grad():
        chains = head.chains(parts.embedding[torch.from_numpy(tokens)][None], features[None], steps)
    joined = reference.joined(features)
    for row in range(n - steps):
        hidden = joined[: row + 1]
        for step in range(steps):
            logits, made = reference.run(tokens[1 : row + step + 2], hidden)
            found = linear(chains[step][0, row], head.lm_head.weight).detach().numpy()
            assert np.abs(found - logits[-1, :NUM_IDS]).max() < 1e-4
            hidden = torch.cat([hidden, made[-1:]])


def test_blocks_in_training_are_blocks_of_drafting(blocks: HeadOptions, tmp_path: Path) -> None:
    """Compares logits of blocks of two conversations with the engine's; with anchors shifted by one they differ."""
    build_engines(blocks.target, blocks.output, tmp_path / "e", draft_weights="fp32", kv_cache_dtype="fp32")
    target, runners = open_target(blocks), Runners(tmp_path / "e", EngineManifest.load(tmp_path / "e"))
    draft = BlockDraft(target, blocks, load_state(blocks)["shape"], np.arange(0))
    draft.model.load_state_dict({name: t.float() for name, t in load_file(blocks.output / "model.safetensors").items()})
    dialogues = [Dialogue(np.arange(n) ** 2 % VOCAB_SIZE, np.full(n, Kind.GREEDY)) for n in (23, 31)]
    anchors, tables, errors = np.array([[22, 2, 9, 9], [30, 4, 17, 3]]), np.arange(8)[None], np.zeros(2)
    batch = Batch.of(dialogues, target, learned=Kind.GREEDY)
    for size, shift in ((5, 0), (3, 0), (5, 1)):
        expected = target.logits(draft.drafted(batch, torch.from_numpy(anchors - shift), size)).detach().numpy()
        for (row, place), anchor in np.ndenumerate(anchors):
            seen = [dialogues[row].token_ids[: anchor + 1]]
            runners.read(seen, [0], [int(anchor)], tables)
            (found,) = runners.blocks(seen, [np.zeros(size - 1, np.int64)], tables)
            errors[shift] = max(errors[shift], np.abs(found[:, :-1] - expected[row, place]).max())
    runners.close()
    assert errors[0] < 1e-4 and errors[1] > 1e-2


@pytest.mark.parametrize("kind", ["trained", "blocks"])
def test_loss_falls_and_a_run_that_was_cut_off_ends_the_same(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    trained: HeadOptions = request.getfixturevalue(kind)
    options = copied(trained, tmp_path, "dialogues")

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trainer(open_target(trained), options).run(on_check=stop)
    for name in ("passes", "tokens_per_step", "seed"):
        with pytest.raises(ConfigError, match=rf"{name} = 77: the interrupted run in .* has {getattr(options, name)};"):
            Trainer(open_target(trained), options.model_copy(update={name: 77}))
    resumed = Trainer(open_target(trained), options)
    assert resumed.progress.step == trained.check_every and not resumed.is_done
    resumed.run()
    assert resumed.is_done
    losses = [loss for _, loss in resumed.progress.losses]
    assert np.mean(losses[-3:]) < 0.9 * np.mean(losses[:3])
    whole = Trainer(open_target(trained), trained)
    assert whole.is_done
    for name, parameter in whole.draft.model.state_dict().items():
        assert torch.equal(parameter, resumed.draft.model.state_dict()[name]), name


def test_more_data_are_learned_from_in_another_run(trained: HeadOptions, tmp_path: Path) -> None:
    options = copied(trained, tmp_path, "dialogues", STATE_FILE, passes=1, tokens_per_step=250)  # of the next run
    with pytest.raises(ConfigError, match="no new data after shard"):
        train(options.model_copy(update={"new_data": True}))
    before = Trainer(open_target(trained), options).progress
    train(options)
    after = Trainer(open_target(trained), options)
    assert after.is_done and after.progress.num_rows == before.num_rows * 7 // 6
    assert (tmp_path / "curve.png").stat().st_size > 1000


@pytest.mark.parametrize("kind", ["trained", "blocks"])
def test_a_trained_draft_drafts_in_an_engine(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    trained: HeadOptions = request.getfixturevalue(kind)
    build_engines(trained.target, trained.output, tmp_path / "engine", draft_weights="fp32", kv_cache_dtype="fp32")
    requests, tokens, accepted = make_requests(), {}, {}
    for policy in ("none", "fixed:4"):
        engine = build_engine(tmp_path / "engine", EngineConfig.from_options(policy=policy, max_num_seqs=4))
        tokens[policy] = drive(engine, requests).tokens
        accepted[policy] = engine.metrics().num_accepted
        engine.close()
    assert tokens["none"] == tokens["fixed:4"]
    assert accepted["fixed:4"] > 0


def test_another_shape_than_training_began_with_is_refused(trained: HeadOptions, blocks: HeadOptions) -> None:
    with pytest.raises(ConfigError, match=f"num_ids = 7: training in .* began with {NUM_IDS}"):
        train(trained.model_copy(update={"num_ids": 7}))
    with pytest.raises(ConfigError, match=r"kind = block: training in .* began with eagle3"):
        train(trained.model_copy(update={"kind": "block"}))
    for stage in (train, save_trained):
        with pytest.raises(ConfigError, match=r"block_size = 7: training in .* began with 5"):
            stage(blocks.model_copy(update={"block_size": 7}))


def test_a_work_folder_goes_on_with_its_own_target_and_whole_checkpoints(trained: HeadOptions, tmp_path: Path) -> None:
    target = shutil.copytree(trained.target, tmp_path / "other")
    (target / "chat_template.jinja").unlink()
    other = copied(trained, tmp_path, "dialogues", "target.json", STATE_FILE, target=target)
    for stage in (write, train, save_trained):
        with pytest.raises(ConfigError, match=r"target = .*other \(\w{8}\): .* is that of target \(\w{8}\)"):
            stage(other)
    with pytest.raises(ConfigError, match="other: has no chat template"):
        write(other.model_copy(update={"work": tmp_path / "new"}))
    (tmp_path / STATE_FILE).write_bytes((tmp_path / STATE_FILE).read_bytes()[:1000])
    with pytest.raises(ConfigError, match=rf"{STATE_FILE}: damaged \(.+\); remove it to start over"):
        save_trained(other.model_copy(update={"target": trained.target}))


def test_options_of_the_other_kind_or_stage_are_refused_before_anything_is_written(run, tmp_path: Path) -> None:
    others = {*ChainDraft.SHAPE, "chain_length"} - {*BlockDraft.SHAPE}, {*BlockDraft.SHAPE} - {*ChainDraft.SHAPE}
    for kind, name in [("block", each) for each in others[0]] + [("eagle3", each) for each in others[1]]:
        option = f"--{name.replace('_', '-')}"
        status, _, err = run("train-head", "--target", "t", "--output", tmp_path, "--kind", kind, option, 3)
        assert (status, err) == (1, f"error: {name} = 3: not an option of kind {kind}\n")
    given = {"write": ("chain_length", 3), "train": ("num_slots", 3), "save": ("tokens_per_step", 3)}
    for stage, (name, value) in given.items():
        option = f"--{name.replace('_', '-')}"
        status, _, err = run("train-head", "--target", "t", "--output", tmp_path, "--stage", stage, option, value)
        assert (status, err) == (1, f"error: {name} = {value}: not an option of stage {stage}\n")
    assert not [*tmp_path.iterdir()] and sorted(map(len, others)) == [2, 3]


def test_the_last_check_of_blocks_is_drawn_by_chance(blocks: HeadOptions) -> None:
    bins = np.array(load_state(blocks)["progress"]["bins"])
    assert (np.diff(np.floor(bins[:, 1] * 10)) > 0).all() and bins[:, 0].sum() >= 20
    height, width, _ = matplotlib.image.imread(blocks.folder / "curve.png").shape
    assert width > 3 * height


def test_without_torch_there_is_one_error(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "torch" else found(name, *a))
    status, out, err = run("train-head", "--target", tmp_path, "--output", tmp_path / "head")
    assert (status, out) == (1, "") and err == "error: train-head needs torch: pip install 'faser-backend[train]'\n"

"""Builds an engine on fake runners and drives it with arrivals, cancellations and checks; makes records of steps."""

from dataclasses import dataclass, field

import numpy as np

from faser_backend.core.config import EngineConfig
from faser_backend.core.decision import WHOLE, Decision
from faser_backend.core.frontier import Acceptance, Frontier, Verification
from faser_backend.core.plan import InFlight, StepPlan, StepRecord
from faser_backend.core.ports import Lanes, Partition, PhaseTimes
from faser_backend.core.request import EngineOutput, Limits, Request, Sampling
from faser_backend.core.sequence import Sequence
from faser_backend.cpu.sampler import NumpySampler
from faser_backend.pipeline.draft import ModelProposer
from faser_backend.pipeline.engine import Engine, Ports, assemble
from faser_backend.pipeline.joint import JointProposer
from faser_backend.pipeline.ngram import NgramProposer
from faser_backend.pipeline.propose import Proposer
from faser_backend.pipeline.step import StepRunner
from faser_backend.policy.registry import parse_policy
from faser_backend.policy.speculation import Knowledge, SpeculationPolicy
from faser_backend.serving.profile_store import ModelSize, default_cost_model
from tests.support.fakes import CountingClock, HashRunner

VOCAB, CONTEXT, BLOCK = 24, 96, 4
SPLIT = "1/1"  # the partition on which fake engines can overlap


def guessed() -> Knowledge:
    """Returns the default times for the demo pair's sizes, as if no engine had been profiled."""
    target = ModelSize(num_layers=(6,), layer_weights=800_000, head_weights=520_000)
    draft = ModelSize(num_layers=(2,), layer_weights=200_000, head_weights=260_000)
    return Knowledge(default_cost_model(target, draft))


@dataclass
class FakeEngine:
    """An engine and its fakes. The runners of both partitions share their K/V."""

    engine: Engine
    targets: list[HashRunner]  # of WHOLE, and of SPLIT if there are lanes
    drafts: list[HashRunner]
    step_runner: StepRunner


def fake_engine(policy: str | SpeculationPolicy = "none", **options) -> tuple[Engine, HashRunner]:
    """Returns an engine with the real scheduler, pipeline and sampler on fake models, and its target."""
    fake = open_fake(policy, **options)
    return fake.engine, fake.targets[0]


def open_fake(
    policy: str | SpeculationPolicy = "none",
    *,
    lanes: Lanes | None = None,
    num_layers: tuple[int, ...] = (1,),
    num_blocks: int = 200,
    max_num_seqs: int = 8,
    max_prefill_tokens: int = 16,
    max_queue_size: int = 0,
    never_evicts: bool = False,
    can_reuse: bool = True,
    uses_rejection: bool = False,
    vocab_size: int = VOCAB,
    draft_noise: float = 0.3,
    draft_memory: int = 6,
    has_ngrams: bool = False,
    has_both: bool = False,
    **ports,
) -> FakeEngine:
    """Returns such an engine with its parts.

    num_layers: layers of each segment of the target. has_ngrams: n-grams draft instead of a model; has_both: n-grams
    and a model draft. ports: further fields of Ports.
    """
    if isinstance(policy, str):
        policy = parse_policy(policy, guessed)
    num_partitions = 1 if lanes is None else 2
    targets: list[HashRunner] = []
    drafts: list[HashRunner] = []
    for _ in range(num_partitions):
        pools = targets[0].pools if targets else None
        targets.append(HashRunner(num_blocks, BLOCK, vocab_size, num_layers=num_layers, pools=pools))
        pools = drafts[0].pools if drafts else None
        drafts.append(HashRunner(num_blocks, BLOCK, vocab_size, memory=draft_memory, noise=draft_noise, pools=pools))
    if has_ngrams or not policy.is_drafting:
        drafts = []
    clock = CountingClock()
    sampler = NumpySampler(vocab_size, max_num_seqs)
    partitions = {WHOLE: Partition(targets[0], drafts[0] if drafts else None, None)}
    if lanes is not None:
        partitions[SPLIT] = Partition(targets[1], drafts[1] if drafts else None, lanes)

    def make_proposer(times: PhaseTimes, block_tables: np.ndarray) -> Proposer:
        look_ups = NgramProposer(times)
        if has_ngrams:
            return look_ups
        model = ModelProposer(sampler, times, block_tables, keeps_probs=uses_rejection)
        return JointProposer(model, look_ups, max_prefill_tokens) if has_both else model

    limits = Limits(vocab_size, CONTEXT)
    given = Ports(partitions, sampler, clock, make_proposer, num_blocks, BLOCK, limits, **ports)
    config = EngineConfig.from_options(
        max_num_seqs=max_num_seqs,
        max_prefill_tokens=max_prefill_tokens,
        max_queue_size=max_queue_size,
        enable_prefix_reuse=can_reuse,
        admission="guaranteed_no_evict" if never_evicts else "max_utilization",
    )
    engine = assemble(given, policy, config)
    return FakeEngine(engine, targets, drafts, engine.step_runner)


def request(request_id: str, prompt: list[int], max_tokens: int = 20, **options) -> Request:
    sampling = options.pop("sampling", Sampling())
    return Request(request_id, np.array(prompt, np.int64), max_tokens, sampling, **options)


def step_record(
    sequences: list[Sequence],
    num_drafted: list[int] | np.ndarray,
    num_accepted: list[int] | np.ndarray,
    *,
    num_kept: np.ndarray | None = None,
    margins: np.ndarray | None = None,
    us: float = 0.0,
) -> StepRecord:
    """Returns the record of a serial step of `us` microseconds, of which 0.3 drafted and 0.6 verified.

    num_kept: by default every row runs through the whole target. margins: [B, K], 1.2 unless given.
    """
    drafted, accepted = np.array(num_drafted), np.array(num_accepted)
    size, width, lengths = drafted.size, int(drafted.max()), drafted.tolist()
    margins = np.full((size, width), 1.2, np.float32) if margins is None else margins
    return StepRecord(
        StepPlan(Decision(lengths), InFlight.empty(), decodes=sequences, num_draft_tokens=lengths),
        Frontier(np.zeros((size, width), np.int64), drafted, drafted + 1, margins),
        Verification(
            np.zeros((0, 0), np.float32),
            np.concatenate([[0], np.cumsum(drafted + 1)]),
            drafted + 1 if num_kept is None else num_kept,
            0,
        ),
        Acceptance(np.zeros((size, width + 1), np.int64), accepted, accepted + 1),
        np.array([sequence.num_tokens for sequence in sequences]),
        start_ns=0,
        end_ns=int(us * 1e3),
        propose_us=0.3 * us,
        verify_us=0.6 * us,
        overlap_us=0.0,
    )


@dataclass
class Driven:
    """Outputs, tokens and final output of every request of a run."""

    outputs: dict[str, list[EngineOutput]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    log_probs: dict[str, list[float]] = field(default_factory=dict)
    final: dict[str, EngineOutput] = field(default_factory=dict)


def drive(
    engine: Engine,
    requests: list[Request],
    *,
    seed: int | None = None,
    cancel: dict[str, int] | None = None,
    check: bool = True,
) -> Driven:
    """Submits all requests at once, or at random times if a seed is given, and steps until all have ended.

    cancel: request id -> number of output tokens after which it is cancelled.
    """
    rng = np.random.default_rng(seed)
    pending, result = list(requests), Driven()
    while pending or engine.has_work:
        while pending and (seed is None or rng.random() < 0.4):
            engine.submit(pending.pop(0))
        for output in engine.step():
            result.outputs.setdefault(output.request_id, []).append(output)
            collected = result.tokens.setdefault(output.request_id, [])
            assert output.request_id not in result.final, "output after the final one"
            collected.extend(output.token_ids)
            result.log_probs.setdefault(output.request_id, []).extend(output.log_probs or [])
            if output.is_final:
                result.final[output.request_id] = output
            elif cancel and len(collected) >= cancel.get(output.request_id, 10**9):
                engine.cancel(output.request_id)
        if check:
            engine.check_integrity()
    metrics = engine.metrics()
    assert metrics.num_free_blocks == metrics.num_blocks, "blocks leaked"
    assert set(result.final) == {r.request_id for r in requests}
    return result

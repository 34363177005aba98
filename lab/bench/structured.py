"""Structured output on a real model: validity, acceptance and speed with grammars and without.

    python -m lab.bench.structured ENGINE_DIR --suite FOLDER

FOLDER holds files of the official JSON Schema Test Suite (tests/draft7; the source distribution of the package
`jsonschema` has them under json/tests). The model is asked through its chat template for a value of each schema. What
the suite itself calls valid has to be let through by the schema's grammar, and answers that end are judged by
`jsonschema`. Contestants take turns, a group of schemas each. Writes structured.md.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jsonschema import Draft7Validator

from faser_backend.config import EngineConfig
from faser_backend.core.errors import RequestError
from faser_backend.core.grammar import Grammar
from faser_backend.core.request import FinishReason, Request, SamplingParams
from faser_backend.device.grammar_rule import GrammarRule
from faser_backend.manifest import EngineManifest
from faser_backend.pipeline.engine import Engine
from faser_backend.serving.compose import build_engine
from faser_backend.serving.guides import GuideCompiler, read_guide
from faser_backend.serving.prompts import PromptFormat
from faser_backend.serving.tokenizer import TextTokenizer
from lab import environment
from lab.options import make_parser
from lab.tables import Column, markdown_table

GROUP = 20  # schemas that a contestant answers before the next one has its turn
POLICIES = ("none", "fixed:4", "faser")
COLUMNS = (
    Column("grammar", "grammar"),
    Column("`--policy`", "policy"),
    Column("ended", "ended", "{:.0%}"),
    Column("of these valid", "valid", "{:.1%}"),
    Column("tokens", "num_tokens"),
    Column("tokens/s", "speed", "{:.0f}"),
    Column("of plain", "ratio", "{:.2f}x"),
    Column("accepted per step", "accepted", "{:.2f}"),
    Column("grammar work, ms per step", "mask_ms", "{:.2f}"),
    Column("of the step", "mask_share", "{:.1%}"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A schema, what it accepts by the suite's own word, and its compiled grammar."""

    schema: Any
    valid: list[str]
    grammar: Grammar


@dataclass(slots=True)
class Contestant:
    """One engine and what it answered."""

    policy: str
    has_grammar: bool
    engine: Engine
    seconds: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    num_accepted: int = 0
    mask_s: float = 0.0
    verdicts: Counter[str] = field(default_factory=Counter)


def read_suite(folder: Path) -> Iterator[tuple[Any, list[str]]]:
    """Schemas that are objects, and values that the suite calls valid, as the grammars write JSON."""
    for file in sorted(folder.glob("*.json")):
        for group in json.loads(file.read_text()):
            valid = [json.dumps(test["data"], ensure_ascii=False) for test in group["tests"] if test["valid"]]
            if isinstance(group["schema"], dict) and valid:
                yield group["schema"], valid


class TimedRule:
    """Adds up what all grammar rules take."""

    seconds = 0.0

    def __init__(self) -> None:
        for name in ("allowed", "append", "forced"):
            setattr(GrammarRule, name, self._timed(getattr(GrammarRule, name)))

    def _timed(self, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - start

        return call


def legal_share(case: Case, tokenizer: TextTokenizer, end_id: int) -> tuple[int, int]:
    """How many of the suite's valid values the grammar lets through to their end, and how many there are."""
    masks = [GrammarRule(case.grammar, []).allowed(tokenizer.encode(text)) for text in case.valid]
    return sum(mask is not None and bool(mask[end_id]) for mask in masks), len(masks)


def serve(contestant: Contestant, requests: list[tuple[Case, Request]], timer: TimedRule, end_id: int, text_of) -> None:
    """All at once; what is measured is added to the contestant's."""
    cases = {request.request_id: case for case, request in requests}
    answers: dict[str, list[int]] = {request.request_id: [] for _, request in requests}
    start, before = time.perf_counter(), timer.seconds
    for _, request in requests:
        contestant.engine.submit(request)
    while contestant.engine.has_work:
        contestant.num_steps += 1
        for output in contestant.engine.step():
            answers[output.request_id] += output.token_ids
            if output.is_final:
                assert output.error is None, output.error
                assert output.stats is not None
                contestant.num_accepted += output.stats.num_accepted
                ended = output.finish_reason is FinishReason.END_ID
                verdict = _verdict(text_of(answers[output.request_id][:-1]), cases[output.request_id].schema)
                contestant.verdicts[verdict if ended else "cut"] += 1
    contestant.seconds += time.perf_counter() - start
    contestant.mask_s += timer.seconds - before
    contestant.num_tokens += sum(map(len, answers.values()))


def _verdict(text: str, schema: Any) -> str:
    try:
        return "valid" if Draft7Validator(schema).is_valid(json.loads(text)) else "invalid"
    except ValueError:
        return "invalid"


def row_of(contestant: Contestant, plain: Contestant) -> dict[str, Any]:
    ended = contestant.verdicts["valid"] + contestant.verdicts["invalid"]
    speed = contestant.num_tokens / contestant.seconds
    return {
        "grammar": "yes" if contestant.has_grammar else "no",
        "policy": f"`{contestant.policy}`",
        "ended": ended / max(contestant.verdicts.total(), 1),
        "valid": contestant.verdicts["valid"] / max(ended, 1),
        "num_tokens": contestant.num_tokens,
        "speed": speed,
        "ratio": speed / (plain.num_tokens / plain.seconds),
        "accepted": contestant.num_accepted / contestant.num_steps,
        "mask_ms": 1e3 * contestant.mask_s / contestant.num_steps,
        "mask_share": contestant.mask_s / contestant.seconds,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("engine_dir", type=Path)
    parser.add_argument("--suite", type=Path, required=True)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--output", type=Path, default=Path())
    options = parser.parse_args()
    manifest = EngineManifest.load(options.engine_dir)
    tokenizer_file = options.engine_dir / manifest.tokenizer.name
    prompts = PromptFormat.load(options.engine_dir, manifest)
    tokenizer = TextTokenizer.from_file(tokenizer_file, prompts)
    compiler = GuideCompiler(tokenizer_file, manifest.target.spec.vocab_size, manifest.end_ids)
    cases, refused = [], Counter[str]()
    for schema, valid in read_suite(options.suite):
        try:
            cases.append(Case(schema, valid, compiler.compile(read_guide("json_schema", json.dumps(schema)))))
        except RequestError as error:
            refused[str(error).rpartition(": ")[2][:60]] += 1
    passed, num_valid = map(
        sum, zip(*(legal_share(case, tokenizer, manifest.end_ids[0]) for case in cases), strict=True)
    )
    num_compiled, cases = len(cases), cases[:: max(len(cases) // options.schemas, 1)][: options.schemas]
    timer = TimedRule()
    contestants = [
        Contestant(policy, has_grammar, build_engine(options.engine_dir, EngineConfig.from_options(
            policy=policy, max_num_seqs=options.clients, max_queue_size=0)))
        for has_grammar in (False, True) for policy in POLICIES
    ]  # fmt: skip
    for first in range(0, len(cases), GROUP):
        for contestant in contestants:
            requests = []
            for index, case in enumerate(cases[first : first + GROUP], first):
                ask = f"Write one JSON value that is valid under this JSON schema, and nothing else: {case.schema}"
                _, ids = tokenizer.encode_chat("messages", json.dumps([{"role": "user", "content": ask}]))
                sampling = SamplingParams(
                    temperature=options.temperature,
                    seed=index,
                    grammar=case.grammar if contestant.has_grammar else None,
                )
                request = Request(
                    str(index), np.array(ids, np.int64), options.max_tokens, sampling, end_ids=manifest.end_ids
                )
                requests.append((case, request))
            serve(contestant, requests, timer, manifest.end_ids[0], tokenizer.decode)
    plain = contestants[0]
    rows = [
        row_of(each, next(one for one in contestants if one.policy == "none" and one.has_grammar == each.has_grammar))
        for each in contestants
    ]
    assert plain.policy == "none"
    meta = environment.describe(seed=0)
    lines = [
        "# Structured output",
        "",
        f"{options.engine_dir.name}, {len(cases)} schemas of the JSON Schema Test Suite (draft 7), {options.clients} "
        f"requests at once, temperature {options.temperature:g}, at most {options.max_tokens} tokens, contestants in "
        f"turns. {meta['device']}, {meta['num_cores']} cores, {meta['date']}, commit {meta['commit']}.",
        "Remade by `python -m lab.bench.structured ENGINE_DIR --suite FOLDER`.",
        "",
        f"Of {num_compiled + refused.total()} schemas {num_compiled} are compiled, {refused.total()} refused. "
        f"The compiled grammars let {passed} of {num_valid} values through that the suite calls valid.",
        "",
        *markdown_table(COLUMNS, rows),
        "",
        "Of plain: tokens per second over those of plain decoding with the same grammars, or without. Accepted per "
        "step: draft tokens of all requests, those that a grammar forced included.",
        "",
        "Refused, by the library's words: "
        + "; ".join(f"{reason} ({count})" for reason, count in refused.most_common(12))
        + ".",
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "structured.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

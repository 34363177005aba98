"""Grammars: answers follow them and equal plain decoding with the same grammar, for every way of drafting."""

import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Queue

import numpy as np
import pytest

from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ErrorCode, FaserError, RequestError
from faser_backend.core.request import GUIDE, EngineOutput, FinishReason, Grammar, Request, Sampling
from faser_backend.cpu.logit_rules import GrammarRule
from faser_backend.engines.build import build_engines
from faser_backend.pipeline.engine import Engine
from faser_backend.serving.compose import build_engine
from faser_backend.serving.engine_loop import EngineLoop
from faser_backend.text.guides import MAX_GUIDE_BYTES, MAX_WAITING, GuideCompiler, read_guide
from faser_backend.text.tokenizer import TextTokenizer
from tests.support.harness import Driven, drive
from tests.support.serving_pair import END_ID, write_pair

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "größe"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
DATE = r"on [0-9]{4}-[01][0-9] (at noon|at [0-9]{2}:[0-9]{2})"
LIST = 'root ::= "[" item ("," item){0,5} "]"\nitem ::= "yes" | "no" | [0-9]'
TAGGED = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": {"type": "object", "additionalProperties": False}, "end": "</f>"}],
    "triggers": ["<f="],
}
GUIDES = {
    "person": read_guide("json_schema", json.dumps(PERSON)),
    "date": read_guide("regex", DATE),
    "list": read_guide("ebnf_grammar", LIST),
}


def is_person(text: str) -> bool:
    person = json.loads(text)
    return (
        list(person) == ["name", "age", "tags"]
        and len(person["name"]) <= 6
        and 0 <= person["age"] <= 120
        and set(person["tags"]) <= {"a", "bb", "größe"}
    )


IS_VALID: dict[str, Callable[[str], object]] = {
    "person": is_person,
    "date": lambda text: re.fullmatch(DATE, text),
    "list": lambda text: re.fullmatch(r"\[(yes|no|[0-9])(,(yes|no|[0-9])){0,5}\]", text),
}


class Built:
    """An engine directory of a random pair, its grammars and its text."""

    def __init__(self, directory: Path) -> None:
        pair = write_pair(directory / "pair")
        self.directory = directory / "engine"
        build_engines(pair / "target", pair / "draft", self.directory, runtime="llvm")
        tokenizer_file = self.directory / "tokenizer.json"
        self.tokenizer = TextTokenizer.from_file(tokenizer_file)
        self.compiler = GuideCompiler(tokenizer_file, self.tokenizer.vocab_size, (END_ID,))

    def requests(self, count: int = 9, **options: object) -> list[Request]:
        """Returns requests that cycle through the grammars, greedy and sampled."""
        made = []
        for index in range(count):
            sampling = Sampling(
                temperature=(0.0, 1.0)[index % 2], seed=index, grammar=self.grammar(self.kind(index)), **options
            )
            prompt = np.array(self.tokenizer.encode(f"def f{index}"), np.int64)
            made.append(Request(f"{index}", prompt, 120, sampling, end_ids=(END_ID,)))
        return made

    @staticmethod
    def kind(index: int) -> str:
        return list(GUIDES)[index % len(GUIDES)]

    def grammar(self, kind: str) -> Grammar:
        return self.compiler.compile(GUIDES[kind])

    def run(self, policy: str, requests: list[Request], **options: object) -> tuple[Driven, Engine]:
        fields = {"policy": policy, "max_num_seqs": 4, "max_prefill_tokens": 32, **options}
        engine = build_engine(self.directory, EngineConfig.from_options(**fields))
        driven = drive(engine, requests, seed=3)
        engine.close()
        return driven, engine

    def text(self, tokens: list[int]) -> str:
        assert tokens[-1] == END_ID
        return self.tokenizer.decode(tokens[:-1])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("grammar"))


@pytest.fixture(scope="module")
def plain(built: Built) -> dict[str, list[int]]:
    return built.run("none", built.requests())[0].tokens


def test_answers_obey_their_grammars_and_would_not_without(built: Built, plain: dict[str, list[int]]) -> None:
    for index, tokens in plain.items():
        assert IS_VALID[built.kind(int(index))](built.text(tokens))
    free = [replace(each, sampling=replace(each.sampling, grammar=None), max_tokens=30) for each in built.requests(3)]
    for index, tokens in built.run("none", free)[0].tokens.items():
        with pytest.raises((AssertionError, ValueError)):
            assert IS_VALID[built.kind(int(index))](built.text(tokens))


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        *((policy, {}) for policy in ("fixed:1", "fixed:4", "faser", "gp-lcb")),
        *((policy, {"num_kv_blocks": 64}) for policy in ("fixed:4", "faser")),  # sequences are preempted
        *((policy, {"draft": "ngram"}) for policy in ("fixed:4", "faser")),
        *(("fixed:4", {"pipeline": mode}) for mode in ("run_ahead", "ping_pong")),
    ],
)
def test_tokens_equal_plain_decoding(
    built: Built, plain: dict[str, list[int]], policy: str, options: dict[str, object]
) -> None:
    driven, engine = built.run(policy, built.requests(), **options)
    assert driven.tokens == plain
    assert engine.metrics().num_accepted > 0
    if (policy, options) == ("fixed:4", {}):  # the draft is the target: greedy chains are accepted whole
        stats = [driven.final[f"{index}"].stats for index in range(0, len(plain), 2)]
        assert all(each is not None and each.num_accepted == each.num_tested > 0 for each in stats)


def test_rejection_sampling_obeys_grammars(built: Built) -> None:
    driven, _ = built.run("fixed:3", built.requests(), acceptance="rejection")
    for index, tokens in driven.tokens.items():
        assert IS_VALID[built.kind(int(index))](built.text(tokens))


def test_what_a_grammar_forces_is_drafted_without_a_model(built: Built, plain: dict[str, list[int]]) -> None:
    """N-grams find nothing in these prompts, so only forced tokens are accepted."""
    driven, _ = built.run("fixed:4", built.requests(), draft="ngram")
    assert driven.tokens == plain
    first = driven.final["0"].stats
    assert first is not None and first.num_steps < len(plain["0"]) - 5, '{"name": " and ", "age": and ", "tags": ['
    silent = [replace(each, max_draft_tokens=0) for each in built.requests()]
    assert built.run("fixed:4", silent, draft="ngram")[1].metrics().num_drafted == 0


def test_a_grammar_is_above_the_other_rules(built: Built) -> None:
    """Other rules yield if they leave no legal token; a cut answer is the beginning of a legal one."""
    digits = tuple((token,) for token in range(built.tokenizer.vocab_size) if built.tokenizer.decode([token]).isdigit())
    driven, _ = built.run("fixed:2", built.requests(3, bad_words=digits, min_tokens=110))
    for index, tokens in driven.tokens.items():
        assert IS_VALID[built.kind(int(index))](built.text(tokens))


def test_the_walker_says_what_a_fresh_one_says(built: Built) -> None:
    grammar = built.grammar("person")
    rng = np.random.default_rng(0)
    rule, committed = GrammarRule(grammar, []), []
    for _ in range(12):
        for _ in range(6):
            path = []
            for _ in range(int(rng.integers(0, 5))):
                legal = GrammarRule(grammar, [*committed, *path]).allowed([])
                assert legal is not None and np.array_equal(rule.allowed(path), legal)
                path.append(int(rng.choice(np.flatnonzero(legal))))
            illegal = int(rng.choice(np.flatnonzero(~GrammarRule(grammar, [*committed, *path]).allowed([]))))
            if path and path[-1] != END_ID:
                assert rule.allowed([*path, illegal]) is None and rule.allowed([*path, illegal, 5]) is None
        legal = rule.allowed([])
        assert legal is not None
        choices = [token for token in np.flatnonzero(legal) if token != END_ID]
        if not choices:
            break
        committed.append(int(rng.choice(choices)))
        rule.append(committed[-1:])
    with pytest.raises(FaserError, match="the grammar of this request forbids them"):
        rule.append([int(np.flatnonzero(~rule.allowed([]))[0])])


@pytest.mark.parametrize(
    ("kind", "guide", "message"),
    [
        ("yaml", "x", "guided_decoding_guide_type = 'yaml': must be one of json, json_schema, regex"),
        ("regex", "", "guided_decoding_guide = '': a regex must not be empty"),
        ("json_schema", "{", "is not a valid json_schema: "),
        ("json_schema", "[" * 100_000, "is not a valid json_schema: "),
        ("json_schema", " " * (MAX_GUIDE_BYTES + 1), f"must be at most {MAX_GUIDE_BYTES} bytes"),
        ("structural_tag", '{"structures": [], "triggers": []}', "structures is empty"),
        ("structural_tag", "{}", "is not a valid structural_tag: "),
        # found by compiling
        ("regex", "(a+", "guided_decoding_guide = "),
        ("json_schema", '{"type": "nope"}', "guided_decoding_guide = "),
        ("json_schema", '{"$ref": "http://example.org/schema"}', "guided_decoding_guide = "),
        ("ebnf_grammar", "root ::= missing", "guided_decoding_guide = "),
    ],
)
def test_guides_that_cannot_be_read_or_compiled_cost_one_error(
    built: Built, kind: str, guide: str, message: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        built.compiler.compile(read_guide(kind, guide))


def test_any_json_and_tagged_text_can_be_asked_for(built: Built) -> None:
    encode = built.tokenizer.encode
    anything = GrammarRule(built.compiler.compile(read_guide("json", "")), [])
    assert anything.allowed(encode('{"a": [1, null, "x"]}')) is not None and anything.allowed(encode("{a")) is None
    tagged = GrammarRule(built.compiler.compile(read_guide("structural_tag", json.dumps(TAGGED))), [])
    assert tagged.allowed(encode("hello <f=a>{}</f> and more")) is not None
    assert tagged.allowed(encode("hello <f=a>[")) is None


# An object that must hold another one: no finite text satisfies it. And objects that hold two: 2 ** 60 strings.
ENDLESS = {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}, "required": ["c"]}}
DOUBLED = {
    f"d{level}": {
        "type": "object",
        "properties": {key: {"$ref": f"#/$defs/d{level + 1}"} for key in "ab"},
        "required": ["a", "b"],
    }
    for level in range(60)
}
SCHEMAS = {
    "recursive": {"$ref": "#/$defs/n", "$defs": ENDLESS},
    "wide": {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(5000)}},
    "doubled": {"$ref": "#/$defs/d0", "$defs": DOUBLED | {"d60": {"type": "string"}}},
    "recursive later": {  # behind a choice, which no compiler checks
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "n": {"$ref": "#/$defs/n"}},
        "required": ["a", "n"],
        "$defs": ENDLESS,
    },
}
FATES = {"recursive": "refused", "wide": "refused", "doubled": "answered", "recursive later": "failed"}


def test_a_hostile_schema_ends_its_own_request_alone(built: Built) -> None:
    """A schema that is too complex to compile is refused; one that becomes so later fails its request."""
    hostile = {}
    for name, schema in SCHEMAS.items():
        guide = read_guide("json_schema", json.dumps(schema))
        if FATES[name] == "refused":
            with pytest.raises(RequestError, match=r"guided_decoding_guide = .*(limit|too big)"):
                built.compiler.compile(guide)
        else:
            sampling = Sampling(grammar=built.compiler.compile(guide))
            hostile[name] = Request(name, np.array([5, 6], np.int64), 24, sampling, end_ids=(END_ID,))
    good = built.requests(3)
    undisturbed, _ = built.run("fixed:4", good)
    driven, engine = built.run("fixed:4", [*good, *hostile.values()], max_num_seqs=8)
    assert {key: driven.tokens[key] for key in undisturbed.tokens} == undisturbed.tokens
    assert engine.metrics().num_failed_steps == 0
    assert driven.final["doubled"].error is None
    failure = driven.final["recursive later"].error
    assert failure is not None and (failure.code, failure.field) == (ErrorCode.INVALID, GUIDE)
    assert "a limit of grammars was reached: " in failure.message


class ServedEngine:
    """A served engine whose compiler waits for an event."""

    def __init__(self, built: Built) -> None:
        self.gate = threading.Event()
        self.gate.set()
        gate = self.gate

        class Gated(GuideCompiler):
            def compile(self, guide: str):
                assert gate.wait(10.0)
                return super().compile(guide)

        engine = build_engine(built.directory, EngineConfig.from_options(policy="fixed:2"))
        guides = Gated(built.directory / "tokenizer.json", built.tokenizer.vocab_size, (END_ID,))
        self.loop = EngineLoop(engine, guides=guides)
        self.subscription = self.loop.subscribe()

    def submit(self, request_id: str, guide: str, end_id: int = END_ID) -> None:
        request = Request(request_id, np.array([5, 6], np.int64), 80, end_ids=(end_id,), guide=guide)
        self.subscription.submit(request, "client")

    def last(self) -> EngineOutput:
        while True:
            for output in self.subscription.outputs.get(timeout=20.0) or []:
                if output.is_final:
                    return output


@pytest.fixture
def served(built: Built):
    fixture = ServedEngine(built)
    yield fixture
    fixture.gate.set()
    fixture.loop.close()


def test_only_different_grammars_count_as_waiting(served: ServedEngine) -> None:
    guides, done = served.loop.guides, Queue()
    assert guides is not None
    served.gate.clear()
    for number in range(2 * MAX_WAITING):
        guides.compile_later(f"not a grammar: {max(0, number - MAX_WAITING)}", done.put)
    with pytest.raises(RequestError, match=f"{MAX_WAITING} grammars wait to be compiled; retry later") as refusal:
        guides.compile_later("not a grammar", done.put)
    assert refusal.value.code is ErrorCode.QUEUE_FULL
    served.gate.set()
    assert all(isinstance(done.get(timeout=20.0), RequestError) for _ in range(2 * MAX_WAITING))


def test_compiling_is_off_the_step_loop_and_may_be_cancelled(built: Built, served: ServedEngine) -> None:
    served.submit("known", GUIDES["date"])
    assert served.last().finish_reason is not None
    served.gate.clear()
    served.submit("waits", GUIDES["list"])
    served.submit("known again", GUIDES["date"])  # overtakes
    output = served.last()
    assert (output.request_id, output.error) == ("known again", None)
    served.subscription.cancel("waits")
    output = served.last()
    assert output.request_id == "waits" and output.finish_reason is not None
    assert output.finish_reason.value == "cancelled"
    served.gate.set()
    served.submit("bad", read_guide("regex", "(a+"))
    output = served.last()
    assert output.request_id == "bad" and "guided_decoding_guide = " in str(output.error)
    served.submit("after", GUIDES["date"], end_id=END_ID + 1)
    output = served.last()
    assert (output.request_id, output.error, output.finish_reason) == ("after", None, FinishReason.END_ID)
    assert output.token_ids[-1] == END_ID, "the model's own"

"""The commands `faser generate` and `faser chat`, over the Python API.

`faser generate` answers one prompt without a server; --explain prints what the policy compares. `faser chat` is a
conversation in the terminal: drafted tokens that were accepted are green on a terminal with colours; elsewhere nothing
marks them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from faser_backend.cli.options import CHAT, JSON, SYSTEM, SamplingOptions, parse_integers, takes
from faser_backend.core.config import EngineConfig, OptionTable, option
from faser_backend.core.errors import ConfigError, RequestError
from faser_backend.serving.parameters import RunOptions, ServingOptions

if TYPE_CHECKING:
    from faser_backend.api.batch import Prompt
    from faser_backend.api.llm import LLM
    from faser_backend.api.outputs import CompletionOutput, RequestOutput
    from faser_backend.api.params import SamplingParams
    from faser_backend.core.decision import Score
    from faser_backend.core.plan import StepRecord


class GenerateOptions(OptionTable):
    """The options of `faser generate` alone: a prompt in one of three forms, and the output."""

    prompt: str | None = option(None, "Complete this text.")
    prompt_ids: str | None = option(None, "Complete these token ids, as 1,2,3.")
    messages: Path | None = option(None, 'Answer the {"role", "content"} messages in this JSON file.')
    is_chat: bool = option(False, CHAT)
    system: str | None = option(None, SYSTEM)
    is_json: bool = option(False, JSON)
    explain: bool = option(False, "Print what the policy compared, to stderr.")


@takes(
    run=RunOptions,
    options=GenerateOptions,
    serving=(ServingOptions, "chat_template"),
    draws=SamplingOptions,
    engine=(EngineConfig, "policy acceptance early_exit pipeline num_threads lora"),
)
def generate(
    *, run: RunOptions, options: GenerateOptions, serving: ServingOptions, draws: SamplingOptions, engine: EngineConfig
) -> None:
    """Complete one prompt without a server.

    Print the text as it grows, then speed and acceptance.
    """
    from faser_backend.api.params import SamplingParams

    asked = read_prompt(options, serving.chat_template)
    params = SamplingParams(**draws.model_dump(), include_stop_str_in_output=True)
    on_step = explainer(partial(print, file=sys.stderr)) if options.explain else None
    with _opened(run, serving, engine, params, on_step) as llm:
        result = _answer(llm, asked, params, next(iter(engine.adapters), ""), is_shown=not options.is_json)
    print(json.dumps(result) if options.is_json else f"\n{report_line(result)}")


@contextlib.contextmanager
def _opened(
    run: RunOptions,
    serving: ServingOptions,
    engine: EngineConfig,
    params: SamplingParams,
    on_step: Callable[[StepRecord], None] | None = None,
) -> Iterator[LLM]:
    """Checks the parameters, and opens the engine for one request at a time."""
    from faser_backend.api.batch import check_params
    from faser_backend.api.llm import LLM
    from faser_backend.manifest import EngineManifest
    from faser_backend.serving.loading import shown_phases
    from faser_backend.serving.model_source import find_engine

    check_params(params)
    if run.engine_dir is not None:
        EngineManifest.load(run.engine_dir)  # refuses a mistyped path, which could be the name of a model
    found = find_engine(run, policy=engine.policy)
    given = {**engine.model_dump(exclude_unset=True), **found, "max_num_seqs": 1, "on_step": on_step}
    with shown_phases(in_pipes=False) as phases, LLM(chat_template=serving.chat_template, **given) as llm:
        phases.end()
        yield llm


def read_prompt(options: GenerateOptions, chat_template: Path | None) -> Prompt:
    """Returns the prompt that the options give. Raises RequestError if they contradict each other."""
    from faser_backend.text.prompts import read_messages

    prompt, system, messages = options.prompt, options.system, options.messages
    ids = None if options.prompt_ids is None else parse_integers("--prompt-ids", options.prompt_ids)
    if not options.is_chat:
        for flag, value in (("--system", system), ("--messages", messages), ("--chat-template", chat_template)):
            if value is not None:
                raise RequestError(flag, str(value), "is for conversations: give --chat too")
        if (prompt is None) == (ids is None):
            raise RequestError("prompt", prompt, "give exactly one of --prompt and --prompt-ids")
        if not (given := prompt or list(ids or ())):
            raise RequestError("prompt" if ids is None else "--prompt-ids", "", "is empty; at least 1 token is needed")
        return given
    if ids is not None:
        raise RequestError("--prompt-ids", list(ids), "cannot be a message: leave --chat out")
    if (prompt is None) == (messages is None):
        raise RequestError("prompt", prompt, "give exactly one of --prompt and --messages with --chat")
    if messages is None:
        before = [] if system is None else [{"role": "system", "content": system}]
        return [*before, {"role": "user", "content": prompt}]
    if system is not None:
        raise RequestError("--system", system, "write it into the file of --messages as its first message")
    try:
        return read_messages("messages", messages.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("--messages", str(messages), f"not readable as text ({error})") from None


def _answer(llm: LLM, prompt: Prompt, params: SamplingParams, lora: str, *, is_shown: bool) -> dict[str, Any]:
    """Streams an answer to stdout if it is shown, and returns its figures.

    The counts by source include accepted tokens after the end of the answer.
    """
    started_s = time.perf_counter()
    last: RequestOutput | None = None
    for last in llm.stream(prompt, params, lora):
        if is_shown:
            print(last.outputs[0].text_diff, end="", flush=True)
    seconds = time.perf_counter() - started_s
    assert last is not None  # a stream has at least one output
    answer = last.outputs[0]
    assert answer.stats is not None  # every answer that has ended has them
    metrics = llm.metrics()
    ended_by = "end_id" if answer.stop_reason is None else "stop_words"  # the server's words
    return {
        "token_ids": answer.token_ids,
        "text": answer.text,
        "num_drafted": answer.stats.num_drafted,
        "num_accepted": answer.stats.num_accepted,
        "num_drafted_by_source": dict(+metrics.num_drafted_by_source),
        "num_accepted_by_source": dict(+metrics.num_accepted_by_source),
        "num_pruned": answer.stats.num_pruned,
        "tokens_per_s": round(len(answer.token_ids) / seconds, 1),
        "finish_reason": "length" if answer.finish_reason == "length" else ended_by,
        "seed": answer.seed,
    }


def accepted_words(num_drafted: int, num_accepted: int) -> str:
    if not num_drafted:
        return "nothing drafted"
    return f"accepted {num_accepted} of {num_drafted} drafted tokens ({num_accepted / num_drafted:.0%})"


def report_line(result: dict[str, Any]) -> str:
    speed = f"{len(result['token_ids'])} tokens, {result['tokens_per_s']:,.1f} tokens/s"
    drafts = accepted_words(result["num_drafted"], result["num_accepted"])
    pruning = f"; {result['num_pruned']} rows pruned" if result["num_pruned"] else ""
    return f"== {speed}; {drafts}{pruning}; ended by {result['finish_reason']}"


def explainer(print_line: Callable[[str], None]) -> Callable[[StepRecord], None]:
    """Returns an observer of steps that prints the candidates whenever the policy compared them again."""
    shown: tuple[Score, ...] = ()
    num_steps = 0

    def observe(record: StepRecord) -> None:
        nonlocal shown, num_steps
        num_steps += 1
        decision = record.plan.decision
        if decision.scores and decision.scores is not shown:
            shown = decision.scores
            why = "explores" if decision.reason == "exploration" else "runs"
            mode = decision.mode.value if any(decision.num_draft_tokens) else "plain"
            gain = f"at best {decision.tokens_per_us / shown[0].tokens_per_us:.2f}x the speed of plain decoding"
            work = f"{record.num_tokens.size} request(s), {why} {mode} on {decision.partition}; {gain}"
            print_line(f"-- step {num_steps}: {work}\n{score_table(shown)}")

    return observe


def score_table(scores: tuple[Score, ...]) -> str:
    """Returns a line per candidate, with a mark at the best one."""
    from faser_backend.core.decision import WHOLE

    best = max(scores, key=lambda score: score.tokens_per_us)
    lines = ["   way                      draft  floor  tokens  time us  tokens/ms"]
    for score in scores:
        way = "plain" if score.mode is None else score.mode.value
        way += "" if score.partition == WHOLE else f" on {score.partition}"
        lines.append(
            f" {'*' if score is best else ' '} {way:24} {score.num_draft_tokens:5} {score.floor:6.2f} "
            f"{score.num_tokens:7.2f} {score.step_us:8.0f} {1e3 * score.tokens_per_us:10.3f}"
        )
    return "\n".join(lines)


# -- faser chat -------------------------------------------------------------------------------------------------------
DRAFTED = "green"


class ChatOptions(SamplingOptions):
    """The options of a conversation; answers may be longer than those of `faser generate`."""

    system: str | None = option(None, SYSTEM)
    max_tokens: int = option(256, SamplingOptions.options()["max_tokens"])


@takes(
    run=RunOptions,
    serving=(ServingOptions, "chat_template"),
    options=(ChatOptions, "system max_tokens temperature top_p seed"),
    engine=(EngineConfig, "policy num_threads"),
)
def chat(*, run: RunOptions, serving: ServingOptions, options: ChatOptions, engine: EngineConfig) -> None:
    """Talk to a model in the terminal.

    Enter a message per line. Type /reset to restart, /quit to end.
    """
    from faser_backend.api.params import SamplingParams
    from faser_backend.text.prompts import NO_TEMPLATE

    params = SamplingParams(**options.model_dump(exclude_unset=True, exclude={"system"}))
    with _opened(run, serving, engine, params) as llm:
        if not llm.has_chat_template:
            raise ConfigError(f"{llm.engine_dir}: {NO_TEMPLATE}")
        _Talk(llm, params, options.system).run()


class _Talk:
    """A conversation over a terminal or a pipe."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm, self._params = llm, params
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._messages = [*self._start]
        self._console = Console(highlight=False)
        self._has_colour = self._console.is_terminal and not self._console.no_color
        self._is_typed = sys.stdin.isatty()

    def run(self) -> None:
        """Answers messages until /quit or the end of the input."""
        if self._is_typed:
            with contextlib.suppress(ImportError):  # some Pythons lack it; input() then has no history
                import readline  # noqa: F401 - input() edits lines with it
            self._note("/reset starts over, /quit ends" + "; green: drafted and accepted" * self._has_colour)
        while (line := self._read()) is not None and line != "/quit":
            if line == "/reset":
                self._messages = [*self._start]
                self._note("a new conversation")
            elif line:
                self._answer(line)

    def _read(self) -> str | None:
        """Returns the next line, None at the end of the input."""
        if not self._is_typed:
            line = sys.stdin.readline()
            return line.strip() if line else None
        try:
            return input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return None

    def _answer(self, message: str) -> None:
        """Streams the answer, then prints its figures. Ctrl-C on a terminal ends the answer alone."""
        asked = {"role": "user", "content": message}
        started_s = time.perf_counter()
        last: RequestOutput | None = None
        try:
            for last in self._llm.stream([*self._messages, asked], self._params):
                self._show(last.outputs[0])
        except RequestError as error:
            if error.field in type(self._params).model_fields:
                raise  # every later message would fail too
            # The conversation exceeds the context, or the template refuses it.
            self._note(f"{error}; /reset starts over")
            return
        except KeyboardInterrupt:
            if not self._is_typed:
                raise
        print()
        if last is not None:
            self._note(_figures(last, time.perf_counter() - started_s))
            self._messages += [asked, {"role": "assistant", "content": last.text}]

    def _show(self, answer: CompletionOutput) -> None:
        if self._has_colour:
            pieces = ((piece.text, DRAFTED if piece.is_drafted else "") for piece in answer.new_pieces)
            self._console.print(Text.assemble(*pieces), end="", soft_wrap=True)
        else:
            print(answer.text_diff, end="", flush=True)

    def _note(self, words: str) -> None:
        self._console.print(Text(f"== {words}", "dim"), soft_wrap=True)


def _figures(last: RequestOutput, seconds: float) -> str:
    figures = f"{len(last.token_ids)} tokens, {len(last.token_ids) / seconds:,.1f} tokens/s"
    if not last.finished:
        return f"{figures}; interrupted"
    drafts = accepted_words(last.num_drafted, last.num_accepted)
    return f"{figures}; {drafts}" + "; cut at --max-tokens" * (last.outputs[0].finish_reason == "length")

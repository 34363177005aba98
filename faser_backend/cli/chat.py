"""The command `faser chat`: a conversation in the terminal, over the Python API.

Drafted tokens that were accepted are green on a terminal with colours; elsewhere nothing marks them.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from faser_backend.cli.generate import accepted_words
from faser_backend.cli.options import SYSTEM, SamplingOptions, takes
from faser_backend.core.config import EngineConfig, option
from faser_backend.core.errors import ConfigError, RequestError
from faser_backend.serving.parameters import RunOptions, ServingOptions

if TYPE_CHECKING:
    from faser_backend.api.llm import LLM
    from faser_backend.api.outputs import CompletionOutput, RequestOutput
    from faser_backend.api.params import SamplingParams

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
    from faser_backend.api.batch import check_params
    from faser_backend.api.llm import LLM
    from faser_backend.api.params import SamplingParams
    from faser_backend.serving.loading import shown_phases
    from faser_backend.serving.model_source import find_engine
    from faser_backend.text.prompts import NO_TEMPLATE

    params = SamplingParams(**options.model_dump(exclude_unset=True, exclude={"system"}))
    check_params(params)
    limits = {**engine.model_dump(exclude_unset=True), "max_num_seqs": 1} | find_engine(run)
    with (
        shown_phases(in_pipes=False) as phases,
        LLM(chat_template=serving.chat_template, **limits) as llm,
    ):
        phases.end()
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
    figures = f"{len(last.token_ids)} tokens, {len(last.token_ids) / seconds:.3g} tokens/s"
    if not last.finished:
        return f"{figures}; interrupted"
    drafts = accepted_words(last.num_drafted, last.num_accepted) if last.num_drafted else "nothing drafted"
    return f"{figures}; {drafts}" + "; cut at --max-tokens" * (last.outputs[0].finish_reason == "length")

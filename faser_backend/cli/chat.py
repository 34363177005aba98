"""The command `faser chat`: a conversation in the terminal. The engine is that of the Python API.

Tokens that were drafted and accepted are coloured; where there is no colour, nothing marks them.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from faser_backend.cli.options import SAMPLING, SamplingOptions, print_steps, takes
from faser_backend.core.config import EngineConfig
from faser_backend.core.errors import ConfigError, RequestError
from faser_backend.serving.parameters import ServingOptions

if TYPE_CHECKING:
    from faser_backend.api.llm import LLM
    from faser_backend.api.outputs import CompletionOutput, RequestOutput
    from faser_backend.api.params import SamplingParams

DRAFTED = "green"


@takes(
    serving=(ServingOptions, "engine_dir chat_template"),
    sampling=(SamplingOptions, "temperature top_p seed"),
    engine=(EngineConfig, "policy draft num_threads"),
)
def chat(
    *,
    serving: ServingOptions,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.", rich_help_panel=SAMPLING)] = 256,
    sampling: SamplingOptions,
    engine: EngineConfig,
) -> None:
    """Talk to a model in the terminal: one message per line, /reset to start anew, /quit to end."""
    from faser_backend.api.batch import check_params
    from faser_backend.api.llm import LLM
    from faser_backend.api.params import SamplingParams
    from faser_backend.serving.loading import shown_phases
    from faser_backend.text.chat import NO_TEMPLATE

    params = SamplingParams(max_tokens=max_tokens, **sampling.model_dump(exclude_unset=True))
    options = {**engine.model_dump(exclude_unset=True), "max_num_seqs": 1}
    check_params(params)
    with (
        shown_phases(in_pipes=False) as phases,
        LLM(serving.engine_dir, chat_template=serving.chat_template, progress=print_steps(), **options) as llm,
    ):
        phases.end()
        if not llm.has_chat_template:
            raise ConfigError(f"{llm.engine_dir}: {NO_TEMPLATE}")
        _Talk(llm, params, system).run()


class _Talk:
    """One conversation, and the terminal or pipe that it is held in."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm, self._params = llm, params
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._messages = [*self._start]
        self._console = Console(highlight=False)
        self._has_colour = self._console.is_terminal and not self._console.no_color
        self._is_typed = sys.stdin.isatty()

    def run(self) -> None:
        """Until /quit or the end of the input."""
        if self._is_typed:
            with contextlib.suppress(ImportError):  # a Python without it has no history, and lines all the same
                import readline  # noqa: F401 - what input() edits lines with
            self._note("/reset starts anew, /quit ends" + "; green: drafted and accepted" * self._has_colour)
        while (line := self._read()) is not None and line != "/quit":
            if line == "/reset":
                self._messages = [*self._start]
                self._note("a new conversation")
            elif line:
                self._answer(line)

    def _read(self) -> str | None:
        """The next line, None at the end of the input."""
        if not self._is_typed:
            line = sys.stdin.readline()
            return line.strip() if line else None
        try:
            return input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return None

    def _answer(self, message: str) -> None:
        """Streams the answer, then its figures. Ctrl-C ends an answer to what was typed, and not the conversation."""
        asked = {"role": "user", "content": message}
        started_s = time.perf_counter()
        last: RequestOutput | None = None
        try:
            for last in self._llm.stream([*self._messages, asked], self._params):
                self._show(last.outputs[0])
        except RequestError as error:
            if error.field in type(self._params).model_fields:
                raise  # no message of this conversation could be answered
            # It has grown beyond the context, or its template refuses it.
            self._note(f"{error}; /reset starts anew")
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
    from faser_backend.api.one_shot import accepted_words

    figures = f"{len(last.token_ids)} tokens, {len(last.token_ids) / seconds:.3g} tokens/s"
    if not last.finished:
        return f"{figures}; interrupted"
    drafts = accepted_words(last.num_drafted, last.num_accepted) if last.num_drafted else "nothing drafted"
    return f"{figures}; {drafts}" + "; cut at --max-tokens" * (last.outputs[0].finish_reason == "length")

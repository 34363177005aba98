"""The command `faser generate`: one prompt without a server; --explain prints what the policy compares."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from faser_backend.cli.options import CHAT, JSON, SYSTEM, SamplingOptions, parse_integers, takes
from faser_backend.core.config import EngineConfig, OptionTable, option
from faser_backend.serving.parameters import RunOptions, ServingOptions

if TYPE_CHECKING:
    from faser_backend.core.decision import Score
    from faser_backend.core.record import StepRecord


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
    from faser_backend.api.one_shot import generate_once, read_prompt, report_line
    from faser_backend.api.params import SamplingParams
    from faser_backend.serving.loading import shown_phases
    from faser_backend.serving.model_source import find_engine

    asked = read_prompt(
        options.prompt,
        None if options.prompt_ids is None else parse_integers("--prompt-ids", options.prompt_ids),
        is_chat=options.is_chat,
        system=options.system,
        messages_file=options.messages,
        chat_template=serving.chat_template,
    )
    params = SamplingParams(**draws.model_dump(), include_stop_str_in_output=True)
    given = engine.model_dump(exclude_unset=True) | find_engine(run)
    on_step = {"on_step": explainer(partial(print, file=sys.stderr))} if options.explain else {}
    with shown_phases(in_pipes=False) as phases:
        result = generate_once(
            asked,
            params,
            on_text=(lambda _: None) if options.is_json else partial(print, end="", flush=True),
            on_loaded=phases.end,
            **on_step,
            chat_template=serving.chat_template,
            **given,
        )
    if options.is_json:
        print(json.dumps(result))
    else:
        print(f"\n{report_line(result)}")


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
            gain = (
                f"at best {decision.tokens_per_us / shown[0].tokens_per_us:.2f}x the tokens per time of plain decoding"
            )
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

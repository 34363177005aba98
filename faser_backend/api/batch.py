"""One call of the Python API: turns prompts into the engine's requests, and its outputs into answers.

Every prompt is checked before any request starts, so that a bad field leaves nothing running.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from faser_backend.api.outputs import GrowingAnswer, RequestOutput
from faser_backend.api.params import GuidedDecodingParams, SamplingParams
from faser_backend.core.errors import ErrorCode, FailedError, RequestError, UnavailableError
from faser_backend.core.request import GUIDE, EngineOutput, Grammar, Request, Sampling
from faser_backend.serving.engine_loop import Subscription
from faser_backend.serving.request_reports import log_clamp
from faser_backend.serving.served_model import ServedModel
from faser_backend.text.guides import GuideCompiler
from faser_backend.text.tokenizer import TextTokenizer

Conversation = list[dict[str, Any]]  # [{"role": ..., "content": ...}]
Prompt = str | list[int] | Conversation
AnyParams = SamplingParams | Sequence[SamplingParams] | None
_SAME_NAMES = (  # of params.SamplingParams and the engine's
    *("temperature", "top_p", "min_p", "min_tokens", "logit_bias"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_KINDS = "must be text, token ids or a conversation, or a list of these"


@dataclass(slots=True, eq=False)
class _Asked:
    """A prompt and its answers."""

    index: int
    prompt: str | None
    prompt_ids: list[int]
    answers: list[GrowingAnswer]

    def snapshot(self) -> RequestOutput:
        request_id, is_ended = self.answers[0].request.request_id, all(answer.is_ended for answer in self.answers)
        outputs = [answer.snapshot() for answer in self.answers]
        return RequestOutput(request_id, self.index, self.prompt, self.prompt_ids, outputs, is_ended)


class Batch:
    """The prompts of one call and their answers."""

    def __init__(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: AnyParams,
        model: ServedModel,
        guides: GuideCompiler,
        call_id: str,
    ) -> None:
        """call_id: prefix of the ids of this call's requests. Raises RequestError for the first invalid prompt."""
        listed = _listed(prompts)
        self._asked: list[_Asked] = []
        for index, (prompt, wanted) in enumerate(zip(listed, _params_of(params, len(listed)), strict=True)):
            try:
                self._asked.append(_ask(prompt, wanted, model, guides, index=index, call_id=call_id))
            except RequestError as error:
                if len(listed) > 1:
                    error.args = (f"prompts[{index}]: {error}",)
                raise
        self._by_id = {answer.request.request_id: answer for asked in self._asked for answer in asked.answers}
        self._stopping: set[str] = set()

    @property
    def is_ended(self) -> bool:
        return all(answer.is_ended for answer in self._by_id.values())

    def submit(self, engine: Subscription) -> None:
        for answer in self._by_id.values():
            engine.submit(answer.request, "")

    def take(self, outputs: list[EngineOutput] | None, engine: Subscription) -> None:
        """Adds outputs of the engine, and stops requests whose text a stop string has ended.

        An answer that failed ends with its error, and the others go on. Raises FaserError if it is the only answer, or
        if the engine has failed.
        """
        if outputs is None:
            raise UnavailableError("the engine was closed")
        for output in outputs:
            failure = output.error
            if failure is not None and failure.field == GUIDE:
                failure = output.error = failure.named("guided_decoding")
            if failure is not None and (len(self._by_id) == 1 or failure.code is ErrorCode.UNAVAILABLE):
                raise FailedError(failure)
            answer = self._by_id[output.request_id]
            answer.add(output)
            if answer.stream.is_stopped and not answer.is_ended and output.request_id not in self._stopping:
                self._stopping.add(output.request_id)
                engine.stop(output.request_id)

    def new_outputs(self) -> Iterator[RequestOutput]:
        """Yields the prompts whose answers have grown or ended since the last call."""
        for asked in self._asked:
            if any(answer.has_news for answer in asked.answers):
                yield asked.snapshot()

    def results(self) -> list[RequestOutput]:
        """Returns all answers, in the order of the prompts."""
        return [asked.snapshot() for asked in self._asked]


def is_conversation(prompt: object) -> TypeGuard[Conversation]:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def _listed(prompts: object) -> list[Prompt]:
    """Returns a list of prompts, also for a single prompt."""
    if isinstance(prompts, str) or is_conversation(prompts):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise RequestError("prompts", prompts, _KINDS)
    if not prompts:
        raise RequestError("prompts", prompts, "must hold at least one prompt")
    return [list(prompts)] if isinstance(prompts[0], int) else list(prompts)


def _params_of(params: AnyParams, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, list | tuple) or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError("sampling_params", params, "must be SamplingParams, or a list of them")
    if len(params) != count:
        raise RequestError("sampling_params", len(params), f"must be one, or one for each of {count} prompts")
    return list(params)


def _ask(
    prompt: Prompt, params: SamplingParams, model: ServedModel, guides: GuideCompiler, *, index: int, call_id: str
) -> _Asked:
    text, prompt_ids = _read(prompt, model.tokenizer)
    request = _request(prompt_ids, params, model, guides, f"{call_id}.{index}")
    request.validate(model.limits)
    numbers = range(params.n)
    answers = [GrowingAnswer(request.nth(number), params, model.tokenizer, number) for number in numbers]
    return _Asked(index, text, prompt_ids, answers)


def _read(prompt: object, tokenizer: TextTokenizer) -> tuple[str | None, list[int]]:
    """Returns the text of a prompt and its token ids."""
    if isinstance(prompt, str):
        return prompt, tokenizer.encode_prompt(prompt)
    if is_conversation(prompt):
        return tokenizer.encode_chat("messages", prompt)
    if isinstance(prompt, list | tuple) and all(type(each) is int for each in prompt):
        return None, list(prompt)
    raise RequestError("prompt", prompt, "must be text, token ids or a conversation")


def _request(
    prompt_ids: list[int], params: SamplingParams, model: ServedModel, guides: GuideCompiler, request_id: str
) -> Request:
    tokenizer, limits = model.tokenizer, model.limits
    stop_sequences = tokenizer.encode_words("stop", params.stop)
    asked = max(1, limits.max_context - len(prompt_ids)) if params.max_tokens is None else params.max_tokens
    sampling = _sampling(params, tokenizer.encode_words("bad_words", params.bad_words))
    if params.guided_decoding is not None:
        sampling = replace(sampling, grammar=_grammar(params.guided_decoding, guides))
    request = Request(
        request_id=request_id,
        prompt_ids=limits.prompt_array(prompt_ids),
        max_tokens=limits.clamp_max_tokens(asked, len(prompt_ids)),
        sampling=sampling,
        end_ids=() if params.ignore_eos and params.guided_decoding is None else model.end_ids,
        stop_sequences=stop_sequences + tuple((token_id,) for token_id in params.stop_token_ids),
        max_draft_tokens=params.num_draft_tokens,
        wants_log_probs=params.logprobs is not None,
        wants_generation_logits=bool(params.logprobs),
        wants_stats=True,
        lora_name=model.lora_name,
    )
    log_clamp(asked, request)
    return request


def _grammar(guided: GuidedDecodingParams, guides: GuideCompiler) -> Grammar:
    """Compiles the guide here, so that its errors are raised before anything runs."""
    try:
        return guides.compile(guided.guide())
    except RequestError as error:
        error.blame("guided_decoding")
        raise


def check_params(params: SamplingParams) -> None:
    """Raises RequestError for parameters that are invalid for every model."""
    if params.max_tokens is not None and params.max_tokens < 1:
        raise RequestError("max_tokens", params.max_tokens, "must be at least 1")
    _sampling(params).validate(vocab_size=2**31)


def _sampling(params: SamplingParams, bad_words: tuple[tuple[int, ...], ...] = ()) -> Sampling:
    seed = params.seed
    if seed is None:
        seed = secrets.randbits(64) if params.temperature > 0 else 0
    same = {name: getattr(params, name) for name in _SAME_NAMES}
    return Sampling(**same, top_k=max(params.top_k, 0), seed=seed, bad_words=bad_words)

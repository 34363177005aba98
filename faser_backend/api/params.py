"""The parameters of a call of the Python API: `SamplingParams` and `GuidedDecodingParams`.

Names are those of vLLM and TensorRT-LLM where they mean the same. Types are checked here, ranges by
`core.request.Request.validate`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from faser_backend.core.errors import RequestError, refusal_of
from faser_backend.core.request import MAX_BAD_WORDS, MAX_STOP_SEQUENCES
from faser_backend.text.guides import read_guide

MAX_SEQUENCES = 1024  # answers per prompt
MAX_LOGPROBS = 20


class _Fields(BaseModel):
    """Frozen keyword fields. Raises RequestError for the first that is unknown or has the wrong type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)

    if not TYPE_CHECKING:  # type checkers see the fields

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise refusal_of(error) from None


class GuidedDecodingParams(_Fields):
    """The grammar of an answer: exactly one of the fields.

    json: a JSON schema as a dict or text, or a pydantic model. grammar: GBNF or Lark. json_object: any JSON object.
    structural_tag: XGrammar's, as JSON text.
    """

    schema_: dict[str, Any] | str | type[BaseModel] | None = Field(default=None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None

    def guide(self) -> str:
        """Returns the grammar as the engine's compiler reads it. Raises RequestError."""
        given = {
            "json_schema": _schema_text(self.schema_),
            "regex": self.regex,
            "ebnf_grammar": self.grammar,
            "json": "" if self.json_object else None,
            "structural_tag": self.structural_tag,
        }
        kinds = [(kind, text) for kind, text in given.items() if text is not None]
        if len(kinds) != 1:
            limit = "give exactly one of json, regex, grammar, json_object and structural_tag"
            raise RequestError("guided_decoding", self.model_dump(exclude_defaults=True), limit)
        return read_guide(*kinds[0])


def _schema_text(schema: dict[str, Any] | str | type[BaseModel] | None) -> str | None:
    if schema is None or isinstance(schema, str):
        return schema
    if not isinstance(schema, dict):
        schema = schema.model_json_schema()
    try:
        return json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise RequestError("guided_decoding.json", schema, f"must be a JSON schema: {error}") from None


class SamplingParams(_Fields):
    """The sampling parameters of one prompt. The defaults decode greedily without penalties."""

    n: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] = 1  # answers; their seeds are seed, seed + 1, ...
    max_tokens: int | None = 64  # clamped to the rest of the context; None: all of it
    temperature: float = 0.0  # 0 decodes greedily
    top_k: Annotated[int, Field(ge=-1)] = 0  # 0 and -1 are off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: a fresh one, which the output reports
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop: Annotated[list[str], Field(max_length=MAX_STOP_SEQUENCES)] = []  # strings, or one
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_SEQUENCES)] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS)] = []
    logit_bias: dict[int, float] | None = None  # by token id
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None  # best alternatives beside each token's own
    guided_decoding: GuidedDecodingParams | None = None
    num_draft_tokens: int | None = None  # cap on speculation; 0 decodes plainly

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

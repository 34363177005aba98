"""Conversations: rendered and tokenised as in transformers; harmful templates fail alone."""

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from faser_backend.core.errors import RequestError
from faser_backend.core.request import Limits
from faser_backend.openai.bodies import ChatBody, ResponsesBody, check_body
from faser_backend.openai.requests import conversation_ids
from faser_backend.openai.tools import shows_tools
from faser_backend.serving.served_model import ServedModel
from faser_backend.text.chat_worker import MAX_CHARS, MAX_MEMORY_BYTES
from faser_backend.text.prompts import ChatRenderer, PromptFormat, read_messages
from faser_backend.text.tokenizer import TextTokenizer
from faser_backend.triton.converters import preprocess
from faser_backend.triton.llmapi import LlmApiContract
from tests.support.chat_templates import CHATML, CONVERSATIONS, HERMES, LLAMA_3, MISTRAL, TEMPLATES, USER
from tests.support.clients import one, text
from tests.support.openai_cases import WEATHER
from tests.support.processes import kill_children
from tests.support.serving_pair import byte_level_tokenizer
from tests.triton.test_contract import HANDSHAKE, MODEL, parse, parse_requests

SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
MARKS = ["<|begin|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def begin_adding_tokenizer() -> Tokenizer:
    """Returns a tokenizer whose post-processor adds the begin token to every text, like Llama 3's."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(MARKS)
    begin = ("<|begin|>", tokenizer.token_to_id("<|begin|>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])
    return tokenizer


TOKENIZER = begin_adding_tokenizer()
BEGIN_ID = TOKENIZER.encode("").ids[0]


def model_of(tokenizer: TextTokenizer) -> ServedModel:
    return replace(MODEL, tokenizer=tokenizer, limits=Limits(TOKENIZER.get_vocab_size(), 512))


@pytest.fixture
def chat_tokenizer() -> Iterator[TextTokenizer]:
    tokenizer = TextTokenizer(TOKENIZER, PromptFormat(LLAMA_3, SPECIAL))
    yield tokenizer
    tokenizer.close()


def render(template: str, messages: list[dict[str, str]] = USER) -> str:
    renderer = ChatRenderer(template, SPECIAL)
    try:
        return renderer.render("messages", messages)
    finally:
        renderer.close()


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_text_and_ids_are_those_of_transformers(template: str):
    theirs = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, chat_template=template, **SPECIAL)
    ours = TextTokenizer(TOKENIZER, PromptFormat(template, SPECIAL))
    for messages in CONVERSATIONS.values():
        prompt, token_ids = ours.encode_chat("messages", json.dumps(messages))
        assert prompt == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert token_ids == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ours.close()


def test_a_rendered_prompt_begins_once(chat_tokenizer: TextTokenizer):
    prompt, token_ids = chat_tokenizer.encode_chat("messages", json.dumps(USER))
    assert token_ids[0] == BEGIN_ID and token_ids.count(BEGIN_ID) == 1
    assert TOKENIZER.encode(prompt).ids.count(BEGIN_ID) == 2  # control: with added special tokens
    assert chat_tokenizer.encode_prompt(prompt) == token_ids  # a prompt that the client rendered


@pytest.mark.parametrize(
    ("adds_special_tokens", "adds_begin_token", "has_own_rule", "num_begins"),
    [
        (True, False, True, 1),
        (True, True, True, 1),
        (True, True, False, 1),
        (True, False, False, 0),
        (False, False, True, 0),
    ],
)
def test_plain_prompts_begin_as_the_checkpoint_says(adds_special_tokens, adds_begin_token, has_own_rule, num_begins):
    tokenizer = begin_adding_tokenizer()
    if not has_own_rule:
        tokenizer.post_processor = processors.ByteLevel()
    ours = TextTokenizer(tokenizer, PromptFormat(None, SPECIAL, adds_special_tokens, adds_begin_token))
    fox = ours.encode("the fox")
    assert ours.encode_prompt("the fox") == [BEGIN_ID] * num_begins + fox
    assert ours.encode_prompt("<|begin|>the fox") == [BEGIN_ID, *fox]


def test_all_contracts_take_messages(chat_tokenizer: TextTokenizer):
    conversation = json.dumps(CONVERSATIONS["turns"])
    prompt, token_ids = chat_tokenizer.encode_chat("messages", conversation)
    given = {"messages": text(conversation), "max_tokens": one(8)}
    handshake = replace(HANDSHAKE, model=model_of(chat_tokenizer))
    (parsed,) = parse_requests(given, "r", handshake, is_decoupled=True)
    assert parsed.request.prompt_ids.tolist() == token_ids and parsed.prompt_text == prompt
    lengths = np.array([[4], [5]], np.int32)
    batch = np.array([[conversation.encode()], [json.dumps(USER).encode()]], dtype=object)
    arrays = dict(preprocess({"MESSAGES": batch, "REQUEST_OUTPUT_LEN": lengths}, handshake.model))
    assert arrays["INPUT_ID"][0].tolist() == token_ids
    assert arrays["REQUEST_INPUT_LEN"].tolist() == [
        [len(token_ids)],
        [len(chat_tokenizer.encode_chat("m", json.dumps(USER))[1])],
    ]
    given = {"messages": np.array([conversation.encode()], dtype=object)}
    (parsed,) = LlmApiContract().parse(given, "r", handshake, is_decoupled=True)
    assert parsed.prompt_text == prompt


@pytest.mark.parametrize("template", [CHATML, MISTRAL])
def test_a_template_that_shows_no_tools_is_given_them_in_words(template: str):
    ours = TextTokenizer(TOKENIZER, PromptFormat(template, SPECIAL))
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    call = {"id": "1", "type": "function", "function": function}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "2", "content": "cloudy"},
    ]
    assert shows_tools(HERMES) and shows_tools(LLAMA_3) and not shows_tools(template)
    body = check_body(ChatBody, {"messages": messages, "tools": [WEATHER]})
    text = ours.decode(conversation_ids(body, ours, 10_000), skips_special_tokens=False)
    assert text.index("Be brief.") < text.index(json.dumps(WEATHER["function"]))
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert f"{written}\n{written}" in text
    assert "<tool_response>\nsunny\n</tool_response>\n<tool_response>\ncloudy" in text
    unoffered = body.model_copy(update={"tool_choice": "none"})
    text = ours.decode(conversation_ids(unoffered, ours, 10_000), skips_special_tokens=False)
    assert json.dumps(WEATHER["function"]) not in text and written in text


def test_a_message_without_calls_is_text_and_one_before_calls_is_theirs():
    ours = TextTokenizer(TOKENIZER, PromptFormat(LLAMA_3, SPECIAL))
    talk = [*USER, {"role": "assistant", "content": "Ja.", "tool_calls": []}, *USER]
    assert "Ja." in ours.decode(conversation_ids(check_body(ChatBody, {"messages": talk}), ours, 10_000))
    call = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "sunny"}
    body = check_body(ResponsesBody, {"input": [*USER, {"role": "assistant", "content": "Wait."}, call, call, result]})
    assert [message.role for message in body.messages] == ["user", "assistant", "tool"]
    assert body.messages[1].content == "Wait." and len(body.messages[1].tool_calls or ()) == 2


def test_prompts_exclude_each_other(chat_tokenizer: TextTokenizer):
    with pytest.raises(RequestError, match="messages = 'given with text_input': send one of the two"):
        parse(messages=text(json.dumps(USER)))
    two = {"QUERY": text("x"), "MESSAGES": text(json.dumps(USER)), "REQUEST_OUTPUT_LEN": one(4)}
    with pytest.raises(RequestError, match="MESSAGES = 'given with QUERY': send one of the two"):
        preprocess(two, model_of(chat_tokenizer))
    with pytest.raises(RequestError, match="send QUERY or MESSAGES"):
        preprocess({"REQUEST_OUTPUT_LEN": one(4)}, model_of(chat_tokenizer))


def test_padding_is_the_checkpoints():
    ours = TextTokenizer(TOKENIZER, PromptFormat(None, {"pad_token": "<|im_end|>"}))
    queries = np.array([[b"the fox"], [b"x"]], dtype=object)
    given = {"QUERY": queries, "REQUEST_OUTPUT_LEN": np.array([[1], [1]], np.int32)}
    arrays = dict(preprocess(given, model_of(ours)))
    pad_id = TOKENIZER.token_to_id("<|im_end|>")
    assert arrays["OUT_PAD_ID"].tolist() == [[pad_id]] * 2 and arrays["INPUT_ID"][1, -1] == pad_id


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("", r"messages = '': invalid JSON"),
        ("[" * 100_000, "invalid JSON: recursion limit"),
        ("[]", r"messages = \[\]: list should have at least 1 item"),
        ('{"role": "user"}', "messages = .*: input should be a valid "),
        ('["hello"]', r"messages\[0\] = 'hello': input should be an object"),
        (
            '[{"role": "robot", "content": ""}]',
            r"messages\[0\].role = 'robot': input should be 'system', 'developer', ",
        ),
        ('[{"role": ["user"], "content": ""}]', r"messages\[0\].role = \['user'\]: input should be"),
        ('[{"content": ""}]', r"messages\[0\].role = None: is required"),
        ('[{"role": "user", "content": "a"}, {"role": "user"}]', r"messages\[1\].content = None: is required"),
        (
            '[{"role": "user", "content": [{"type": "text"}]}]',
            r"messages\[0\].content = .*: input should be a valid str",
        ),
        ('[{"role": "user", "content": "", "name": "x"}]', r"messages\[0\].name = 'x': .* has no such field"),
        ('[{"role": "user", "content": "\\ud800"}]', r"messages = .*: invalid JSON: unexpected end of hex escape"),
    ],
)
def test_bad_messages_are_named(messages: str, message: str):
    with pytest.raises(RequestError, match=message):
        read_messages("messages", messages)


def test_a_template_may_refuse_messages():
    with pytest.raises(RequestError, match=r"messages = .*the chat template refuses them: .* must take turns"):
        render(MISTRAL, [*USER, *USER])


def test_a_developers_message_is_the_systems_unless_the_template_knows_the_role():
    said = [{"role": "developer", "content": "s"}, *USER]
    assert render(CHATML, said) == render(CHATML, [{"role": "system", "content": "s"}, *USER])
    assert "[SYSTEM]" not in render(TEMPLATES["odd"], said)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "line 1: Expected an expression"),
        ("a\nb{{ x", "line 2: unexpected end of template"),
        ("{{ nothing.at.all }}", "UndefinedError: 'nothing' is undefined"),
        ("{{ messages.__class__ }}", "SecurityError: attribute '__class__' of 'list'"),
        ("{{ ''|attr('__class__') }}", "SecurityError"),
        ("{{ raise_exception.__globals__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ '{0.__class__}'.format(1) }}", "SecurityError"),
        ("{% set x = namespace(__class__=1) %}", "SecurityError: a namespace must not hold '__class__'"),
        ("{% set x = namespace() %}{% set x.__class__ = 1 %}", "SecurityError"),
        ("{% include '/etc/hostname' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ range(10**9) }}", "OverflowError"),
        ("{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}", f"writes more than {MAX_CHARS} characters"),
        (f"{{{{ 'a' * {2 * MAX_MEMORY_BYTES} }}}}", "MemoryError"),
    ],
)
def test_a_template_that_fails_is_one_error(template: str, message: str):
    with pytest.raises(RequestError, match=f"chat_template = .*cannot be rendered: .*{message}") as caught:
        render(template)
    assert "\n" not in str(caught.value)


def test_an_endless_template_costs_its_request_alone():
    loops = "{% if messages[0].content == 'loop' %}" + "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
    renderer = ChatRenderer(loops + "{% else %}fine{% endif %}", {})
    assert renderer.render("messages", USER) == "fine"
    with pytest.raises(RequestError, match=r"chat_template = .*cannot be rendered: it takes too long"):
        renderer.render("messages", [{"role": "user", "content": "loop"}])
    assert renderer.render("messages", USER) == "fine"
    renderer.close()


def test_a_renderer_whose_process_was_killed_starts_another():
    renderer = ChatRenderer(CHATML, {})
    first = renderer.render("messages", USER)
    kill_children("chat_worker.py")
    assert renderer.render("messages", USER) == first
    renderer.close()

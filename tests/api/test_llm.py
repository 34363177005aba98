"""The Python API: its inputs and outputs, and that it leaves no process or block behind."""

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import faser_backend
from faser_backend import LLM, ConfigError, FaserError, GuidedDecodingParams, RequestError, SamplingParams
from tests.support.processes import wait_until
from tests.text.test_structured_output import SCHEMAS

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ["def f(x):", "the quick", "Größe 東京", "x"]
MESSAGES = [{"role": "user", "content": "Größe?"}]
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, seed=1, ignore_eos=True)
LONG = SamplingParams(max_tokens=1900, temperature=1.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(engine_dir: Path) -> Iterator[LLM]:
    with LLM(engine_dir, policy="fixed:3", num_threads=1) as llm:
        yield llm


def texts_of(outputs: list[faser_backend.RequestOutput]) -> list[str]:
    return [output.text for output in outputs]


def assert_idle(llm: LLM) -> None:
    """Waits until no request runs or holds a block."""
    wait_until(lambda: (now := llm.metrics()).num_running == 0 and now.num_free_blocks == now.num_blocks)


def test_answers_come_in_order_and_are_those_of_plain_decoding(llm: LLM, engine_dir: Path):
    found = llm.generate(PROMPTS, SAMPLED)
    assert [output.index for output in found] == [0, 1, 2, 3] and [output.prompt for output in found] == PROMPTS
    with LLM(str(engine_dir), policy="none", num_threads=1) as plain:
        alone = [plain.generate(prompt, SAMPLED)[0] for prompt in PROMPTS]
    assert texts_of(found) == texts_of(alone) and [one.token_ids for one in found] == [one.token_ids for one in alone]
    assert all(one.acceptance is None and one.num_drafted == 0 for one in alone)
    for output in found:
        (answer,) = output.outputs
        assert output.finished and answer.finish_reason == "length" and answer.seed == 1
        assert output.acceptance == pytest.approx(output.num_accepted / output.num_drafted)
        assert sum(answer.is_drafted) == output.num_accepted > 0
    assert texts_of(llm.generate(PROMPTS, SAMPLED.model_copy(update={"seed": 2}))) != texts_of(found)


def test_a_stream_grows_into_the_answer(llm: LLM):
    whole = llm.generate(PROMPTS, SAMPLED)
    seen = ["" for _ in PROMPTS]
    num_outputs = 0
    for output in llm.stream(PROMPTS, SAMPLED):
        num_outputs += 1
        seen[output.index] += output.outputs[0].text_diff
        assert output.text == seen[output.index] and not whole[output.index].text.find(output.text)
    assert seen == texts_of(whole) and num_outputs > 2 * len(PROMPTS)


def test_prompts_are_texts_token_ids_or_conversations_with_parameters_of_their_own(llm: LLM):
    ids = llm.generate("def f(x):")[0].prompt_token_ids
    by_text, by_ids = (llm.generate(prompt, SAMPLED)[0] for prompt in ("def f(x):", ids))
    assert by_ids.text == by_text.text and by_ids.prompt is None
    short, long = llm.generate([ids, "x"], [SamplingParams(max_tokens=count, ignore_eos=True) for count in (3, 5)])
    assert len(short.token_ids) == 3 and len(long.token_ids) == 5
    full = llm.generate("x", SamplingParams(max_tokens=None, ignore_eos=True))[0]
    assert len(full.prompt_token_ids) + len(full.token_ids) == llm.max_context
    (one,) = llm.chat(MESSAGES, SAMPLED)
    assert one.prompt is not None and "<|im_start|>user\nGröße?" in one.prompt
    two = llm.chat([MESSAGES, [*MESSAGES, {"role": "assistant", "content": "Ja."}]], SAMPLED)
    assert two[0].text == one.text and two[1].prompt != one.prompt


def test_several_answers_have_seeds_of_their_own(llm: LLM):
    (output,) = llm.generate("the", SamplingParams(n=3, max_tokens=12, temperature=1.0, seed=5, ignore_eos=True))
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert [answer.seed for answer in output.outputs] == [5, 6, 7]
    assert len({answer.text for answer in output.outputs}) == 3
    again = llm.generate("the", SamplingParams(max_tokens=12, temperature=1.0, seed=6, ignore_eos=True))[0]
    assert again.text == output.outputs[1].text
    fresh = [llm.generate("the", SamplingParams(temperature=1.0))[0].outputs[0].seed for _ in range(2)]
    assert fresh[0] != fresh[1]


def test_stop_strings_and_stop_tokens_end_an_answer(llm: LLM):
    (whole,) = llm.generate("the", SAMPLED)
    stop = whole.text[9:11]
    cut, kept = (
        llm.generate("the", SAMPLED.model_copy(update={"stop": [stop], "include_stop_str_in_output": kept}))[0]
        for kept in (False, True)
    )
    end = whole.text.index(stop)
    assert (cut.text, kept.text) == (whole.text[:end], whole.text[: end + len(stop)])
    assert cut.outputs[0].finish_reason == "stop" and cut.outputs[0].stop_reason == stop
    token_id = whole.token_ids[6]
    by_token = llm.generate("the", SAMPLED.model_copy(update={"stop_token_ids": [token_id]}))[0]
    first = whole.token_ids.index(token_id)
    assert by_token.token_ids == whole.token_ids[: first + 1] and by_token.outputs[0].stop_reason == token_id
    assert SamplingParams(stop="x").stop == ["x"]


def test_log_probabilities_are_those_of_the_distribution(llm: LLM):
    (output,) = llm.generate("the", SamplingParams(max_tokens=8, logprobs=3, ignore_eos=True))
    (answer,) = output.outputs
    assert answer.logprobs is not None and len(answer.logprobs) == 8
    for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(entry)) == token_id and len(entry) == 3 and entry[token_id].rank == 1  # greedy
        values = [one.logprob for one in entry.values()]
        assert values == sorted(values, reverse=True) and sum(map(math.exp, values)) < 1
    chosen = sum(entry[token_id].logprob for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True))
    assert answer.cumulative_logprob == pytest.approx(chosen)
    own_alone = llm.generate("the", SamplingParams(max_tokens=8, logprobs=0, ignore_eos=True))[0].outputs[0]
    assert own_alone.cumulative_logprob == pytest.approx(chosen, abs=1e-4)
    assert llm.generate("the")[0].outputs[0].logprobs is None


class Person(BaseModel):
    age: int
    is_tall: bool


def test_guided_answers_have_their_form(llm: LLM):
    guides = (
        GuidedDecodingParams(regex="[0-9]{3}-(yes|no)"),
        GuidedDecodingParams(json={"enum": ["red", "blue"]}),
        GuidedDecodingParams(grammar='root ::= "<" [a-c] ">"'),
    )
    params = [SamplingParams(temperature=1.0, seed=3, guided_decoding=guided) for guided in guides]
    dated, coloured, tagged = texts_of(llm.generate(["x"] * 3, params))
    assert re.fullmatch("[0-9]{3}-(yes|no)", dated) and json.loads(coloured) in ("red", "blue")
    assert re.fullmatch("<[abc]>", tagged)
    assert '"is_tall"' in GuidedDecodingParams(json=Person).guide()


def test_any_number_of_grammars_may_be_asked_for_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("faser_backend.text.guides.MAX_COMPILED", 1)
    wanted = [f"a{number}" for number in range(80)]  # more than may wait to be compiled
    params = [SamplingParams(guided_decoding=GuidedDecodingParams(regex=each)) for each in wanted]
    assert texts_of(llm.generate(["x"] * len(wanted), params)) == wanted


def test_an_answer_that_fails_leaves_the_others(llm: LLM):
    endless = SamplingParams(max_tokens=24, guided_decoding=GuidedDecodingParams(json=SCHEMAS["recursive later"]))
    lost, kept = llm.generate(["x", "y"], [endless, SAMPLED])
    (answer,) = lost.outputs
    assert answer.finish_reason == "error" and answer.text.startswith("{") and lost.finished
    assert answer.error is not None and answer.error.field == "guided_decoding"
    assert kept.outputs[0].error is None and kept.text == llm.generate("y", SAMPLED)[0].text
    with pytest.raises(FaserError, match=r"^guided_decoding = 'given': a limit of grammars was reached: "):
        llm.generate("x", endless)
    assert_idle(llm)


@pytest.mark.parametrize(
    ("prompts", "fields", "message"),
    [
        ("x", {"temperature": -1}, "temperature = -1.0: must lie in"),
        ("x", {"temperature": "hot"}, "temperature = 'hot': input should be a valid number"),
        ("x", {"n": 0}, "n = 0: input should be greater than or equal to 1"),
        ("x", {"max_tokens": 0}, "max_tokens = 0: must lie in"),
        ("x", {"colour": 1}, "colour = 1: SamplingParams has no such field"),
        ("x", {"stop": [""]}, "stop = '': the tokenizer has no token for this word"),
        ("x", {"stop_token_ids": [9999]}, "stop_words token id = 9999: must lie in"),
        ("x", {"logit_bias": {9999: 1.0}}, "logit_bias token id = 9999: must lie in"),
        ("x", {"guided_decoding": GuidedDecodingParams()}, "guided_decoding = {}: give exactly one of"),
        ("x", {"guided_decoding": GuidedDecodingParams(regex="(")}, "guided_decoding = 'given': "),
        ([], {}, "prompts = []: must hold at least one prompt"),
        (7, {}, "prompts = 7: must be text, token ids or a conversation"),
        (["x", ""], {}, "prompts[1]: input_ids = []: prompt is empty"),
        (["x", [1, "2"]], {}, "prompts[1]: prompt = [1, '2']: must be text, token ids"),
        ([[1], [99999]], {}, "prompts[1]: input_ids = 99999: token ids must lie in"),
        ([[1], [9**40]], {}, f"prompts[1]: input_ids = {9**40}: token ids must lie in"),
        ([1] * 2100, {}, "input_ids length = 2100: must be below the context length of 2048 tokens"),
        ([{"role": "robot", "content": "x"}], {}, "messages[0].role = 'robot': input should be"),
        ("x", None, "sampling_params = {'n': 1}: must be SamplingParams"),
        (["x", "y"], [SamplingParams()], "sampling_params = 1: must be one, or one for each of 2 prompts"),
    ],
)
def test_what_is_bad_is_one_error_when_it_is_asked(llm: LLM, prompts: Any, fields: Any, message: str):
    for ask in (llm.generate, llm.stream):
        with pytest.raises(RequestError) as caught:
            ask(prompts, SamplingParams(**fields) if isinstance(fields, dict) else fields or {"n": 1})
        assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_chat_takes_conversations_alone(llm: LLM):
    for given in ("hello", [], ["hello"], [MESSAGES, "hello"]):
        with pytest.raises(RequestError, match=r"messages = .*: must be a list of \{"):
            llm.chat(given)  # pyright: ignore[reportArgumentType]


def test_bad_options_and_directories(engine_dir: Path, tmp_path: Path):
    for options, message in (
        ({"policy": "nonsense"}, "policy = 'nonsense': unknown"),
        ({"colour": 1}, "colour = 1: Extra inputs are not permitted"),
        ({"max_num_seqs": 0}, "max_num_seqs = 0"),
        ({"chat_template": tmp_path / "none.jinja"}, "chat_template = .*not readable"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(engine_dir, **options)
    with pytest.raises(faser_backend.ManifestError, match="manifest"):
        LLM(tmp_path)
    with pytest.raises(ConfigError, match="MODEL = 'nowhere': no such file or directory"):
        LLM("nowhere")
    assert all(getattr(faser_backend, name) for name in faser_backend.__all__)


def test_async_calls_share_the_engine(llm: LLM):
    expected = texts_of(llm.generate(PROMPTS, SAMPLED))

    async def streamed(prompt: str) -> str:
        return "".join([output.outputs[0].text_diff async for output in llm.stream_async(prompt, SAMPLED)])

    async def main() -> tuple[list[str], list[faser_backend.RequestOutput]]:
        pieces = asyncio.gather(*map(streamed, PROMPTS))
        return await pieces, await llm.generate_async(PROMPTS, SAMPLED)

    pieces, whole = asyncio.run(main())
    assert pieces == expected and texts_of(whole) == expected


def test_what_is_given_up_ends_in_the_engine(llm: LLM):
    stream = llm.stream(PROMPTS, LONG)
    next(stream)
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert_idle(llm)

    async def cancelled() -> None:
        task = asyncio.create_task(llm.generate_async(PROMPTS, LONG))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async for _ in llm.stream_async("x", LONG):
            break

    asyncio.run(cancelled())
    assert_idle(llm)


def test_closing_ends_threads_and_calls(engine_dir: Path):
    before = set(threading.enumerate())
    llm = LLM(engine_dir, policy="none", num_threads=1)
    if not (child := os.fork()):
        with pytest.raises(FaserError, match="not in a fork of it"):
            llm.generate("x")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    llm.chat(MESSAGES, SamplingParams(max_tokens=2, guided_decoding=GuidedDecodingParams(regex="[ab]")))
    stream = llm.stream("x", LONG)
    next(stream)
    llm.close()
    with pytest.raises(FaserError, match="shutting down"):
        list(stream)
    llm.close()
    with pytest.raises(FaserError, match="this LLM is closed"):
        llm.generate("x")
    llm = LLM(engine_dir, policy="none", num_threads=1, on_step=lambda _: llm.close())
    with pytest.raises(FaserError, match="shutting down"):
        llm.generate("x", LONG)  # closed by the engine's own thread
    with pytest.raises(FaserError, match=r"adapter_config\.json: missing"):
        LLM(engine_dir, policy="fixed:1", pipeline="run_ahead", lora=["x=none"])
    left = [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]
    for thread in left:
        thread.join(5)
    assert [thread.name for thread in left if thread.is_alive()] == []


def test_numpy_has_its_threads_again_when_the_last_engine_ends(engine_dir: Path):
    program = (
        "import sys, numpy, threadpoolctl as pools; from faser_backend import LLM\n"
        "blas = pools.ThreadpoolController(); blas.limit(limits=2); count = lambda: blas.info()[0]['num_threads']\n"
        "with LLM(sys.argv[1], num_threads=1):\n LLM(sys.argv[1], num_threads=1).close(); assert count() == 1\n"
        "assert count() == 2"
    )
    subprocess.run([sys.executable, "-c", program, engine_dir], check=True)


CHILD = """
import sys
from faser_backend import LLM, SamplingParams
llm = LLM(sys.argv[1], num_threads=1)
llm.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=2))
print("ready", flush=True)
if sys.argv[2] == "wait":
    while True:
        llm.generate("x", SamplingParams(max_tokens=400, ignore_eos=True))
"""


@pytest.mark.parametrize("how", ["wait", "leave"])
def test_ctrl_c_and_the_end_of_a_script_leave_no_process(engine_dir: Path, how: str):
    """Does not close the LLM; the rendering process must end with its parent."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(engine_dir), how],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        if how == "wait":
            child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)  # ends when every holder of its pipes has ended
        assert ("KeyboardInterrupt" in errors) == (how == "wait")
        assert child.returncode == (-signal.SIGINT if how == "wait" else 0)
        with pytest.raises(ProcessLookupError):
            os.killpg(child.pid, 0)
    finally:
        child.kill()

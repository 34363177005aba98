"""Conversations and categories in benchmarks: who is sent what, where answers end, and what is told of a category."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from faser_backend.config import EngineConfig
from lab.answers import Answer, Job, add_category_speedups, jobs_of, merge_categories, summarise_categories
from lab.bench.command import BenchOptions, run_bench
from lab.bench.servers import LoadClient, serve_all
from lab.bench.wire import make_request
from lab.contestants import Sizing
from lab.drive import InProcess
from lab.peers.programs import llama_body
from tests import test_prompt_files
from tests.serving_pair import END_ID
from tests.test_prompt_files import load

TINY = Sizing(2, 0.01, 1, 0.1, 1, 6, (0.0,), bursty_ablations=False)

engine_dir, questions = (
    test_prompt_files.engine_dir,
    test_prompt_files.questions,
)  # fixtures: a tiny pair, four questions


def test_a_chat_ends_where_the_model_ends_it_and_goes_to_everyone_alike(engine_dir: Path, questions: Path):
    prompts = load(questions, engine_dir).prompts
    (job,) = jobs_of(prompts, 1, 8, 0.0, 0)
    place = InProcess(engine_dir, {})
    request = place.request(0, job)
    assert request.prompt_ids.tolist() == list(job.prompt_ids) and request.end_ids == (END_ID,)
    assert place.request(0, replace(job, is_chat=False)).end_ids == ()
    sent = make_request(job, 0)
    names = [tensor.name for tensor in sent.inputs]
    assert "end_id" not in names and "text_input" not in names
    message = sent.raw_input_contents[names.index("messages")][4:]
    assert json.loads(message) == [{"role": "user", "content": job.prompt}]
    plain = [tensor.name for tensor in make_request(replace(job, is_chat=False), 0).inputs]
    assert "end_id" in plain and "text_input" in plain and "messages" not in plain
    body = llama_body(job)
    assert body["prompt"] == list(job.prompt_ids) and body["ignore_eos"] is False
    assert llama_body(replace(job, is_chat=False))["ignore_eos"] is True


def test_a_server_answers_messages_as_the_engines_in_process(engine_dir: Path, questions: Path, tmp_path: Path):
    prompts = load(questions, engine_dir, max_tokens=300).prompts
    alone = InProcess(engine_dir, {"fixed:4": EngineConfig.from_options(policy="fixed:4")})
    options = ["--engine-dir", str(engine_dir), "--policy", "fixed:4", "--num-threads", "1"]
    with ExitStack() as stack:
        stack.callback(alone.close)
        served = serve_all(stack, LoadClient(stack), {"served": options}, tmp_path)["served"]
        for chat in (True, False):
            jobs = [replace(job, is_chat=chat) for job in jobs_of(prompts, 12, 300, 1.0, 0)]
            if not chat:  # completions of the bare text
                jobs = [replace(job, prompt_ids=()) for job in jobs]
            here, there = (found[0] for found in (alone.run("fixed:4", jobs, 4), served(jobs, 4)))
            assert [trace.num_tokens for trace in here] == [trace.num_tokens for trace in there]
            assert [trace.num_accepted for trace in here] == pytest.approx([t.num_accepted for t in there], abs=4)
            has_ended = [trace.num_tokens < 300 for trace in here]
            assert any(has_ended) if chat else not any(has_ended)


def answer(seconds: float, num_tokens: int, num_accepted: int) -> Answer:
    responses = [1.0 + seconds * (step + 1) / 2 for step in range(2)]
    return Answer(1.0, responses, num_tokens, num_tokens, num_accepted, "")


def test_what_was_accepted_behind_the_end_does_not_count():
    found = []
    for num_accepted in (9, 3):
        trace = answer(1.0, 6, num_accepted)
        trace.cut_accepted()
        found.append(trace.num_accepted)
    assert found == [4, 3]  # two responses, so two verifications at least


def test_figures_of_a_category_are_those_of_its_requests():
    jobs = [Job("", 8, 0.0, 0, category) for category in ("a", "b", "a", "")]
    traces = [answer(1.0, 8, 4), answer(4.0, 8, 6), answer(3.0, 8, 0), answer(2.0, 8, 4)]
    found = summarise_categories(jobs, traces)
    assert list(found) == ["a", "b", "(none)"]
    assert (found["a"]["num_answers"], found["a"]["num_tokens"]) == (2, 16)
    assert [found[name]["request_tokens_per_s"] for name in found] == pytest.approx([4.0, 2.0, 4.0])
    assert [found[name]["mean_emitted"] for name in found] == pytest.approx([16 / 12, 4.0, 2.0])
    assert found["b"]["e2e_ms_p50"] == pytest.approx(4000.0)
    merged = merge_categories([found, {name: {**found[name], "request_tokens_per_s": 1.0} for name in found}])
    reference = {name: {"request_tokens_per_s_repeats": [2.0, 1.0]} for name in found}
    add_category_speedups(merged, reference)
    assert merged["a"]["request_tokens_per_s_repeats"] == pytest.approx([4.0, 1.0])
    assert merged["a"]["speedup"] == pytest.approx(1.5) and merged["a"]["num_answers"] == 2
    assert summarise_categories(jobs[3:], traces[3:]) == {}


def test_faser_bench_tells_results_by_category(engine_dir: Path, questions: Path, tmp_path: Path, capsys):
    options = BenchOptions(tmp_path, engine_dir, "none,fixed:2", prompts=questions, is_chat=True)
    run_bench(options, TINY, command="faser bench --chat")
    assert "1 of 4 prompts are left out" in capsys.readouterr().err
    bench = json.loads((tmp_path / "bench.json").read_text())
    assert bench["meta"]["prompts"]["categories"] == {"math": 2, "writing": 1}
    for row in bench["rows"]:
        categories = row["categories"]
        if row["load"] == "bursty":
            assert categories == {}
            continue
        assert set(categories) == {"math", "writing"}
        assert sum(each["num_answers"] for each in categories.values()) == row["num_jobs"]
        assert all(each["speedup"] == 1.0 for each in categories.values()) or row["policy"] != "none"
        assert all(len(each["request_tokens_per_s_repeats"]) == 2 for each in categories.values())
    html = (tmp_path / "report.html").read_text()
    assert "<h4>By category</h4>" in html and "<td>writing</td><td>fixed:2</td>" in html
    assert "rag 1 of 1" in html and "question.jsonl, as messages" in html

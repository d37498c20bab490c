"""What a client sees: refusals by name with HTTP 400, and a report that says DDTREE is at work."""

import json
from typing import Any

import pytest
import requests

from ddtree_appliance.rehearsal.server import TARGET, RehearsalServer
from tests.rehearsal.conftest import PLAIN, ServerPool, tree

pytestmark = pytest.mark.rehearsal

PROMPT = "def main():\n"
GREEDY = {"temperature": 0, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def server(pool: ServerPool) -> RehearsalServer:
    pool.stop_all_but([PLAIN, tree(64)])
    return pool[tree(64)]


NATIVE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # (what the message names, sampling parameters, fields of the request)
    ("sampling", {"temperature": 0.7}, {}),
    ("sampling", {"temperature": None}, {}),
    ("frequency_penalty", {"frequency_penalty": 0.5}, {}),
    ("presence_penalty", {"presence_penalty": 0.5}, {}),
    ("repetition_penalty", {"repetition_penalty": 1.2}, {}),
    ("min_new_tokens", {"min_new_tokens": 4}, {}),
    ("logit_bias", {"logit_bias": {"5": 1.0}}, {}),
    ("json_schema", {"json_schema": '{"type": "object"}'}, {}),
    ("regex", {"regex": "[a-z]+"}, {}),
    ("ebnf", {"ebnf": 'root ::= "a"'}, {}),
    ("return_logprob", {}, {"return_logprob": True}),
]


@pytest.mark.parametrize(("feature", "sampling", "fields"), NATIVE)
@pytest.mark.parametrize("stream", [False, True])
def test_native_requests_are_refused_by_name(
    feature: str, sampling: dict[str, Any], fields: dict[str, Any], stream: bool, server: RehearsalServer
) -> None:
    body = {"text": PROMPT, "sampling_params": {**GREEDY, **sampling}, "stream": stream, **fields}
    answer = server.post("/generate", body)
    assert answer.status_code == 400
    assert f"DDTREE does not support {feature}" in answer.json()["error"]["message"]


OPENAI: list[tuple[str, dict[str, Any]]] = [
    ("sampling", {"temperature": 1}),
    ("sampling", {}),  # SGLang's default temperature is 1.0
    ("frequency_penalty", {"temperature": 0, "frequency_penalty": 1}),
    ("logit_bias", {"temperature": 0, "logit_bias": {"5": 2}}),
    ("json_schema", {"temperature": 0, "response_format": {"type": "json_object"}}),
]


@pytest.mark.parametrize(("feature", "fields"), OPENAI)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_openai_requests_are_refused_by_name(
    feature: str, fields: dict[str, Any], path: str, stream: bool, server: RehearsalServer
) -> None:
    prompt: dict[str, Any] = {"prompt": PROMPT}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": PROMPT}]}
    answer = server.post(path, {"model": "x", "max_tokens": 8, "stream": stream, **prompt, **fields})
    assert answer.status_code == 400
    assert f"DDTREE does not support {feature}" in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_requests_are_refused_or_answered_whole(stream: bool, server: RehearsalServer) -> None:
    """Only /api/generate: in SGLang 0.5.17 /api/chat answers every request with 400, whatever the algorithm."""

    def ask(stream: bool, **options: Any) -> requests.Response:
        return server.post("/api/generate", {"model": "x", "prompt": PROMPT, "stream": stream, "options": options})

    refused = ask(stream)
    assert refused.status_code == 400
    assert "DDTREE does not support sampling" in refused.text
    chunks = [json.loads(line) for line in ask(stream, temperature=0, num_predict=20).text.splitlines()]
    whole = ask(False, temperature=0, num_predict=20).json()["response"]
    assert "".join(chunk["response"] for chunk in chunks) == whole
    assert len(whole) > 10


def test_weights_are_not_updated_under_the_drafter(server: RehearsalServer, pool: ServerPool) -> None:
    answer = server.post("/update_weights_from_disk", {"model_path": str(TARGET)})
    assert answer.status_code == 400
    assert "drafter is trained for one target" in answer.text
    assert server.is_alive()


def test_every_refused_feature_is_named_at_once(server: RehearsalServer) -> None:
    sampling = {"temperature": 1, "min_new_tokens": 2, "max_new_tokens": 8}
    message = server.post("/generate", {"text": PROMPT, "sampling_params": sampling}).json()["error"]["message"]
    assert "sampling" in message and "min_new_tokens" in message


def test_a_refused_request_leaves_the_server_exact(pool: ServerPool, server: RehearsalServer) -> None:
    body = {"text": PROMPT, "sampling_params": GREEDY}
    assert (
        server.post("/generate", body).json()["output_ids"] == pool[PLAIN].post("/generate", body).json()["output_ids"]
    )


def test_both_openai_endpoints_answer_greedy_requests(pool: ServerPool, server: RehearsalServer) -> None:
    for path, prompt in {
        "/v1/completions": {"prompt": PROMPT},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "print a list"}]},
    }.items():
        body = {"model": "x", "temperature": 0, "max_tokens": 24, **prompt}
        answers = [s.post(path, body).json() for s in (server, pool[PLAIN])]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert answers[0]["usage"] == answers[1]["usage"]


def test_several_choices_of_a_greedy_request_are_the_same(server: RehearsalServer) -> None:
    answers = server.post("/generate", {"text": PROMPT, "sampling_params": {**GREEDY, "n": 3}}).json()
    assert len(answers) == 3
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 1


def test_server_info_reports_algorithm_budget_and_verify_steps(server: RehearsalServer) -> None:
    before = server.get("/server_info").json()
    server.post("/generate", {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 40}})
    after = server.get("/server_info").json()
    assert after["speculative_algorithm"] == "DDTREE"
    assert after["speculative_ddtree_budget"] == 64
    assert after["speculative_ddtree_topk"] == 16
    assert after["speculative_dflash_block_size"] == 16
    assert after["internal_states"][0]["spec_verify_ct"] > before["internal_states"][0]["spec_verify_ct"]


def test_meta_info_reports_accept_length_verify_steps_and_node_budget(
    server: RehearsalServer, prompts: list[list[int]]
) -> None:
    meta = server.generate(prompts[0], 40)["meta_info"]
    assert meta["spec_node_budget"] == 64
    assert meta["spec_verify_ct"] > 0
    assert meta["spec_accept_length"] == pytest.approx(40 / meta["spec_verify_ct"])
    assert meta["spec_num_proposed_drafts"] == 64 * meta["spec_verify_ct"]


def test_a_single_token_needs_no_verify_step(server: RehearsalServer, prompts: list[list[int]]) -> None:
    answer = server.generate(prompts[0], 1)
    assert len(answer["output_ids"]) == 1
    assert "spec_verify_ct" not in answer["meta_info"]

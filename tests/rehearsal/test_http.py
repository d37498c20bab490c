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


LORA = {"lora_path": "adapter"}
NATIVE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # (what the message names, sampling parameters, fields of the request)
    ("DDTREE does not support return_routed_experts", {}, {"return_routed_experts": True}),
    ("DDTREE does not support sessions", {}, {"session_params": {"id": "a", "rid": None, "offset": 0}}),
    ("DDTREE does not support max_thinking_tokens", {"custom_params": {"thinking_budget": 4}}, {}),
    # SGLang's own words
    ("not configured to return hidden states", {}, {"return_hidden_states": True}),
    ("max_thinking_tokens requires", {}, {"max_thinking_tokens": 4}),
    ("return_sampling_mask", {}, {"return_sampling_mask": True}),
    ("LoRA", {}, LORA),
    ("The model takes text only", {}, {"image_data": ["data:image/png;base64,AAAA"]}),
    ("sampling_seed", {"sampling_seed": 2**63}, {}),
    ("sampling_seed", {"sampling_seed": -(2**63) - 1}, {}),
]


@pytest.mark.parametrize(("reason", "sampling", "fields"), NATIVE)
@pytest.mark.parametrize("stream", [False, True])
def test_native_requests_are_refused_by_name(
    reason: str, sampling: dict[str, Any], fields: dict[str, Any], stream: bool, server: RehearsalServer
) -> None:
    body = {"text": PROMPT, "sampling_params": {**GREEDY, **sampling}, "stream": stream, **fields}
    answer = server.post("/generate", body)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_openai_requests_are_refused_by_name(path: str, stream: bool, server: RehearsalServer) -> None:
    prompt: dict[str, Any] = {"prompt": PROMPT}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": PROMPT}]}
    body = {"model": "x", "max_tokens": 8, "stream": stream, "return_routed_experts": True, **prompt}
    answer = server.post(path, body)
    assert answer.status_code == 400
    assert "DDTREE does not support return_routed_experts" in answer.text


def test_input_embeddings_are_refused(server: RehearsalServer) -> None:
    body = {"input_embeds": [[0.0] * 256], "sampling_params": GREEDY}
    answer = server.post("/generate", body)
    assert answer.status_code == 400
    assert "input_embeds" in answer.text


def test_the_embeddings_endpoint_answers_as_without_speculation(pool: ServerPool, server: RehearsalServer) -> None:
    answers = [each.post("/v1/embeddings", {"model": "x", "input": PROMPT}) for each in (server, pool[PLAIN])]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert answers[0].json()["message"] == answers[1].json()["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_requests_are_answered_whole(stream: bool, server: RehearsalServer) -> None:
    """Only /api/generate: in SGLang 0.5.17 /api/chat answers every request with 400, whatever the algorithm."""

    def ask(stream: bool, **options: Any) -> requests.Response:
        return server.post("/api/generate", {"model": "x", "prompt": PROMPT, "stream": stream, "options": options})

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
    sampling = {**GREEDY, "custom_params": {"thinking_budget": 4}}
    body = {"text": PROMPT, "sampling_params": sampling, "return_routed_experts": True}
    message = server.post("/generate", body).json()["error"]["message"]
    assert "return_routed_experts" in message and "max_thinking_tokens" in message


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

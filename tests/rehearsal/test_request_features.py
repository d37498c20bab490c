"""Penalties, biases, log-probabilities and custom processors: the answers of plain decoding, token by token."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from ddtree_appliance.rehearsal.server import RehearsalServer
from tests.rehearsal.conftest import PLAIN, ServerPool, tree
from tests.rehearsal.processors import BanTheThirdLast
from tests.rehearsal.test_scheduling import outcome

pytestmark = pytest.mark.rehearsal

TREE = tree(16)
NEW_TOKENS = 48
GREEDY = {"temperature": 0}
# Of log-probabilities in float32: a verify step sums in another order than a decode step.
TOLERANCE = 1e-4
# Common in code, so that a minimum of new tokens has something to hold back.
STOPS = [13, 266, 289]


@pytest.fixture(scope="module")
def servers(pool: ServerPool) -> tuple[RehearsalServer, RehearsalServer]:
    pool.stop_all_but([PLAIN, TREE])
    pool.start([PLAIN, TREE])
    return pool[PLAIN], pool[TREE]


def request_of(prompt: Sequence[int], sampling: dict[str, Any], **fields: Any) -> dict[str, Any]:
    parameters = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, **sampling}
    return {"input_ids": list(prompt), "sampling_params": parameters, **fields}


def answer(server: RehearsalServer, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


SHAPED: dict[str, dict[str, Any]] = {
    "frequency": {**GREEDY, "frequency_penalty": 1.1},
    "negative frequency": {**GREEDY, "frequency_penalty": -0.3},
    "presence": {**GREEDY, "presence_penalty": 1.4},
    "repetition": {**GREEDY, "repetition_penalty": 1.3},
    "all penalties": {**GREEDY, "frequency_penalty": 0.5, "presence_penalty": -0.2, "repetition_penalty": 1.1},
    "all penalties, sampled": {
        **{"temperature": 0.9, "top_p": 0.95, "sampling_seed": 9},
        **{"frequency_penalty": 0.4, "presence_penalty": 0.2, "repetition_penalty": 1.2},
    },
    "minimum": {**GREEDY, "min_new_tokens": 20, "stop_token_ids": STOPS, "ignore_eos": False},
    "minimum inside the prefill's token": {**GREEDY, "min_new_tokens": 1, "stop_token_ids": STOPS},
    "minimum and penalties": {
        **{"temperature": 0.8, "sampling_seed": 2, "min_new_tokens": 31},
        **{"stop_token_ids": STOPS, "frequency_penalty": 0.7},
    },
    "bias": {**GREEDY, "logit_bias": {"5": 6.0, "266": -100.0}},
    "bias, sampled": {"temperature": 1.1, "sampling_seed": 5, "logit_bias": {"266": 3.0, "13": -5}},
    "sampled, with a stop string": {"temperature": 1, "top_k": 12, "sampling_seed": 8, "stop": ["self", "\n"]},
}


@pytest.mark.parametrize("name", SHAPED)
def test_what_shapes_the_distribution_shapes_it_as_in_plain_decoding(
    name: str, servers: tuple[RehearsalServer, RehearsalServer], prompts: list[list[int]]
) -> None:
    plain, ddtree = servers
    for prompt in prompts[:3]:
        body = request_of(prompt, SHAPED[name])
        assert outcome(answer(ddtree, body)) == outcome(answer(plain, body))


def test_a_penalty_changes_the_answer(
    servers: tuple[RehearsalServer, RehearsalServer], prompts: list[list[int]]
) -> None:
    """Without this, a server that ignored penalties would equal another one."""
    free = [answer(servers[0], request_of(prompt, GREEDY))["output_ids"] for prompt in prompts[:3]]
    for name in ("frequency", "presence", "repetition", "minimum", "bias"):
        shaped = [answer(servers[0], request_of(prompt, SHAPED[name]))["output_ids"] for prompt in prompts[:3]]
        assert shaped != free, name


def test_different_wishes_in_one_batch_do_not_disturb_each_other(
    servers: tuple[RehearsalServer, RehearsalServer], prompts: list[list[int]]
) -> None:
    plain, ddtree = servers
    constrained = {**GREEDY, "regex": "[a-z ]{40}", "ignore_eos": False}
    wishes = [*SHAPED.values(), GREEDY, {"temperature": 1, "sampling_seed": 1}, constrained]
    bodies = [request_of(prompts[index % 4], wish) for index, wish in enumerate(wishes)]
    with ThreadPoolExecutor(8) as senders:
        together = list(senders.map(lambda body: outcome(answer(ddtree, body)), bodies))
    assert together == [outcome(answer(plain, body)) for body in bodies]


LOGPROBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # (sampling parameters, fields)
    "prompt and outputs": (GREEDY, {"logprob_start_len": 0, "top_logprobs_num": 3, "token_ids_logprob": [5, 9]}),
    "outputs": (GREEDY, {}),
    "from the middle of the prompt": (GREEDY, {"logprob_start_len": 40, "top_logprobs_num": 1}),
    "of a draw": (
        {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 4},
        {"top_logprobs_num": 5, "token_ids_logprob": [266]},
    ),
    "a stop inside a run": ({**GREEDY, "stop": ["\n"], "ignore_eos": False}, {"top_logprobs_num": 2}),
    "a limit inside a run": ({**GREEDY, "max_new_tokens": 7}, {"top_logprobs_num": 2}),
    "one token": ({**GREEDY, "max_new_tokens": 1}, {"top_logprobs_num": 2, "token_ids_logprob": [1]}),
    "no token": ({**GREEDY, "max_new_tokens": 0}, {"logprob_start_len": 0, "top_logprobs_num": 2}),
    "under penalties": ({**GREEDY, "frequency_penalty": 1}, {"top_logprobs_num": 2}),
    "under a grammar": (
        {**GREEDY, "regex": "[a-z]{3}( = [0-9]{1,3}\\n[a-z]{2}){3}", "ignore_eos": False},
        {"top_logprobs_num": 2},
    ),
    "under a bias": ({**GREEDY, "logit_bias": {"5": 4}}, {"top_logprobs_num": 2, "token_ids_logprob": [5]}),
}


def log_probabilities(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result["meta_info"].items() if "logprobs" in name}


def assert_close(one: Any, other: Any, where: str) -> None:
    """Numbers within the tolerance, everything else equal, however deep."""
    if isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_close(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list) and isinstance(other, list):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_close(*pair, f"{where}[{index}]")
    elif isinstance(one, float) and isinstance(other, float):
        assert other == pytest.approx(one, abs=TOLERANCE, rel=TOLERANCE), where
    else:
        assert one == other, where


@pytest.mark.parametrize("name", LOGPROBS)
def test_log_probabilities_are_those_of_plain_decoding(
    name: str, servers: tuple[RehearsalServer, RehearsalServer], prompts: list[list[int]]
) -> None:
    sampling, fields = LOGPROBS[name]
    for prompt in prompts[:2]:
        body = request_of(prompt, sampling, return_logprob=True, **fields)
        plain, ddtree = (answer(server, body) for server in servers)
        assert outcome(plain) == outcome(ddtree)
        assert log_probabilities(plain).keys() == log_probabilities(ddtree).keys()
        for field, values in log_probabilities(plain).items():
            assert_close(values, log_probabilities(ddtree)[field], field)
        tokens = [token for _, token, _ in ddtree["meta_info"]["output_token_logprobs"]]
        assert tokens == ddtree["output_ids"]


def test_log_probabilities_in_a_batch_belong_to_their_requests(
    servers: tuple[RehearsalServer, RehearsalServer], prompts: list[list[int]]
) -> None:
    bodies = [
        request_of(prompts[index % 5], sampling, return_logprob=index % 3 != 0, **fields)
        for index, (sampling, fields) in enumerate(LOGPROBS.values())
    ]
    with ThreadPoolExecutor(8) as senders:
        together = list(senders.map(lambda body: answer(servers[1], body), bodies))
    for body, result in zip(bodies, together, strict=True):
        alone = answer(servers[0], body)
        assert outcome(result) == outcome(alone)
        for field, values in log_probabilities(alone).items():
            assert_close(values, log_probabilities(result)[field], field)


@pytest.mark.parametrize("sampling", [GREEDY, {"temperature": 1, "sampling_seed": 3}], ids=["greedy", "sampled"])
def test_a_processor_sees_the_outputs_of_every_node(
    sampling: dict[str, Any], servers: tuple[RehearsalServer, RehearsalServer], prompts: list[list[int]]
) -> None:
    """One that reads its request: a node's path counts as output."""
    changed = 0
    for prompt in prompts[:3]:
        body = request_of(prompt, {**sampling, "custom_params": {"strength": 8.0}})
        asked = {**body, "custom_logit_processor": BanTheThirdLast.to_str()}
        plain, ddtree = (outcome(answer(server, asked)) for server in servers)
        assert ddtree == plain
        changed += plain != outcome(answer(servers[0], body))
    assert changed > 1, "the processor does nothing here"


# Through OpenAI's own client


@pytest.fixture
def clients(servers: tuple[RehearsalServer, RehearsalServer]) -> list[openai.OpenAI]:
    return [openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) for server in servers]


PROMPT = "def read(path):\n"
COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded, as by default": {"seed": 11},
    "several choices": {"seed": 3, "n": 3, "top_p": 0.9},
    "log-probabilities": {"seed": 5, "logprobs": 3},
    "echo with log-probabilities": {"temperature": 0, "logprobs": 1, "echo": True},
    "penalties": {"temperature": 0, "frequency_penalty": 0.8, "presence_penalty": 0.3},
    "bias": {"temperature": 0, "logit_bias": {"266": -100}},
    "stop": {"temperature": 0, "stop": ["return"]},
}
CHATS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded, as by default": {"seed": 11},
    "several choices": {"seed": 3, "n": 2},
    "log-probabilities": {"seed": 5, "logprobs": True, "top_logprobs": 3},
    "JSON": {
        "temperature": 0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "point",
                "schema": {
                    "type": "object",
                    "properties": {"x": {"type": "integer", "maximum": 99}, "y": {"type": "boolean"}},
                    "required": ["x", "y"],
                },
            },
        },
    },
}


def choices_of(response: Any) -> list[dict[str, Any]]:
    return [choice.model_dump() for choice in response.choices]


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions_by_openais_client_equal_plain_decoding(name: str, clients: list[openai.OpenAI]) -> None:
    plain, ddtree = (
        client.completions.create(model="x", prompt=PROMPT, max_tokens=24, **COMPLETIONS[name]) for client in clients
    )
    for one, other in zip(choices_of(plain), choices_of(ddtree), strict=True):
        assert one["text"] == other["text"]
        assert_close(one, other, "choice")
    assert plain.usage.completion_tokens == ddtree.usage.completion_tokens


@pytest.mark.parametrize("name", CHATS)
def test_chats_by_openais_client_equal_plain_decoding(name: str, clients: list[openai.OpenAI]) -> None:
    messages = [{"role": "user", "content": "print a list"}]
    plain, ddtree = (
        client.chat.completions.create(model="x", messages=messages, max_tokens=24, **CHATS[name]) for client in clients
    )
    for one, other in zip(choices_of(plain), choices_of(ddtree), strict=True):
        assert_close(one, other, "choice")
    if name == "JSON":
        assert set(json.loads(ddtree.choices[0].message.content)) == {"x", "y"}


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 11}, {"seed": 2, "stop": [":"]}])
def test_a_streamed_answer_is_the_whole_one(sampling: dict[str, Any], clients: list[openai.OpenAI]) -> None:
    asked = {"model": "x", "prompt": PROMPT, "max_tokens": 30, **sampling}
    whole = clients[1].completions.create(**asked)
    with clients[1].completions.create(stream=True, **asked) as stream:
        pieces = [event.choices[0] for event in stream if event.choices]
    assert "".join(piece.text for piece in pieces) == whole.choices[0].text
    assert pieces[-1].finish_reason == whole.choices[0].finish_reason


def test_native_and_openai_endpoints_draw_the_same_tokens(
    servers: tuple[RehearsalServer, RehearsalServer], clients: list[openai.OpenAI]
) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.9, "max_new_tokens": 24, "sampling_seed": 21}
    native = servers[1].post("/generate", {"text": PROMPT, "sampling_params": sampling}).json()["text"]
    completion = clients[1].completions.create(
        model="x", prompt=PROMPT, max_tokens=24, temperature=0.9, top_p=0.9, seed=21
    )
    assert completion.choices[0].text == native


def test_a_sampled_request_that_is_cut_off_leaves_the_server_exact(
    servers: tuple[RehearsalServer, RehearsalServer], clients: list[openai.OpenAI], prompts: list[list[int]]
) -> None:
    for seed in range(4):
        with clients[1].completions.create(
            model="x", prompt=PROMPT, max_tokens=400, stream=True, seed=seed, frequency_penalty=0.1
        ) as stream:
            next(iter(stream))
    body = request_of(prompts[0], SHAPED["all penalties, sampled"])
    assert outcome(answer(servers[1], body)) == outcome(answer(servers[0], body))

"""Grammars under trees: answers are inside them, and the tokens are those of plain decoding under the same grammar."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import pytest

from ddtree_appliance.rehearsal.server import TARGET, RehearsalServer
from tests.rehearsal.conftest import Kind, ServerPool, tree

pytestmark = pytest.mark.rehearsal

FLAGS = ("--tool-call-parser", "qwen25")
REFERENCE = Kind(flags=FLAGS)
TREE = tree(16, *FLAGS)

EOS = 0
VOCABULARY = 4096
CASES = 200
LIMIT = 40
Body = dict[str, Any]
Answer = dict[str, Any]
Servers = tuple[RehearsalServer, RehearsalServer]


@dataclass(frozen=True)
class Grammar:
    """kind: the sampling parameter that carries it."""

    kind: str
    text: str

    @property
    def parameters(self) -> dict[str, str]:
        return {self.kind: self.text}

    def holds(self, text: str) -> bool:
        """Whether a whole answer is inside the grammar, judged without xgrammar where that is possible."""
        if self.kind == "regex":
            return re.fullmatch(self.text, text) is not None
        if self.kind == "json_schema":
            jsonschema = pytest.importorskip("jsonschema")
            try:
                jsonschema.validate(json.loads(text), json.loads(self.text))
            except (json.JSONDecodeError, jsonschema.ValidationError):
                return False
            return True
        return True  # the matcher, which reads every answer's tokens, is all there is


@cache
def tokenizer() -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(TARGET)


@cache
def no_blanks() -> dict[str, float]:
    """A logit bias. The bundled model likes to indent; without blanks its JSON comes to an end."""
    texts = tokenizer().batch_decode([[token] for token in range(VOCABULARY)])
    return {str(token): -30.0 for token, text in enumerate(texts) if text.isspace()}


class Judge:
    """xgrammar's matchers in this process, for the bundled tokenizer."""

    @cached_property
    def _compiler(self) -> Any:
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer(), vocab_size=VOCABULARY, stop_token_ids=[EOS])
        return xgrammar.GrammarCompiler(info)

    def matcher(self, grammar: Grammar) -> Any:
        import xgrammar

        compile_ = {
            "json_schema": self._compiler.compile_json_schema,
            "regex": self._compiler.compile_regex,
            "ebnf": self._compiler.compile_grammar,
        }
        return xgrammar.GrammarMatcher(compile_[grammar.kind](grammar.text))

    def check(self, grammar: Grammar, answer: Answer) -> str:
        """Assert that an answer is in the grammar or, if its length was limited, can be continued in it."""
        matcher, tokens = self.matcher(grammar), answer["output_ids"]
        for at, token in enumerate(tokens):
            assert matcher.accept_token(token), (grammar, answer["text"], tokens[at:])
        end = answer["meta_info"]["finish_reason"]
        if end["type"] == "stop":
            assert end["matched"] == EOS == tokens[-1]
            assert matcher.is_terminated()
            assert grammar.holds(answer["text"]), (grammar, answer["text"])
        else:
            assert end == {"type": "length", "length": len(tokens)}
            assert EOS not in tokens
        return str(end["type"])


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


@pytest.fixture(scope="module")
def servers(pool: ServerPool) -> Servers:
    """(without speculation, with a tree of 16 nodes)."""
    pool.stop_all_but([REFERENCE, TREE])
    pool.start([REFERENCE, TREE])
    return pool[REFERENCE], pool[TREE]


def body(prompt: Sequence[int], max_new_tokens: int = LIMIT, fields: Body | None = None, **parameters: Any) -> Body:
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, **parameters}
    return {"input_ids": list(prompt), "sampling_params": sampling, **(fields or {})}


def ask(server: RehearsalServer, request: Body) -> Answer:
    answer = server.post("/generate", request)
    assert answer.status_code == 200, answer.text
    result: Answer = answer.json()
    return result


def ask_all(server: RehearsalServer, requests: Sequence[Body]) -> list[Answer]:
    with ThreadPoolExecutor(8) as senders:
        return list(senders.map(lambda request: ask(server, request), requests))


def ask_both(servers: Servers, requests: Sequence[Body]) -> tuple[list[Answer], list[Answer]]:
    """8 requests at a time on each."""
    with ThreadPoolExecutor(2) as sides:
        plain, ddtree = sides.map(lambda server: ask_all(server, requests), servers)
        return plain, ddtree


def essence(answer: Answer) -> dict[str, Any]:
    meta = answer["meta_info"]
    return {
        "text": answer["text"],
        "output_ids": answer["output_ids"],
        "finish_reason": meta["finish_reason"],
        "completion_tokens": meta["completion_tokens"],
    }


def assert_equal(plain: Sequence[Answer], ddtree: Sequence[Answer]) -> None:
    assert [essence(answer) for answer in ddtree] == [essence(answer) for answer in plain]


def accept_length(answers: Sequence[Answer]) -> float:
    """Tokens per verify step; the first token is the prefill's."""
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    return sum(answer["meta_info"]["completion_tokens"] - 1 for answer in answers) / steps


# Random grammars

NAMES = ["a", "id", "name", "kind", "is_open", "number of items", "QZJXQWVKZ", "größe"]
WORDS = ["red", "green", "blue", "def", "None", "x", "two words", "ZQXJ", "é"]


def random_value(source: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = source.choice(["string", "integer", "boolean", "enum", "null", *(["array", "object"] if depth < 2 else [])])
    if kind == "string":
        low = source.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + source.randint(0, 5)}
    if kind == "integer":
        low = source.choice([0, 1, -20, 100])
        return {"type": "integer", "minimum": low, "maximum": low + source.choice([0, 7, 300])}
    if kind == "enum":
        return {"enum": source.sample([*WORDS, 5, None, True], source.randint(1, 4))}
    if kind == "array":
        low = source.randint(0, 2)
        items = random_value(source, depth + 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + source.randint(0, 2)}
    return random_object(source, depth + 1) if kind == "object" else {"type": kind}


def random_object(source: random.Random, depth: int = 0) -> dict[str, Any]:
    properties = {name: random_value(source, depth) for name in source.sample(NAMES, source.randint(1, 3))}
    required = [name for name in properties if source.random() < 0.8]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def random_regex(source: random.Random, depth: int = 0) -> str:
    """Bounded, and read alike by xgrammar and `re`."""
    kind = source.choice(["literal", "class", "choice", "repeat", "sequence", "optional"] if depth < 3 else ["literal"])
    if kind == "literal":
        return "".join(source.choice("abcdefXYZ019_ =:") for _ in range(source.randint(1, 6)))
    if kind == "class":
        low = source.randint(0, 3)
        return (
            f"{source.choice(['[a-z]', '[0-9]', '[A-Z_]', '[^a-z ]', '[abc]'])}{{{low},{low + source.randint(0, 6)}}}"
        )
    if kind == "choice":
        return "(" + "|".join(random_regex(source, depth + 1) for _ in range(source.randint(2, 4))) + ")"
    if kind == "repeat":
        low = source.randint(1, 2)
        return f"({random_regex(source, depth + 1)}){{{low},{low + source.randint(0, 2)}}}"
    if kind == "optional":
        return f"({random_regex(source, depth + 1)})?"
    return "".join(random_regex(source, depth + 1) for _ in range(source.randint(2, 3)))


EBNFS = [
    'root ::= term ("+" term){%d,%d}\nterm ::= [0-9]{1,3} | "(" root ")"',
    'root ::= item{%d,%d} "."\nitem ::= "- " [a-z]+ "\\n"',
    'root ::= "[" word (", " word){%d,%d} "]"\nword ::= "yes" | "no" | "\\"" [a-z]{1,4} "\\""',
    'root ::= ("if " name ":" | "while " name ":"){%d,%d} " pass"\nname ::= [a-z_]{1,9}',
]


def random_grammars(count: int, seed: int) -> list[Grammar]:
    source = random.Random(seed)
    grammars = []
    for number in range(count):
        kind = ("json_schema", "regex", "ebnf", "json_schema")[number % 4]
        if kind == "json_schema":
            text = json.dumps(random_object(source), ensure_ascii=False)
        elif kind == "regex":
            text = random_regex(source) + random_regex(source)
        else:
            low = source.randint(0, 2)
            text = source.choice(EBNFS) % (low, low + source.randint(0, 2))
        grammars.append(Grammar(kind, text))
    return grammars


def requests_under(
    grammars: Sequence[Grammar], prompts: Sequence[Sequence[int]], fields: Body | None = None, **parameters: Any
) -> list[Body]:
    """Most JSON without blanks; prompts of several lengths."""
    return [
        body(
            prompts[number % len(prompts)][: 20 + 7 * (number % 11)],
            fields=fields,
            **grammar.parameters,
            **({"logit_bias": no_blanks()} if number % 8 in (0, 3, 4) else {}),
            **parameters,
        )
        for number, grammar in enumerate(grammars)
    ]


@dataclass
class Greedy:
    """The random grammars, and what both servers answered."""

    grammars: list[Grammar]
    plain: list[Answer]
    ddtree: list[Answer]


@pytest.fixture(scope="module")
def greedy(servers: Servers, prompts: list[list[int]]) -> Greedy:
    grammars = random_grammars(CASES, seed=1)
    return Greedy(grammars, *ask_both(servers, requests_under(grammars, prompts)))


def test_answers_under_random_grammars_are_inside_them(greedy: Greedy, judge: Judge) -> None:
    ends = [judge.check(grammar, answer) for grammar, answer in zip(greedy.grammars, greedy.ddtree, strict=True)]
    for kind in ("json_schema", "regex", "ebnf"):
        of_kind = [end for grammar, end in zip(greedy.grammars, ends, strict=True) if grammar.kind == kind]
        assert of_kind.count("stop") > 20, kind
    assert ends.count("length") > 10


def test_greedy_tokens_under_random_grammars_equal_plain_decoding(greedy: Greedy) -> None:
    assert_equal(greedy.plain, greedy.ddtree)


def test_runs_are_accepted_under_grammars(greedy: Greedy) -> None:
    long = [answer for answer in greedy.ddtree if answer["meta_info"]["completion_tokens"] > 12]
    print(f"accept length under {len(long)} random grammars: {accept_length(long):.2f}")
    assert accept_length(long) > 1.8


def test_seeded_samples_under_grammars_equal_plain_decoding(
    servers: Servers, prompts: list[list[int]], judge: Judge
) -> None:
    grammars = random_grammars(24, seed=2)
    source = random.Random(2)
    requests = []
    for number, grammar in enumerate(grammars):
        sampling = {
            "temperature": source.choice([0.6, 1.0, 1.5]),
            "top_p": source.choice([1.0, 0.9]),
            "top_k": source.choice([-1, 20]),
            "min_p": source.choice([0.0, 0.05]),
            "sampling_seed": number,
        }
        requests += requests_under([grammar], [prompts[number % len(prompts)]], **sampling)
    plain, ddtree = ask_both(servers, requests)
    assert_equal(plain, ddtree)
    ends = [judge.check(grammar, answer) for grammar, answer in zip(grammars, ddtree, strict=True)]
    assert ends.count("stop") > 10
    unsampled = ask_all(servers[1], requests_under(grammars[:8], prompts))
    assert [answer["output_ids"] for answer in unsampled] != [answer["output_ids"] for answer in ddtree[:8]]


def test_free_requests_in_a_batch_with_grammars_are_not_touched(
    servers: Servers, prompts: list[list[int]], judge: Judge
) -> None:
    grammars = random_grammars(8, seed=3)
    free = [body(prompt, 24, ignore_eos=True) for prompt in prompts[:8]]
    penalised = [body(prompt, 24, frequency_penalty=0.7) for prompt in prompts[:4]]
    constrained = requests_under(grammars, prompts)
    mixed = [request for group in zip(constrained, free, strict=True) for request in group] + penalised
    plain, ddtree = ask_both(servers, mixed)
    assert_equal(plain, ddtree)
    alone = [ask(servers[1], request) for request in free[:4]]
    assert_equal(alone, ddtree[1:8:2])
    for grammar, answer in zip(grammars, ddtree[:16:2], strict=True):
        judge.check(grammar, answer)


def test_log_probabilities_under_grammars_equal_plain_decoding(servers: Servers, prompts: list[list[int]]) -> None:
    fields = {"return_logprob": True, "top_logprobs_num": 2}
    plain, ddtree = ask_both(servers, requests_under(random_grammars(16, seed=4), prompts, fields))
    assert_equal(plain, ddtree)
    for expected, answer in zip(plain, ddtree, strict=True):
        for key in ("output_token_logprobs", "output_top_logprobs"):
            assert_logprobs(expected["meta_info"][key], answer["meta_info"][key])


def assert_logprobs(expected: Any, found: Any) -> None:
    """Nested lists with numbers that may differ by rounding."""
    if isinstance(expected, list):
        assert isinstance(found, list) and len(found) == len(expected)
        for one, other in zip(expected, found, strict=True):
            assert_logprobs(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-3)
    else:
        assert found == expected


def test_streamed_tokens_under_a_grammar_are_the_whole_answers(servers: Servers, prompts: list[list[int]]) -> None:
    for prompt, grammar in zip(prompts, random_grammars(4, seed=5), strict=False):
        whole = ask(servers[1], body(prompt, LIMIT, **grammar.parameters))
        runs, _ = servers[1].stream(prompt, LIMIT, **grammar.parameters, ignore_eos=False)
        assert [token for run in runs for token in run] == whole["output_ids"]


# Runs that the grammar alone writes

# No token spells two of its letters together, so that after each one the next is forced.
LITERAL = "qzjxqwvkzqjqxzqwqjvzxqejkcztjzrjdqaojyzbztjiwfvbfbxrhwvjqaqhy"


def forced(literal: str = LITERAL, after: str = "[a-z]{2}") -> Grammar:
    return Grammar("regex", literal + after)


def test_forced_runs_raise_the_accept_length(servers: Servers, prompts: list[list[int]], judge: Judge) -> None:
    free = ask_all(servers[1], [body(prompt, 62, ignore_eos=True) for prompt in prompts[:8]])
    plain, under = ask_both(servers, [body(prompt, 80, **forced().parameters) for prompt in prompts[:8]])
    assert_equal(plain, under)
    for answer in under:
        assert judge.check(forced(), answer) == "stop"
    print(f"accept length: {accept_length(free):.2f} free, {accept_length(under):.2f} under a forced literal")
    assert accept_length(under) > 10 > 5 > accept_length(free)


def test_forced_property_names_raise_the_accept_length(servers: Servers, prompts: list[list[int]]) -> None:
    properties = {name: {"type": "boolean"} for name in ("QZJXQWVKZQJXQZQWVXZJ", "ZXQWQJZVXKQJXZQVQWZX")}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    grammar = Grammar("json_schema", json.dumps(schema))
    free = ask_all(servers[1], [body(prompt, LIMIT, ignore_eos=True) for prompt in prompts[:8]])
    requests = [body(prompt, 80, **grammar.parameters, logit_bias=no_blanks()) for prompt in prompts[:8]]
    plain, under = ask_both(servers, requests)
    assert_equal(plain, under)
    assert all(grammar.holds(answer["text"]) for answer in under)
    print(f"accept length: {accept_length(free):.2f} free, {accept_length(under):.2f} under forced names")
    assert accept_length(under) > 1.5 * accept_length(free)


def test_stop_strings_inside_forced_runs_end_where_plain_decoding_ends(
    servers: Servers, prompts: list[list[int]]
) -> None:
    requests = [
        body(prompts[at % 4], 80, **forced().parameters, stop=[LITERAL[at : at + 1 + at % 4]]) for at in range(0, 60, 3)
    ]
    plain, ddtree = ask_both(servers, requests)
    assert_equal(plain, ddtree)
    assert len({answer["meta_info"]["completion_tokens"] for answer in ddtree}) > 10
    assert all(answer["meta_info"]["finish_reason"]["type"] == "stop" for answer in ddtree)


@pytest.mark.parametrize("cut", ["max_new_tokens", "stop_token_ids"])
def test_limits_and_stop_tokens_cut_a_forced_run_exactly(cut: str, servers: Servers, prompts: list[list[int]]) -> None:
    (whole,) = ask_all(servers[1], [body(prompts[0], 80, **forced().parameters)])
    requests = []
    for at in range(1, 24):
        request = body(prompts[0], 80, **forced().parameters)
        request["sampling_params"][cut] = at if cut == "max_new_tokens" else [whole["output_ids"][at]]
        requests.append(request)
    plain, ddtree = ask_both(servers, requests)
    assert_equal(plain, ddtree)
    for answer in ddtree:
        assert answer["output_ids"] == whole["output_ids"][: len(answer["output_ids"])]


def test_a_grammar_that_ends_ends_the_request_even_if_the_end_of_text_is_ignored(
    servers: Servers, prompts: list[list[int]]
) -> None:
    """SGLang without speculation adds one token after the end; with it, accepted runs end with the grammar."""
    for text in ("[a-z]{4}", LITERAL[:30], "(yes|no)"):
        grammar = Grammar("regex", text)
        plain, ddtree = (
            ask(server, body(prompts[1], LIMIT, **grammar.parameters, ignore_eos=True)) for server in servers
        )
        assert ddtree["output_ids"][-1] == EOS
        assert ddtree["output_ids"].count(EOS) == 1
        assert grammar.holds(ddtree["text"])
        assert ddtree["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
        assert plain["output_ids"][: len(ddtree["output_ids"])] == ddtree["output_ids"]


# The OpenAI endpoints

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 30}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}}
    for name in ("get_weather", "book_journey")
]
CHATS: dict[str, Body] = {
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}},
    "json_object": {"response_format": {"type": "json_object"}},
    "required": {"tools": TOOLS, "tool_choice": "required"},
    "named": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "book_journey"}}},
    "auto": {"tools": TOOLS, "tool_choice": "auto"},
}


def chat(server: RehearsalServer, fields: Body, **parameters: Any) -> Body:
    request = {
        "model": "x",
        "messages": [{"role": "user", "content": "plan a journey"}],
        "temperature": 0,
        "max_tokens": 80,
        "logit_bias": no_blanks(),
        **fields,
        **parameters,
    }
    answer = server.post("/v1/chat/completions", request)
    assert answer.status_code == 200, answer.text
    result: Body = answer.json()
    for choice in result["choices"]:
        for call in choice["message"].get("tool_calls") or []:
            del call["id"]  # random
    return result


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "sampled"])
def test_chats_under_a_grammar_equal_plain_decoding(name: str, sampling: Body, servers: Servers) -> None:
    plain, ddtree = (chat(server, CHATS[name], **sampling) for server in servers)
    assert ddtree["choices"] == plain["choices"]
    assert ddtree["usage"] == plain["usage"]


def test_a_chats_answer_is_the_json_that_it_was_asked_for(servers: Servers) -> None:
    message = chat(servers[1], CHATS["json_schema"])["choices"][0]["message"]
    assert Grammar("json_schema", json.dumps(SCHEMA)).holds(message["content"])


def test_a_tool_that_must_be_called_is_called(servers: Servers) -> None:
    calls = chat(servers[1], CHATS["required"])["choices"][0]["message"]["tool_calls"]
    assert calls
    for call in calls:
        assert call["function"]["name"] in ("get_weather", "book_journey")
        assert Grammar("json_schema", json.dumps(SCHEMA)).holds(call["function"]["arguments"])


# Grammars that cannot be

INVALID = {
    "an unclosed class": ({"regex": "[a-"}, "Unclosed"),
    "no json": ({"json_schema": "{"}, "Failed to compile json grammar"),
    "an unknown type": ({"json_schema": '{"type": "nothing"}'}, "Unsupported type"),
    "an empty rule": ({"ebnf": "root ::="}, "EBNF parser error"),
    "no root": ({"ebnf": 'other ::= "a"'}, "root"),
    "two at once": ({"regex": "a", "json_schema": "{}"}, "Only one of"),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_grammar_is_refused_with_its_reason(name: str, servers: Servers, prompts: list[list[int]]) -> None:
    parameters, reason = INVALID[name]
    answer = servers[1].post("/generate", body(prompts[0], **parameters))
    assert answer.status_code == 400, answer.text
    assert reason in answer.text
    assert servers[1].is_alive()


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_streamed_invalid_grammar_is_refused_with_a_status(
    path: str, servers: Servers, prompts: list[list[int]]
) -> None:
    parameters, reason = INVALID["an unclosed class"]
    asked = body(prompts[0], fields={"stream": True}, **parameters)
    if path == "/v1/completions":
        asked = {"model": "x", "prompt": "a", "max_tokens": 8, "stream": True, **parameters}
    answer = servers[1].post(path, asked)
    assert answer.status_code == 400
    assert reason in answer.text
    assert servers[1].is_alive()


def test_invalid_grammars_among_others_harm_none_of_them(
    servers: Servers, prompts: list[list[int]], greedy: Greedy
) -> None:
    requests = requests_under(greedy.grammars[:16], prompts)
    bad = [body(prompts[0], **parameters) for parameters, _ in INVALID.values()]
    mixed = [each for pair in zip(requests, bad * 3, strict=False) for each in pair]
    with ThreadPoolExecutor(8) as senders:
        answers = list(senders.map(lambda request: servers[1].post("/generate", request), mixed))
    assert [answer.status_code for answer in answers] == [200, 400] * 16
    assert_equal(greedy.plain[:16], [answer.json() for answer in answers[::2]])


THINKING = ("--reasoning-parser", "qwen3")


def test_thoughts_before_a_grammar_equal_plain_decoding_and_are_counted_right(pool: ServerPool) -> None:
    """The model never ends its thoughts, so that the limit cuts an accepted run of them."""
    kinds = [Kind(flags=THINKING), tree(16, *THINKING)]
    pool.stop_all_but([])
    pool.start(kinds)
    for number in range(6):
        request = {
            "model": "x",
            "messages": [{"role": "user", "content": f"plan a journey {number}"}],
            "response_format": {"type": "json_object"},
            "chat_template_kwargs": {"enable_thinking": True},
            "temperature": number % 2,
            "seed": number,
            "max_tokens": 60,
        }
        plain, ddtree = (pool[kind].post("/v1/chat/completions", request).json() for kind in kinds)
        assert ddtree["choices"] == plain["choices"]
        assert ddtree["usage"] == plain["usage"]
        assert 0 < ddtree["usage"]["reasoning_tokens"] <= ddtree["usage"]["completion_tokens"]

"""Where a request ends: at stop strings, stop tokens, EOS or the limit inside an accepted run, as in plain decoding."""

from collections.abc import Iterator
from typing import Any

import pytest

from ddtree_appliance.rehearsal.prompts import heldout_documents
from ddtree_appliance.rehearsal.server import RehearsalServer
from tests.rehearsal.conftest import NEW_TOKENS, PLAIN, ServerPool, tree

pytestmark = pytest.mark.rehearsal

EOS = 0
COMPARED = ("finish_reason", "completion_tokens", "prompt_tokens")


@pytest.fixture(scope="module")
def servers(pool: ServerPool) -> tuple[RehearsalServer, RehearsalServer]:
    """(without speculation, with a tree of 64 nodes)."""
    pool.start([PLAIN, tree(64)])
    return pool[PLAIN], pool[tree(64)]


def ending(answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "text": answer["text"],
        "output_ids": answer["output_ids"],
        **{key: answer["meta_info"][key] for key in COMPARED},
    }


def stop_strings(text: str) -> Iterator[str]:
    """Strings that occur in `text`, at many offsets and lengths, across token borders."""
    for start in range(3, len(text) - 8, 11):
        yield text[start : start + 1 + start % 6]


def test_stop_strings_end_where_plain_decoding_ends(
    servers: tuple[RehearsalServer, RehearsalServer], prompts: list[list[int]]
) -> None:
    plain, ddtree = servers
    ends = set()
    for prompt in prompts[1:3]:
        for stop in stop_strings(plain.generate(prompt, NEW_TOKENS)["text"]):
            expected = ending(plain.generate(prompt, NEW_TOKENS, stop=[stop]))
            assert ending(ddtree.generate(prompt, NEW_TOKENS, stop=[stop])) == expected
            ends.add((expected["finish_reason"]["type"], expected["completion_tokens"]))
    assert len({tokens for kind, tokens in ends if kind == "stop"}) > 10  # many offsets in an accepted run


def test_the_earliest_of_several_stops_wins(
    servers: tuple[RehearsalServer, RehearsalServer], prompts: list[list[int]]
) -> None:
    """Stops that lie in the same accepted run, listed late one first, with a stop token between them."""
    plain, ddtree = servers
    for prompt in prompts[:6]:
        free = plain.generate(prompt, NEW_TOKENS)
        text, tokens = free["text"], free["output_ids"]
        for at in range(8, 48, 8):
            stops = {"stop": [text[at + 5 : at + 9], text[at : at + 4]], "stop_token_ids": [tokens[at // 2]]}
            expected = ending(plain.generate(prompt, NEW_TOKENS, ignore_eos=False, **stops))
            assert ending(ddtree.generate(prompt, NEW_TOKENS, ignore_eos=False, **stops)) == expected


@pytest.mark.parametrize("limit_after_stop", range(-3, 4))
def test_a_stop_token_near_the_length_limit_ends_as_plain_decoding_does(
    limit_after_stop: int, servers: tuple[RehearsalServer, RehearsalServer], prompts: list[list[int]]
) -> None:
    """Defect B: the limit used to win over a stop in the same accepted run."""
    plain, ddtree = servers
    texts = [(prompt, plain.generate(prompt, NEW_TOKENS)["output_ids"]) for prompt in prompts[:12]]
    # The first token after the tenth that did not occur before.
    new = [(p, t, i) for p, t in texts for i in range(10, NEW_TOKENS) if t[i] not in t[:i]]
    cases = {tuple(prompt): (tokens, at) for prompt, tokens, at in reversed(new)}
    assert len(cases) >= 6
    for key, (tokens, at) in cases.items():
        prompt = list(key)
        parameters = {"stop_token_ids": [tokens[at]], "ignore_eos": False}
        expected = ending(plain.generate(prompt, at + 1 + limit_after_stop, **parameters))
        assert ending(ddtree.generate(prompt, at + 1 + limit_after_stop, **parameters)) == expected
        assert expected["finish_reason"]["type"] == ("stop" if limit_after_stop >= 0 else "length")


@pytest.fixture(scope="module")
def prompts_that_end(servers: tuple[RehearsalServer, RehearsalServer]) -> list[tuple[list[int], dict[str, Any]]]:
    """Ends of documents, after which the target writes end-of-text, with plain decoding's answers."""
    plain, _ = servers
    found = []
    for document in heldout_documents()[::4]:
        for cut in (4, 12):
            prompt = document[-96 - cut : -cut]
            answer = plain.generate(prompt, 96, ignore_eos=False)
            if answer["meta_info"]["finish_reason"].get("matched") == EOS:
                found.append((prompt, answer))
    assert len(found) >= 5
    return found


def test_nothing_is_emitted_after_end_of_text(
    servers: tuple[RehearsalServer, RehearsalServer], prompts_that_end: list[tuple[list[int], dict[str, Any]]]
) -> None:
    _, ddtree = servers
    for prompt, expected in prompts_that_end:
        answer = ddtree.generate(prompt, 96, ignore_eos=False)
        assert ending(answer) == ending(expected)
        assert EOS not in answer["output_ids"][:-1]


def test_ignored_end_of_text_is_a_token_like_any_other(
    servers: tuple[RehearsalServer, RehearsalServer], prompts_that_end: list[tuple[list[int], dict[str, Any]]]
) -> None:
    plain, ddtree = servers
    for prompt, _ in prompts_that_end[:5]:
        assert ending(ddtree.generate(prompt, 96)) == ending(plain.generate(prompt, 96))


def test_a_follow_up_after_a_stop_gets_the_tokens_of_a_fresh_server(
    servers: tuple[RehearsalServer, RehearsalServer], prompts_that_end: list[tuple[list[int], dict[str, Any]]]
) -> None:
    """The radix cache holds the finished request, run past its stop included; none of it may be unverified."""
    plain, ddtree = servers
    for prompt, answer in prompts_that_end[:5]:
        first = ddtree.generate(prompt, 96, ignore_eos=False)
        follow_up = [*prompt, *first["output_ids"], *prompt[:32]]
        cached = ddtree.generate(follow_up, 32)
        assert cached["meta_info"]["cached_tokens"] >= len(prompt)
        ddtree.flush_cache()
        fresh = ddtree.generate(follow_up, 32)
        assert fresh["meta_info"]["cached_tokens"] == 0
        assert cached["output_ids"] == fresh["output_ids"] == plain.generate(follow_up, 32)["output_ids"]
        assert first["output_ids"] == answer["output_ids"]


def test_streamed_text_equals_the_whole_answer_with_stop_strings(
    servers: tuple[RehearsalServer, RehearsalServer], prompts: list[list[int]]
) -> None:
    _, ddtree = servers
    for prompt in prompts[:6]:
        text = ddtree.generate(prompt, NEW_TOKENS)["text"]
        stop = [text[40:44]]
        whole = ddtree.generate(prompt, NEW_TOKENS, stop=stop)
        runs, _ = ddtree.stream(prompt, NEW_TOKENS, stop=stop)
        assert [token for run in runs for token in run] == whole["output_ids"]

"""The load generator against a fake server: exactly N at a time, every prompt once, failures with a name."""

from __future__ import annotations

import pytest

from ddtree_appliance.bench.load import RequestRefused, run_load, sampling_parameters, try_request
from ddtree_appliance.bench.prompts import Prompt
from ddtree_appliance.errors import ApplianceError
from tests.unit.bench.fake_server import FakeServer

PROMPTS: list[Prompt] = [[number] for number in range(20)]
SAMPLING = sampling_parameters(16, 0.0)


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_n_requests_are_in_flight_and_every_prompt_is_sent_once(concurrency: int) -> None:
    with FakeServer(accepted=3, delay_s=0.01, wait_for=concurrency).serving() as fake:
        load = run_load(fake.url, "x", PROMPTS, concurrency, SAMPLING)
    assert fake.most_in_flight == concurrency
    assert sorted(fake.prompts) == sorted(PROMPTS)
    # In the prompts' order, whatever the order in which they ended.
    assert [answer.tokens[0] for answer in load.answers] == list(range(20))
    waves = -(-20 // concurrency)
    assert load.wall_s >= waves * 0.01


def test_an_answer_has_the_steps_and_the_time_after_its_first_token() -> None:
    with FakeServer(accepted=3, delay_s=0.4).serving() as fake:
        load = run_load(fake.url, "x", ["text"], 4, SAMPLING)
    (answer,) = load.answers
    assert fake.prompts == ["text"]
    assert (len(answer.tokens), answer.verify_steps, answer.correct_drafts) == (16, 5, 10)
    # On a busy machine the client is late to read the first token.
    assert answer.decode_s >= 0.2
    assert 0 < answer.first_s < load.wall_s - answer.decode_s


def test_without_speculation_there_are_no_verify_steps() -> None:
    with FakeServer().serving() as fake:
        answer = run_load(fake.url, "x", PROMPTS[:1], 1, SAMPLING).answers[0]
    assert (answer.verify_steps, answer.correct_drafts) == (0, 0)


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (FakeServer(fail_at=2), "variant tree-9: /generate answered 500: .*out of luck"),
        (FakeServer(finish="abort"), "variant tree-9: a request did not end at its length: .*abort"),
    ],
)
def test_a_failure_names_the_variant_and_ends_the_load(fake: FakeServer, message: str) -> None:
    fake.delay_s = 0.02
    with fake.serving(), pytest.raises(ApplianceError, match=message):
        run_load(fake.url, "tree-9", PROMPTS, 2, SAMPLING)
    assert len(fake.prompts) < len(PROMPTS)


def test_a_server_that_is_gone_is_a_failure_with_its_name() -> None:
    with FakeServer().serving() as fake:
        url = fake.url
    with pytest.raises(ApplianceError, match="variant gone: prompt 0: ConnectionError"):
        run_load(url, "gone", PROMPTS, 1, SAMPLING)
    with pytest.raises(ApplianceError, match="gone: no answer to /generate"):
        try_request(url, "gone", [1], 0.0)


def test_a_refusal_is_told_from_a_failure() -> None:
    with FakeServer(refusal="DDTREE does not support sampling").serving() as fake:
        with pytest.raises(RequestRefused, match=r"^DDTREE does not support sampling$"):
            try_request(fake.url, "x", [1], 1.0)
        fake.refusal = None
        try_request(fake.url, "x", [1], 1.0)
    # A 400 in the middle of a load is no refusal any more: it would be a hole in the figures.
    with (
        FakeServer(fail_at=0, fail_status=400).serving() as fake,
        pytest.raises(ApplianceError, match="variant x: /generate answered 400"),
    ):
        run_load(fake.url, "x", PROMPTS, 1, SAMPLING)

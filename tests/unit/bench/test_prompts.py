"""Prompts: a file's errors name the line; the bundled ones are enough for the largest default concurrency."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddtree_appliance.bench.plan import Plan
from ddtree_appliance.bench.prompts import digest_of, heldout_windows, load_prompts, read_prompts
from ddtree_appliance.errors import UsageError

OK = '{"prompt": "a"}'


def test_a_file_gives_text_and_token_ids_in_order(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'{OK}\n\n{{"input_ids": [1, 2]}}\n{{"prompt": "not needed"}}\n')
    assert load_prompts(path, 2, 96) == ["a", [1, 2]]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([OK, "{"], ":2: not JSON"),
        ([OK, "", "[]"], ":3: one of prompt and input_ids"),
        (["{}"], ":1: one of prompt and input_ids"),
        (['{"prompt": "a", "input_ids": [1]}'], ":1: one of prompt and input_ids"),
        (['{"prompt": "a", "max_new_tokens": 5}'], ":1: one of prompt and input_ids"),
        (['{"prompt": ""}'], ":1: prompt must be text that is not empty"),
        (['{"prompt": 5}'], ":1: prompt must be text"),
        (['{"input_ids": []}'], ":1: input_ids must be a list of token ids"),
        (['{"input_ids": [1, true]}'], ":1: input_ids must be a list of token ids"),
        (['{"input_ids": [1, -1]}'], ":1: input_ids must be a list of token ids"),
        (['{"input_ids": [1.0]}'], ":1: input_ids must be a list of token ids"),
        ([OK], " holds 1 prompts, 2 are needed"),
        ([OK, OK], ": two of the first 2 prompts are equal"),
    ],
)
def test_a_bad_file_is_refused_with_the_line(lines: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(UsageError) as caught:
        read_prompts(path, 2)
    assert f"{path}{message}" in caught.value.message


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.jsonl: No such file"):
        read_prompts(tmp_path / "none.jsonl", 1)
    (tmp_path / "bad").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="it is not UTF-8"):
        digest_of(tmp_path / "bad")


def test_the_held_out_code_is_enough_for_the_default_sweep_without_a_repeat() -> None:
    pytest.importorskip("numpy")
    from ddtree_appliance.rehearsal.prompts import heldout_prompts

    count = Plan().largest_prompt_count
    prompts = heldout_windows(count, 96)
    assert {len(prompt) for prompt in prompts} == {96}
    assert len({json.dumps(prompt) for prompt in prompts}) == count == 64
    assert prompts[:24] == heldout_prompts(24, 96)


def test_more_held_out_code_than_there_is_is_refused() -> None:
    pytest.importorskip("numpy")
    with pytest.raises(UsageError, match="100000 prompts are needed, the held-out code gives"):
        heldout_windows(100_000, 96)

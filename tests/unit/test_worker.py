"""The worker's last check: nothing that DDTREE refuses is decoded, and a request on its way out kills no server."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.engine import import_sglang


def request(temperature: float, to_finish: object = None, finished: bool = False) -> Any:
    params = import_sglang("sglang.srt.sampling.sampling_params").SamplingParams(temperature=temperature)
    return SimpleNamespace(
        rid=f"t{temperature}", sampling_params=params, to_finish=to_finish, finished=lambda: finished
    )


@pytest.mark.parametrize(
    "requests",
    [
        [(0.0,)],
        [(0.0,), (1.0, "abort")],  # refused by the scheduler, seen once more under overlap
        [(1.0, None, True)],
    ],
)
def test_requests_that_are_greedy_or_ending_pass(requests: list[tuple[Any, ...]]) -> None:
    worker = import_sglang("ddtree_appliance.ddtree.worker")
    worker._check_all_ending([request(*arguments) for arguments in requests])


def test_a_sampled_request_that_would_be_decoded_is_an_error_that_names_it() -> None:
    worker = import_sglang("ddtree_appliance.ddtree.worker")
    with pytest.raises(RuntimeError, match=r"reached the worker: \['t0.7'\]"):
        worker._check_all_ending([request(0.0), request(0.7)])

"""Which way a batch takes to the target's choice: the argmax alone, or a draw."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the rehearsal environment (torch)")

from ddtree_appliance.ddtree.kernels import TORCH  # noqa: E402
from tests.unit.engine import import_sglang  # noqa: E402
from tests.unit.test_torch_ops import candidates  # noqa: E402

VOCABULARY, WIDTH = 12, 5
GREEDY, SAMPLED = {"temperature": 0}, {"temperature": 0.7}


def requests_of(asked: list[dict[str, float]]) -> list[SimpleNamespace]:
    params = [import_sglang("sglang.srt.sampling.sampling_params").SamplingParams(**each) for each in asked]
    for each in params:
        each.normalize(None)
    return [SimpleNamespace(sampling_params=each) for each in params]


@pytest.mark.parametrize(
    "asked,flag,is_drawn",
    [
        ([GREEDY, GREEDY], True, False),
        # A sampled request that has ended leaves SGLang's flag down.
        ([GREEDY, GREEDY], False, False),
        ([GREEDY, SAMPLED], False, True),
    ],
)
def test_draws_are_made_while_a_request_samples(asked: list[dict[str, float]], flag: bool, is_drawn: bool) -> None:
    drawn: list[Any] = []

    def spy(*args: Any) -> Any:
        drawn.append(args)
        return TORCH.sample_nodes(*args)

    requests = requests_of(asked)
    info = SimpleNamespace(
        is_all_greedy=flag,
        logit_bias=None,
        has_custom_logit_processor=False,
        need_top_p_sampling=False,
        need_top_k_sampling=True,
        need_min_p_sampling=False,
        temperatures=torch.tensor([[each.sampling_params.temperature] for each in requests]),
        top_ks=torch.tensor([each.sampling_params.top_k for each in requests], dtype=torch.int32),
        top_ps=torch.ones(2),
        min_ps=torch.zeros(2),
        sampling_seed=torch.tensor([3, 4]),
    )
    batch = SimpleNamespace(reqs=requests, sampling_info=info, seq_lens=torch.tensor([7, 9]))
    trees = TORCH.build_trees(*candidates(1, (2, 3, 2), None), WIDTH - 1)
    logits = torch.randn(2 * WIDTH, VOCABULARY, generator=torch.Generator().manual_seed(0))
    module = import_sglang("ddtree_appliance.ddtree.target_choice")
    choice = module.TargetChoice(replace(TORCH, sample_nodes=spy), 3, 4, VOCABULARY)

    chosen = choice.choose(batch, trees, logits.clone(), None)

    assert bool(drawn) is is_drawn
    assert torch.equal(chosen[0], logits.view(2, WIDTH, -1)[0].argmax(-1))
    if not is_drawn:
        assert torch.equal(chosen[1], logits.view(2, WIDTH, -1)[1].argmax(-1))


NO_CHANGE = {"has_grammar": False, "logit_bias": None, "has_custom_logit_processor": False}


@pytest.mark.parametrize(
    "asked,state,expected",
    [
        ([GREEDY, GREEDY], {}, False),
        ([GREEDY, SAMPLED], {}, True),
        ([GREEDY, GREEDY | {"frequency_penalty": 0.5}], {}, True),
        ([GREEDY, GREEDY | {"repetition_penalty": 1.2}], {}, True),
        ([GREEDY], {"has_grammar": True}, True),
        ([GREEDY], {"logit_bias": torch.zeros(1, VOCABULARY)}, True),
        ([GREEDY], {"has_custom_logit_processor": True}, True),
    ],
)
def test_only_an_argmax_does_without_floats(
    asked: list[dict[str, float]], state: dict[str, Any], expected: bool
) -> None:
    module = import_sglang("ddtree_appliance.ddtree.target_choice")
    found = NO_CHANGE | state
    info = SimpleNamespace(**{name: found[name] for name in ("logit_bias", "has_custom_logit_processor")})
    batch = SimpleNamespace(reqs=requests_of(asked), has_grammar=found["has_grammar"], sampling_info=info)
    assert module.TargetChoice.changes_or_draws(batch) is expected


def test_a_warm_up_draws_with_filters_and_without() -> None:
    drawn: list[Any] = []
    module = import_sglang("ddtree_appliance.ddtree.target_choice")
    searched: list[Any] = []
    spy = replace(TORCH, sample_nodes=lambda *args: drawn.append(args), best_tokens=searched.append)
    module.TargetChoice(spy, 3, 4, VOCABULARY).warm_up(WIDTH, "cpu", torch.bfloat16)
    assert [(logits.shape, logits.dtype) for logits in searched] == [
        ((1, WIDTH, VOCABULARY), dtype) for dtype in (torch.float32, torch.bfloat16)
    ]
    assert [sampling.is_filtered for *_, sampling in drawn] == [False, True]
    for logits, depths, prefix_lens, max_depth, sampling in drawn:
        assert logits.shape == (1, WIDTH, VOCABULARY) and depths.shape == (1, WIDTH) and max_depth == 3
        assert TORCH.sample_nodes(logits, depths, prefix_lens, max_depth, sampling).shape == (1, WIDTH)
        # A greedy request would leave the search for a kept winner out.
        assert (sampling.top_ks > 1).all()

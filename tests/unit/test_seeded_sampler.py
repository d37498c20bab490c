"""SGLang's sampling backend "seeded" draws what a tree draws at the same position, however many rows fit at once."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the rehearsal environment (torch)")

from ddtree_appliance.ddtree import sampling  # noqa: E402
from tests.unit.engine import import_sglang  # noqa: E402
from tests.unit.test_sampling import COMPANY, VOCABULARY, company  # noqa: E402


def info_of(asked: sampling.Sampling) -> Any:
    return SimpleNamespace(
        need_top_p_sampling=True,
        need_top_k_sampling=True,
        need_min_p_sampling=True,
        temperatures=asked.temperatures,
        top_ks=asked.top_ks,
        top_ps=asked.top_ps,
        min_ps=asked.min_ps,
        sampling_seed=asked.seeds,
    )


@pytest.mark.parametrize("rows", [0, 1, 3, 7, 100])
def test_prefill_and_plain_decoding_draw_as_a_node_does(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, _, positions, asked = company()
    roots = logits[:, :1]
    expected = sampling.sample_nodes(roots, torch.zeros((len(COMPANY), 1), dtype=torch.int64), positions, 0, asked)
    monkeypatch.setattr(sampling, "DRAW_BYTES", rows * sampling.BYTES_PER_PROBABILITY * VOCABULARY)
    module = import_sglang("ddtree_appliance.ddtree.seeded_sampler")
    sizes: list[int] = []

    def spy(probabilities: Any, *others: Any) -> Any:
        sizes.append(len(probabilities))
        return sampling.draw(probabilities, *others)

    monkeypatch.setattr(module, "draw", spy)
    sampler = module.SeededSampler.__new__(module.SeededSampler)
    sampler.__dict__["_greedy"] = roots[:, 0].argmax(-1)

    probabilities = torch.softmax(roots[:, 0] / asked.temperatures, dim=-1)
    tokens = sampler._sample_from_probs(probabilities, info_of(asked), positions, False)

    assert tokens.dtype == torch.int32
    assert tokens.tolist() == expected.flatten().tolist()
    assert max(sizes) == min(max(rows, 1), len(COMPANY)) and sum(sizes) == len(COMPANY)

"""What a server with 64-node trees must show on a GPU, whatever its backend or number of ranks."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ddtree_appliance.ddtree.start_rules import DEFAULT_TOPK
from ddtree_appliance.rehearsal.server import RehearsalServer
from tests.gpu.test_engine_on_gpu import NEW_TOKENS, assert_equal_up_to_near_ties

BUDGET = 64
TREE = ("--speculative-ddtree-budget", str(BUDGET))


def assert_tokens_equal_plain_decoding(
    name: str, server: RehearsalServer, plain: RehearsalServer, prompts: Sequence[list[int]], concurrency: int
) -> None:
    """Up to near-ties of the float32 target."""
    expected = [plain.generate(prompt, NEW_TOKENS)["output_ids"] for prompt in prompts]
    with ThreadPoolExecutor(concurrency) as senders:
        answers = list(senders.map(lambda prompt: server.generate(prompt, NEW_TOKENS), prompts))
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    correct = sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)
    print(f"\n{name}: accept length {1 + correct / steps:.3f} over {steps} verify steps")
    assert_equal_up_to_near_ties(name, prompts, [answer["output_ids"] for answer in answers], expected)


def assert_steps_agree_with_the_reference(name: str, server: RehearsalServer, prompts: Sequence[list[int]]) -> None:
    """A mask that a graph has dropped, or the wrong KV, would show here."""
    from tests.rehearsal.reference import judge

    runs = [server.stream_runs(prompt, NEW_TOKENS) for prompt in prompts]
    agreement = judge(prompts, runs, BUDGET, DEFAULT_TOPK)
    print(f"\n{name}: {agreement.equal} of {agreement.steps} steps agree ({agreement.share:.3f})")
    assert agreement.share >= 0.95

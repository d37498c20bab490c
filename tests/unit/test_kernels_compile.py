"""Every Triton kernel, as the engine launches it, compiles for every architecture that is served, and fits there.

No GPU is needed: launches are recorded instead of made, and Triton's own compiler and assembler do the rest. What the
kernels compute is shown by tests/kernels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the rehearsal environment (torch)")
triton = pytest.importorskip("triton", reason="needs the rehearsal environment (triton)")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from ddtree_appliance.ddtree import kernels  # noqa: E402
from ddtree_appliance.ddtree.fused import attention  # noqa: E402
from ddtree_appliance.ddtree.head import HeadShard  # noqa: E402
from ddtree_appliance.ddtree.kernel_times import Attention, Inputs, Sizes  # noqa: E402

# Shared memory that one program may have, in bytes, by compute capability (CUDA C++ Programming Guide, table of
# technical specifications).
SHARED_MEMORY = {90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
# Qwen3-8B where a constant depends on it; what only changes how often a kernel runs is small.
SIZES = Sizes(hidden=64, layers=2, slots=2048, moved_slots=2048, prefix=50)
POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8",
    torch.bool: "*i1",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """A kernel with the types of its arguments, its constants and its options."""

    kernel: JITFunction
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, kernel: JITFunction, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> "Launch":
        given = dict(zip(kernel.arg_names, arguments, strict=False))
        given |= {name: value for name, value in keywords.items() if name in kernel.arg_names}
        options = {name: value for name, value in keywords.items() if name not in kernel.arg_names}
        signature, constants, aligned = {}, {}, []
        for parameter in kernel.params:
            name, value = parameter.name, given[parameter.name]
            # Triton makes a constant of an argument that is 1.
            if parameter.is_constexpr or (isinstance(value, int) and value == 1):
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                is_tensor = isinstance(value, torch.Tensor)
                signature[name] = POINTERS[value.dtype] if is_tensor else "i32"
                if (value.data_ptr() if is_tensor else value) % 16 == 0:
                    aligned.append(name)
        return cls(kernel, tuple(signature.items()), tuple(constants.items()), tuple(aligned), tuple(options.items()))

    def on(self, capability: int) -> "Launch":
        """As it is launched on such a GPU: one kernel calls a function that is not the same on all."""
        rows = attention.attend_rows_on(capability // 10)
        constants = tuple((name, rows if name == "ATTEND_ROWS" else value) for name, value in self.constants)
        return replace(self, constants=constants)

    def compiled(self, capability: int) -> Any:
        place = self.kernel.arg_names.index
        source = ASTSource(
            fn=self.kernel,
            signature=dict(self.signature),
            constexprs={(place(name),): value for name, value in self.constants},
            attrs={(place(name),): [["tt.divisibility", 16]] for name in self.aligned},
        )
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(self.options))


Launches = dict[str, list[Launch]]  # by kernel, different ones only


@contextmanager
def recorded() -> Iterator[Launches]:
    """Launches are noted and not made."""
    found: Launches = {}

    def record(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        launch = Launch.of(kernel, arguments, keywords)
        known = found.setdefault(kernel.fn.__name__, [])
        if launch not in known:
            known.append(launch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", record)
        yield found


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return Inputs(SIZES, 9, "cpu")


@pytest.fixture(scope="module")
def launches(inputs: Inputs) -> Launches:
    """Of the steps and of the verify attention, one request and many."""
    with recorded() as found:
        for batch, budget in ((1, 64), (1, 15), (8, 16)):
            for call in inputs.steps(kernels.fused(), batch, budget).values():
                call()
            Attention(inputs, batch, budget, 50).ours()()
        # One of two ranks.
        rows = len(inputs.weight)
        part = HeadShard(inputs.weight, 0, 2 * rows, rows, all_gather=lambda own: own.repeat(2, 1, 1))
        kernels.fused().top_candidates(inputs.hidden[:1], part, SIZES.topk)
        for kept in (torch.bfloat16, torch.float32):
            kernels.fused().best_tokens(torch.empty(1, 4, SIZES.vocabulary, dtype=kept))
    return found


KERNELS = [
    "_accept", "_attend", "_best_chunks", "_best_of_blocks", "_best_of_row", "_build_tree", "_chunk_candidates",
    "_chunk_statistics", "_gather_rows", "_mark_ancestors", "_merge_keys", "_move_rows", "_race_blocks",
    "_rank_tokens", "_settle", "_write_draft_inputs", "_write_verify_inputs",
]  # fmt: skip


def test_every_kernel_is_launched(launches: Launches) -> None:
    assert sorted(launches) == KERNELS


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_and_fits(name: str, capability: int, launches: Launches) -> None:
    for launch in launches[name]:
        kernel = launch.on(capability).compiled(capability)
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= SHARED_MEMORY[capability]


# Captured in graphs for every batch size, when the server starts.
IN_GRAPHS = {
    "_attend",
    *("_best_chunks", "_chunk_candidates", "_chunk_statistics", "_merge_keys", "_rank_tokens"),
}


@pytest.mark.parametrize("budget", [4, 64, 128])
def test_no_batch_size_waits_for_a_compiler(budget: int, inputs: Inputs) -> None:
    """What runs outside graphs is compiled for the first request, and never again for another number of them."""
    with recorded() as found:
        for batch in range(1, 10):
            for call in inputs.steps(kernels.fused(), batch, budget).values():
                call()
            fused, logits = kernels.fused(), torch.empty(batch, budget + 1, SIZES.vocabulary)
            trees = fused.build_trees(*(each[:batch] for each in inputs.candidates), budget)
            accepted = fused.accept(trees, torch.zeros_like(trees.parents), min(SIZES.block_size, budget + 1))
            fused.gather_path(torch.empty(batch * (budget + 1), 3 * SIZES.hidden, dtype=torch.bfloat16), accepted)
            for call in inputs.draws(fused, logits, trees.depths, inputs.prefix[:batch]).values():
                call()
    outside = {name: len(different) for name, different in found.items() if name not in IN_GRAPHS}
    # With filters and without.
    assert outside == {name: 2 if name == "_settle" else 1 for name in set(KERNELS) - IN_GRAPHS}


def test_a_variant_would_be_noticed(inputs: Inputs) -> None:
    """Parts of one tensor, aligned for every other number of requests, as the columns of a batch of trees once were."""
    fused, batch, width = kernels.fused(), 3, 5
    logprobs, ids = (each[:batch] for each in inputs.candidates)
    trees = kernels.TORCH.build_trees(logprobs, ids, width - 1)
    columns = torch.stack([trees.token_ids, trees.parents, trees.depths])
    with recorded() as found:
        for each in (trees, replace(trees, parents=columns[1])):
            fused.accept(each, torch.zeros_like(trees.parents), width)
    assert len(found["_accept"]) == 2


def test_a_kernel_that_does_not_fit_would_be_noticed(launches: Launches) -> None:
    launch = launches["_attend"][0]
    wide = tuple((name, 512 if name == "KEYS" else value) for name, value in launch.constants)
    kernel = Launch(launch.kernel, launch.signature, wide, launch.aligned, launch.options).compiled(120)
    assert kernel.metadata.shared > SHARED_MEMORY[120]

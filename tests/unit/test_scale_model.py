"""The scale model computes what the small pair computes, and each part of its construction is needed for that."""
# ruff: noqa: E402 - what imports torch has to come after the check that torch is there

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the rehearsal environment (torch)")
transformers = pytest.importorskip("transformers", reason="needs the rehearsal environment (transformers)")

from safetensors.torch import load_file
from torch import Tensor

from ddtree_appliance.ddtree.pair import pair_problems
from ddtree_appliance.errors import EXIT_FAILED, EXIT_HOST, EXIT_USAGE, ApplianceError, HostError, UsageError
from ddtree_appliance.rehearsal.prompts import heldout_prompts
from ddtree_appliance.rehearsal.scaling import cli, folder, models, weights
from ddtree_appliance.rehearsal.scaling.bounds import stream_bound
from ddtree_appliance.rehearsal.scaling.models import EXTRA_LOGIT_LIMIT, SMALL_PAIR, ScalePair, SmallModel, plan_pair
from ddtree_appliance.rehearsal.scaling.sizes import ScaleSizes
from ddtree_appliance.rehearsal.scaling.weights import Scaling
from ddtree_appliance.rehearsal.training.layers import LayerShape
from ddtree_appliance.rehearsal.training.model import Drafter, DrafterShape

# Largest difference of a logit or a log-probability in float32; logits reach 22, so this is 20 units in the last place.
TOLERANCE = 1e-4
# Nothing is a power of two times the small pair's, and each ratio is another one.
SIZES = ScaleSizes(
    layers=5, hidden=360, heads=9, kv_heads=3, head_dim=256, intermediate=1000, vocabulary=4160, drafter_layers=3
)
SMALL_VOCABULARY, SMALL_HIDDEN = 4096, 256
NEW_TOKENS = 20
ANCHORS = (40, 63)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def planned(sizes: ScaleSizes = SIZES, dtype: Any = torch.float32, small_pair: Path = SMALL_PAIR) -> ScalePair:
    return plan_pair(sizes, dtype, torch.device("cpu"), small_pair=small_pair)


def made(plan: models.ModelPlan) -> dict[str, Tensor]:
    return {tensor.name: tensor.make() for tensor in plan.tensors}


def load_target(path: Path) -> Any:
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(found.values()), found
    return model.eval()


def drafter_shape(config: dict[str, Any]) -> DrafterShape:
    return DrafterShape(
        num_hidden_layers=config["num_hidden_layers"],
        block_size=config["block_size"],
        mask_token_id=config["dflash_config"]["mask_token_id"],
        target_layer_ids=tuple(config["dflash_config"]["target_layer_ids"]),
        layer=LayerShape(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=config["rope_parameters"]["rope_theta"],
            max_position_embeddings=config["max_position_embeddings"],
        ),
    )


def load_drafter(path: Path) -> Drafter:
    drafter = Drafter(drafter_shape(json.loads((path / "config.json").read_text())))
    shards = sorted(path.glob("*.safetensors"))
    drafter.load_state_dict({name: tensor.float() for shard in shards for name, tensor in load_file(shard).items()})
    return drafter.eval()


@dataclass(frozen=True)
class LoadedPair:
    target: Any
    drafter: Drafter

    @staticmethod
    def load(path: Path) -> "LoadedPair":
        return LoadedPair(load_target(path / "target"), load_drafter(path / "dflash"))


@dataclass(frozen=True)
class Outputs:
    """logits [B, T, V] of the target; taps [B, T, K, n]; drafted [B, N, S, n] hidden and [B, N, S, V] log-softmax."""

    logits: Tensor
    taps: Tensor
    drafted: Tensor
    draft_logits: Tensor


@torch.no_grad()
def outputs(pair: LoadedPair, ids: Tensor) -> Outputs:
    """The target on `ids` [B, T], and the drafter on blocks behind two of its positions."""
    shape = pair.drafter.shape
    target = pair.target(ids, output_hidden_states=True)
    taps = [target.hidden_states[layer + 1] for layer in shape.target_layer_ids]
    anchors = torch.tensor([ANCHORS]).expand(len(ids), -1)
    blocks = torch.full((*anchors.shape, shape.block_size), shape.mask_token_id)
    blocks[:, :, 0] = ids.gather(1, anchors)
    drafted = pair.drafter(pair.target.get_input_embeddings()(blocks), anchors, torch.cat(taps, dim=-1))
    logits = pair.target.lm_head(drafted)
    return Outputs(target.logits, torch.stack(taps, dim=2)[..., :SMALL_HIDDEN], drafted[..., :SMALL_HIDDEN], logits)


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


@pytest.fixture(scope="module")
def prompts() -> Tensor:
    return torch.tensor(heldout_prompts(3, 72))


@pytest.fixture(scope="module")
def small() -> LoadedPair:
    return LoadedPair.load(SMALL_PAIR)


@pytest.fixture(scope="module")
def scaled_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scaled") / "pair"
    folder.write_pair(out, planned(), lambda text: None, shard_bytes=20_000_000)
    return out


@pytest.fixture(scope="module")
def scaled(scaled_folder: Path) -> LoadedPair:
    return LoadedPair.load(scaled_folder)


@pytest.fixture(scope="module")
def of_small(small: LoadedPair, prompts: Tensor) -> Outputs:
    return outputs(small, prompts)


@pytest.fixture(scope="module")
def of_scaled(scaled: LoadedPair, prompts: Tensor) -> Outputs:
    return outputs(scaled, prompts)


# The function


@torch.no_grad()
def greedy(model: Any, ids: Tensor) -> list[list[int]]:
    cache, step, written = None, ids, []
    for _ in range(NEW_TOKENS):
        out = model(step, past_key_values=cache, use_cache=True)
        cache, step = out.past_key_values, out.logits[:, -1:].argmax(dim=-1)
        written.append(step)
    return torch.cat(written, dim=1).tolist()


def test_greedy_tokens_are_the_small_targets(small: LoadedPair, scaled: LoadedPair, prompts: Tensor) -> None:
    written = greedy(small.target, prompts)
    assert greedy(scaled.target, prompts) == written
    assert len({tuple(tokens) for tokens in written}) == len(written)


def test_logits_and_tapped_hidden_states_are_the_small_targets(of_small: Outputs, of_scaled: Outputs) -> None:
    assert difference(of_scaled.logits[..., :SMALL_VOCABULARY], of_small.logits) < TOLERANCE
    assert difference(of_scaled.taps, of_small.taps) < TOLERANCE


def test_drafts_and_their_probabilities_are_the_small_drafters(of_small: Outputs, of_scaled: Outputs) -> None:
    assert difference(of_scaled.drafted, of_small.drafted) < TOLERANCE
    # Over the whole large vocabulary: its extra tokens must not take any probability.
    large, expected = of_scaled.draft_logits.log_softmax(dim=-1), of_small.draft_logits.log_softmax(dim=-1)
    assert difference(large[..., :SMALL_VOCABULARY], expected) < TOLERANCE
    assert torch.equal(large.argmax(dim=-1), expected.argmax(dim=-1))
    ranked, ids = expected.topk(16, dim=-1)
    large_ids = large.topk(16, dim=-1).indices
    # Ranks may swap only where two tokens are equally likely.
    assert difference(expected.gather(-1, large_ids), ranked) < 2 * TOLERANCE
    assert (large_ids != ids).float().mean() < 0.01


def test_a_token_beyond_the_small_vocabulary_reads_as_its_remainder(
    scaled: LoadedPair, of_small: Outputs, prompts: Tensor
) -> None:
    beyond = torch.where(prompts + SMALL_VOCABULARY < SIZES.vocabulary, prompts + SMALL_VOCABULARY, prompts)
    assert (beyond != prompts).any()
    with torch.no_grad():
        logits = scaled.target(beyond).logits
    assert difference(logits[..., :SMALL_VOCABULARY], of_small.logits) < TOLERANCE


def test_extra_tokens_never_win(of_scaled: Outputs) -> None:
    for logits in (of_scaled.logits, of_scaled.draft_logits):
        extra = logits[..., SMALL_VOCABULARY:]
        assert extra.shape[-1] == SIZES.vocabulary - SMALL_VOCABULARY
        assert extra.max() <= 10 * EXTRA_LOGIT_LIMIT
        assert extra.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extra_tokens_lose_even_behind_the_longest_residual_stream(dtype: Any) -> None:
    small_target, small_drafter = SmallModel.load(SMALL_PAIR / "target"), SmallModel.load(SMALL_PAIR / "dflash")
    embedding = small_target.weights["model.embed_tokens.weight"]
    pair = planned(dtype=dtype)
    target = {tensor.name: tensor for tensor in pair.target.tensors}
    drafter = {tensor.name: tensor for tensor in pair.drafter.tensors}
    head = target["lm_head.weight"].make()[SMALL_VOCABULARY:].float()
    constant = float(target["model.embed_tokens.weight"].make()[0, SMALL_HIDDEN])
    for norm, bound in (
        (
            target["model.norm.weight"],
            stream_bound(small_target.weights, "model.layers.", small_target.sizes, embedding),
        ),
        (
            drafter["norm.weight"],
            stream_bound(
                small_drafter.weights,
                "layers.",
                small_drafter.sizes,
                embedding,
                small_drafter.weights["hidden_norm.weight"],
            ),
        ),
    ):
        stream = torch.zeros(SIZES.hidden)
        stream[0], stream[SMALL_HIDDEN] = bound, constant
        normed = torch.nn.functional.rms_norm(stream, (SIZES.hidden,), norm.make().float(), 1e-12).to(dtype)
        assert (head @ normed.float()).max() <= EXTRA_LOGIT_LIMIT


def test_the_bound_of_the_residual_stream_holds(small: LoadedPair, prompts: Tensor) -> None:
    stored = SmallModel.load(SMALL_PAIR / "target")
    bound = stream_bound(stored.weights, "model.layers.", stored.sizes, stored.weights["model.embed_tokens.weight"])
    last: list[Tensor] = []
    hook = small.target.model.norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0]))
    with torch.no_grad():
        small.target(prompts)
    hook.remove()
    assert last[0].norm(dim=-1).max() < bound


# Negative controls: without one part, the comparisons above fail.


def assert_drafts_differ(found: Outputs, expected: Outputs) -> None:
    assert difference(found.draft_logits[..., :SMALL_VOCABULARY], expected.draft_logits) > 10 * TOLERANCE


def assert_both_differ(found: Outputs, expected: Outputs) -> None:
    assert difference(found.logits[..., :SMALL_VOCABULARY], expected.logits) > 10 * TOLERANCE
    assert_drafts_differ(found, expected)


@pytest.mark.parametrize(
    ("part", "broken"),
    [
        ("norm_scale", lambda scaling: 1.0),
        ("head_dims", lambda scaling: torch.arange(scaling.small.head_dim)),
        ("query_heads", lambda scaling: torch.arange(scaling.small.heads)),
        ("query_gain", lambda scaling: 1.0),
    ],
)
def test_without_a_part_of_the_placement_both_models_differ(
    part: str,
    broken: Callable[[Scaling], Any],
    scaled: LoadedPair,
    of_small: Outputs,
    prompts: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Scaling, part, property(broken))
    pair = planned()
    differing = copy.deepcopy(scaled)
    differing.target.load_state_dict(made(pair.target))
    differing.drafter.load_state_dict(made(pair.drafter))
    assert_both_differ(outputs(differing, prompts), of_small)
    assert_drafts_differ(outputs(LoadedPair(scaled.target, differing.drafter), prompts), of_small)


# The bundled pair's own epsilon, 1e-6, shows in few places; one of 1e-2 shows in all.


@pytest.fixture(scope="module")
def coarse_small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("coarse") / "small"
    shutil.copytree(SMALL_PAIR, out)
    for path in (out / "target" / "config.json", out / "dflash" / "config.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 1e-2}))
    return out


@pytest.fixture(scope="module")
def of_coarse(coarse_small: Path, prompts: Tensor) -> Outputs:
    return outputs(LoadedPair.load(coarse_small), prompts)


@pytest.fixture(scope="module")
def coarse_scaled(coarse_small: Path) -> LoadedPair:
    out = coarse_small.parent / "scaled"
    folder.write_pair(out, planned(small_pair=coarse_small), lambda text: None, small_pair=coarse_small)
    return LoadedPair.load(out)


def test_a_coarse_epsilon_is_compensated_too(coarse_scaled: LoadedPair, of_coarse: Outputs, prompts: Tensor) -> None:
    found = outputs(coarse_scaled, prompts)
    assert difference(found.logits[..., :SMALL_VOCABULARY], of_coarse.logits) < TOLERANCE
    assert difference(found.taps, of_coarse.taps) < TOLERANCE
    assert difference(found.draft_logits[..., :SMALL_VOCABULARY], of_coarse.draft_logits) < TOLERANCE


def scale_queries_and_keys(module: Any, factor: float) -> None:
    for name, parameter in module.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            parameter.mul_(factor)


def without_the_constant(pair: LoadedPair) -> None:
    pair.target.get_input_embeddings().weight[:, SMALL_HIDDEN] = 0


def without_the_scale_of_queries_and_keys(pair: LoadedPair) -> None:
    scale_queries_and_keys(pair.target, 1 / weights.HEAD_SCALE)
    scale_queries_and_keys(pair.drafter, 1 / weights.HEAD_SCALE)


def without_the_constant_behind_fc(pair: LoadedPair) -> None:
    pair.drafter.fc.weight[SMALL_HIDDEN] = 0


@pytest.mark.parametrize(
    ("remove", "check"),
    [
        (without_the_constant, assert_both_differ),
        (without_the_scale_of_queries_and_keys, assert_both_differ),
        (without_the_constant_behind_fc, assert_drafts_differ),
    ],
)
def test_without_a_compensation_of_epsilon_the_pair_differs(
    remove: Callable[[LoadedPair], None],
    check: Callable[[Outputs, Outputs], None],
    coarse_scaled: LoadedPair,
    of_coarse: Outputs,
    prompts: Tensor,
) -> None:
    differing = copy.deepcopy(coarse_scaled)
    with torch.no_grad():
        remove(differing)
    check(outputs(differing, prompts), of_coarse)


# The folder and the sizes


def test_bfloat16_holds_the_small_weights_unchanged_where_the_ratios_are_powers_of_four() -> None:
    sizes = replace(SIZES, hidden=1024, head_dim=128, heads=12)
    stored = SmallModel.load(SMALL_PAIR / "target").weights
    large = {tensor.name: tensor for tensor in planned(sizes, torch.bfloat16).target.tensors}
    for part, scale in (("self_attn.k_proj", weights.HEAD_SCALE), ("input_layernorm", 0.5), ("mlp.up_proj", 1.0)):
        name = f"model.layers.2.{part}.weight"
        small = stored[name] * scale
        corner = tuple(slice(size) for size in small.shape)
        assert torch.equal(large[name].make()[corner].float(), small)


def test_the_folder_is_a_sound_pair_of_several_shards(scaled_folder: Path) -> None:
    target = json.loads((scaled_folder / "target" / "config.json").read_text())
    drafter = json.loads((scaled_folder / "dflash" / "config.json").read_text())
    assert pair_problems(target, drafter) == []
    assert target["dtype"] == drafter["dtype"] == drafter["torch_dtype"] == "float32"
    for name in ("target", "dflash"):
        shards = sorted((scaled_folder / name).glob("*.safetensors"))
        index = json.loads((scaled_folder / name / "model.safetensors.index.json").read_text())
        found = {key: shard.name for shard in shards for key in load_file(shard)}
        assert index["weight_map"] == found
        assert len(shards) > 1
        assert index["metadata"]["total_size"] == sum(
            tensor.nbytes for shard in shards for tensor in load_file(shard).values()
        )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (scaled_folder / "target" / name).read_bytes() == (SMALL_PAIR / "target" / name).read_bytes()


def test_the_default_sizes_are_those_of_qwen3_8b_and_a_drafter_of_one_billion() -> None:
    pair = planned(ScaleSizes(), torch.bfloat16)
    with torch.device("meta"):
        target = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**pair.target.config))
        drafter = Drafter(drafter_shape(pair.drafter.config))
    for plan, judge in ((pair.target, target), (pair.drafter, drafter)):
        expected = {name: tuple(parameter.shape) for name, parameter in judge.named_parameters()}
        assert {tensor.name: tensor.shape for tensor in plan.tensors} == expected
    # Qwen3-8B's published count.
    assert pair.target.parameters == 8_190_735_360
    assert 1.0e9 < pair.drafter.parameters < 1.05e9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 3}, "--layers 3 is below 4, the small pair's own: give at least 4"),
        ({"drafter_layers": 1}, "--drafter-layers 1 is below 2, the small pair's own: give at least 2"),
        (
            {"hidden": 256},
            "--hidden 256 is below 257, the small pair's own and the constant dimension: give at least 257",
        ),
        ({"kv_heads": 1}, "--kv-heads 1 is below 2, the small pair's own: give at least 2"),
        ({"heads": 3}, "--heads 3 is below 6, 2 query heads share a key head in the small pair: give at least 6"),
        ({"heads": 10}, "--heads 10 is no multiple of --kv-heads 3: give a multiple"),
        ({"intermediate": 767}, "--intermediate 767 is below 768, the small pair's own: give at least 768"),
        ({"vocabulary": 4095}, "--vocabulary 4095 is below 4096, the small pair's own: give at least 4096"),
        (
            {"head_dim": 192},
            "--head-dim 192 is no multiple of the small pair's 128, so the rotary frequencies differ: give a multiple",
        ),
        (
            {"layers": 1, "vocabulary": 1},
            "--layers 1 is below 4, the small pair's own: give at least 4; "
            "--vocabulary 1 is below 4096, the small pair's own: give at least 4096",
        ),
    ],
)
def test_sizes_that_cannot_hold_the_small_pair_are_named_on_one_line(changes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        planned(replace(SIZES, **changes))
    assert (refusal.value.message, refusal.value.hint) == (message, None)


def test_the_smallest_sizes_are_accepted() -> None:
    smallest = ScaleSizes(
        layers=4, hidden=257, heads=4, kv_heads=2, head_dim=128, intermediate=768, vocabulary=4096, drafter_layers=2
    )
    assert planned(smallest).target.tensors[0].make().shape == (4096, 257)


def arguments(out: Path, sizes: ScaleSizes = SIZES) -> list[str]:
    flags = [part for key, value in asdict(sizes).items() for part in (f"--{key.replace('_', '-')}", str(value))]
    return ["--out", str(out), *flags, "--dtype", "float32", "--device", "cpu"]


def test_the_command_writes_the_pair_and_prints_what_it_wrote(
    tmp_path: Path, scaled_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments(tmp_path / "pair")) == 0
    result = json.loads(capsys.readouterr().out)
    assert Path(result["target"]) == tmp_path / "pair" / "target"
    assert result["target_parameters"] == planned().target.parameters
    # The same seed on the same device: the same weights, however they are cut into shards.
    (shard,) = (tmp_path / "pair" / "dflash").glob("*.safetensors")
    one = load_file(shard)
    others = [load_file(path) for path in (scaled_folder / "dflash").glob("*.safetensors")]
    assert all(torch.equal(one[name], tensor) for other in others for name, tensor in other.items())


def test_the_command_refuses_sizes_and_folders_with_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").touch()
    for argv, message in (
        (arguments(tmp_path / "new", replace(SIZES, layers=3)), "error: --layers 3 is below 4"),
        (arguments(tmp_path / "full"), f"error: --out: {tmp_path / 'full'} exists and is not an empty folder"),
    ):
        assert cli.main(argv) == EXIT_USAGE
        said = capsys.readouterr()
        assert said.err.startswith(message) and said.err.count("\n") == 1 and said.out == ""
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "note"]


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    with pytest.raises(HostError, match=r"GB of weights, but 0\.0 GB free") as refusal:
        folder.write_pair(tmp_path / "pair", planned(), lambda text: None)
    assert refusal.value.exit_code == EXIT_HOST
    assert not (tmp_path / "pair").exists()


def test_a_write_that_fails_leaves_no_folder_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = folder.save_file

    def fail_on_the_drafter(tensors: dict[str, Tensor], path: Path, **rest: Any) -> None:
        if path.parent.name == "dflash":
            raise OSError(28, "No space left on device")
        save(tensors, path, **rest)

    monkeypatch.setattr(folder, "save_file", fail_on_the_drafter)
    with pytest.raises(ApplianceError, match=r"cannot write the pair: .*No space left") as failure:
        folder.write_pair(tmp_path / "pair", planned(), lambda text: None)
    assert failure.value.exit_code == EXIT_FAILED
    assert list((tmp_path / "pair" / "target").glob("*.safetensors"))
    assert not list((tmp_path / "pair").rglob("config.json")) + list((tmp_path / "pair").rglob("*.index.json"))
    with pytest.raises(UsageError, match="not an empty folder"):
        folder.write_pair(tmp_path / "pair", planned(), lambda text: None)

"""Trees inside a grammar against a slow search that asks a fresh matcher at every node."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the rehearsal environment (torch)")

from ddtree_appliance.ddtree.constrained import constrain_trees, constrained_tree  # noqa: E402
from ddtree_appliance.ddtree.torch_ops import build_trees  # noqa: E402
from ddtree_appliance.ddtree.tree import NO_PARENT, NO_TOKEN, ROOT, Tree, build_tree  # noqa: E402
from ddtree_appliance.rehearsal.server import TARGET  # noqa: E402
from tests.unit.engine import import_sglang  # noqa: E402
from tests.unit.test_torch_ops import LEVELS, candidates  # noqa: E402

# SGLang names the limit of rollbacks, which xgrammar has given up.
pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning")

Tensor = Any  # torch may be missing where these annotations are read
Make = Callable[[], Any]  # a grammar at the beginning

INF = float("inf")
EOS = 0
VOCABULARY = 4096
SMALL = 70  # not whole words of a mask


def words(vocabulary: int) -> int:
    return -(-vocabulary // 32)


def ones(rows: int, vocabulary: int) -> Tensor:
    return torch.full((rows, words(vocabulary)), -1, dtype=torch.int32)


def allowed(row: Tensor) -> set[int]:
    """The tokens of one mask row."""
    return {
        32 * word + bit
        for word, bits in enumerate(row.tolist())
        if bits
        for bit in range(32)
        if (bits & 0xFFFFFFFF) >> bit & 1
    }


class FakeGrammar:
    """An automaton over SMALL tokens; it raises wherever a matcher would lose its state or go beyond it.

    table: per state, the state after each allowed token; None: the grammar has ended.
    """

    def __init__(self, table: Sequence[dict[int, int | None]]) -> None:
        self._table = table
        self._states: list[int | None] = [0]
        self.accepted_tokens: list[int] = []

    def accept_token(self, token: int) -> None:
        state = self._states[-1]
        if state is None or token not in self._table[state]:
            raise ValueError(f"token {token} after {self.accepted_tokens}")
        self._states.append(self._table[state][token])
        self.accepted_tokens.append(token)

    def rollback(self, count: int) -> None:
        if not 0 < count <= len(self.accepted_tokens):
            raise ValueError(f"rollback of {count} of {len(self.accepted_tokens)}")
        del self._states[-count:]
        del self.accepted_tokens[-count:]

    def is_terminated(self) -> bool:
        return self._states[-1] is None

    def fill_vocab_mask(self, mask: Tensor, row: int) -> None:
        state = self._states[-1]
        assert state is not None
        bits = [0] * words(SMALL)
        for token in self._table[state]:
            bits[token // 32] |= 1 << (token % 32)
        mask[row] = torch.tensor([each - (1 << 32) if each >> 31 else each for each in bits], dtype=torch.int32)


class AllowAll(FakeGrammar):
    """Allows every token for ever."""

    def __init__(self) -> None:
        super().__init__([dict.fromkeys(range(SMALL), 0)])


@cache
def tokenizer() -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(TARGET)


@cache
def token_of(text: str) -> int:
    (token,) = tokenizer().encode(text, add_special_tokens=False)
    return int(token)


@cache
def backend() -> Any:
    module = import_sglang("sglang.srt.constrained.xgrammar_backend")
    return module.XGrammarGrammarBackend(tokenizer(), vocab_size=VOCABULARY, model_eos_token_ids=[EOS])


@cache
def compiled(kind: str, text: str) -> Any:
    grammar = getattr(backend(), f"dispatch_{kind}")(text)
    assert hasattr(grammar, "matcher"), f"{text}: {grammar}"
    return grammar


def xgrammar(kind: str, text: str) -> Make:
    return lambda: compiled(kind, text).copy()


def replayed(make: Make, tokens: Sequence[int]) -> Any:
    grammar = make()
    for token in tokens:
        grammar.accept_token(token)
    return grammar


def mask_after(make: Make, tokens: Sequence[int], vocabulary: int) -> Tensor:
    row = ones(1, vocabulary)
    replayed(make, tokens).fill_vocab_mask(row, 0)
    return row[0]


Found = tuple[list[int], list[int], list[int]]


def by_search(
    make: Make, outputs: Sequence[int], logprobs: np.ndarray, ids: np.ndarray, budget: int, vocabulary: int
) -> tuple[Found, Tensor]:
    """The tree and its masks: of all that may be added to the tree, what has the smallest key, until nothing may."""
    token_ids, parents, depths, paths = [NO_TOKEN], [NO_PARENT], [0], [list(outputs)]
    masks = ones(budget + 1, vocabulary)
    open_: list[tuple[tuple[float, int, int, int], int]] = []
    budget_left = 0 if replayed(make, outputs).is_terminated() else budget
    scores = [0.0]

    def offer(node: int) -> None:
        masks[node] = mask_after(make, paths[node], vocabulary)
        if depths[node] == len(logprobs):
            return
        may = allowed(masks[node])
        row, row_ids = logprobs[depths[node]].astype(np.float64), ids[depths[node]].tolist()
        if len(may) == 1:
            kept = [(may.pop(), 0.0)]
        else:
            forbidden = np.array([token not in may for token in row_ids], dtype=bool)
            left = 1 - float(np.exp(row[forbidden]).sum())
            gain = -math.log(left) if left > 0 else INF
            kept = [(t, min(0.0, float(p) + gain)) for t, p in zip(row_ids, row, strict=True) if t in may and p > -INF]
        for rank, (token, logprob) in enumerate(kept):
            if not replayed(make, [*paths[node], token]).is_terminated():
                open_.append(((-(scores[node] + logprob), depths[node] + 1, node, rank), token))

    if budget_left:
        offer(ROOT)
    while open_ and budget_left:
        budget_left -= 1
        best = min(open_)
        open_.remove(best)
        (negative_score, depth, parent, _), token = best
        token_ids.append(token)
        parents.append(parent)
        depths.append(depth)
        scores.append(-negative_score)
        paths.append([*paths[parent], token])
        offer(len(token_ids) - 1)
    missing = budget + 1 - len(token_ids)
    found = (token_ids + [NO_TOKEN] * missing, parents + [NO_PARENT] * missing, depths + [0] * missing)
    return found, masks


def state_of(grammar: Any, vocabulary: int) -> tuple[Any, ...]:
    """Everything that the next step of a request depends on."""
    row = ones(1, vocabulary)
    if not grammar.is_terminated():
        grammar.fill_vocab_mask(row, 0)
    inner = getattr(grammar, "grammar", grammar)
    # Thinking is counted by the wrapper.
    thinking = [getattr(grammar, name, None) for name in ("tokens_in_think", "tokens_after_end")]
    history = list(getattr(grammar, "_thinking_match_history", []))
    return row.tolist(), list(inner.accepted_tokens), grammar.is_terminated(), thinking, history


def check(
    make: Make, outputs: Sequence[int], logprobs: np.ndarray, ids: np.ndarray, budget: int, vocabulary: int
) -> Found:
    grammar = replayed(make, outputs)
    before = state_of(grammar, vocabulary)
    mask = ones(budget + 1, vocabulary)

    found = constrained_tree(grammar, logprobs, ids, mask)

    expected, masks = by_search(make, outputs, logprobs, ids, budget, vocabulary)
    assert found == expected
    assert torch.equal(mask, masks)
    assert state_of(grammar, vocabulary) == before
    for node, parent in enumerate(found[1]):
        if parent != NO_PARENT:
            assert found[0][node] in allowed(mask[parent])
            assert found[2][node] == found[2][parent] + 1 <= len(logprobs)
            assert parent < node
    return found


def ranked(
    source: np.random.Generator, ids: np.ndarray, levels: Sequence[float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and ids of each depth in the order of `top_candidates`; all tokens' sum is 1."""
    if levels is None:
        logits = np.concatenate([source.normal(0, 2, ids.shape), np.full((len(ids), 1), 2.0)], axis=1)
        values = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))[:, :-1].astype(np.float32)
    else:
        values = source.choice(levels, ids.shape).astype(np.float32)
    order = np.lexsort((ids, -values), axis=-1)
    return np.take_along_axis(values, order, -1), np.take_along_axis(ids, order, -1)


# A small grammar of our own


def random_table(source: random.Random) -> list[dict[int, int | None]]:
    states = source.randint(1, 5)
    table: list[dict[int, int | None]] = []
    for _ in range(states):
        size = source.choice([1, 1, 2, 4, 12, SMALL])
        tokens = source.sample([*range(12), *range(SMALL)] if size <= 12 else range(SMALL), size)
        table.append({token: source.choice([*range(states), None]) for token in tokens})
    return table


@pytest.mark.parametrize("levels", [None, [-1.0], [-0.5, -1.0], [-0.7, -2.0, -INF], [-INF]])
def test_trees_in_random_grammars_equal_a_plain_search(levels: list[float] | None) -> None:
    source, numbers = random.Random(3), np.random.default_rng(3)
    sizes = set()
    for _ in range(150):
        table = random_table(source)
        depth, topk, budget = source.randint(1, 6), source.randint(1, 6), source.randint(1, 14)
        ids = np.argsort(numbers.random((depth, source.choice([12, SMALL]))), axis=-1)[:, :topk]
        outputs = walk(source, lambda table=table: FakeGrammar(table), source.randint(0, 3), SMALL)
        found = check(lambda table=table: FakeGrammar(table), outputs, *ranked(numbers, ids, levels), budget, SMALL)
        sizes.add(sum(token != NO_TOKEN for token in found[0]))
    assert len(sizes) > 4


def walk(source: random.Random, make: Make, length: int, vocabulary: int) -> list[int]:
    """Random tokens that the grammar allows; it may end with the last."""
    grammar, tokens = make(), []
    row = ones(1, vocabulary)
    while len(tokens) < length and not grammar.is_terminated():
        row.fill_(-1)
        grammar.fill_vocab_mask(row, 0)
        token = source.choice(sorted(allowed(row[0]) & set(range(vocabulary))))
        grammar.accept_token(token)
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("kind", ["continuous", "few levels", "one level", "zeros", "with minus infinity"])
def test_a_grammar_that_allows_everything_changes_no_tree(kind: str) -> None:
    for seed, (depth, topk, budget) in enumerate([(1, 1, 1), (15, 16, 16), (15, 4, 64), (7, 8, 20), (3, 2, 40)] * 4):
        logprobs, ids = (part[0].numpy() for part in candidates(seed, (1, depth, topk), LEVELS[kind]))
        mask = ones(budget + 1, SMALL)
        found = constrained_tree(AllowAll(), logprobs, ids, mask)
        tree = build_tree(logprobs, ids, budget)
        missing = budget + 1 - len(tree)
        assert found[0] == [*tree.token_ids, *[NO_TOKEN] * missing]
        assert found[1] == [*tree.parents, *[NO_PARENT] * missing]
        assert found[2] == [*tree.depths, *[0] * missing]


def test_nodes_of_equal_score_stand_by_depth_parent_and_rank() -> None:
    """Whatever is allowed is certain, so that only the rest of the key orders it."""
    table: list[dict[int, int | None]] = [{5: 1, 3: 2}, {5: 1, 3: 1}, {5: 2}]
    logprobs, ids = np.zeros((3, 3), dtype=np.float32), np.array([[3, 4, 5]] * 3)
    found = check(lambda: FakeGrammar(table), [], logprobs, ids, 9, SMALL)
    assert found[0] == [NO_TOKEN, 3, 5, 5, 3, 5, 5, 3, 5, 3]
    assert found[1] == [NO_PARENT, 0, 0, 1, 2, 2, 3, 4, 4, 5]


def test_what_is_forbidden_is_taken_out_of_the_distribution() -> None:
    """After 1 half of the mass is forbidden, after 2 nothing: 1, 8 is then more probable than 2, 9."""
    table: list[dict[int, int | None]] = [{1: 1, 2: 2}, {8: 1}, {7: 2, 8: 2, 9: 2}]
    table[1][60] = 1  # two tokens, so that none is forced
    logprobs = np.log(np.array([[0.45, 0.45], [0.5, 0.3]], dtype=np.float32))
    ids = np.array([[1, 2], [9, 8]])
    # 1, 8: 0.45 * 0.3 / 0.5 = 0.27; 2, 9: 0.45 * 0.5 = 0.225; 2, 8: 0.135
    found = check(lambda: FakeGrammar(table), [], logprobs, ids, 3, SMALL)
    assert found == ([NO_TOKEN, 1, 2, 8], [NO_PARENT, 0, 0, 1], [0, 1, 1, 2])


def test_forbidden_candidates_that_hold_all_the_mass_leave_the_others_certain() -> None:
    table: list[dict[int, int | None]] = [{1: 0, 2: 0}]
    logprobs, ids = np.array([[0.0, -40.0]] * 2, dtype=np.float32), np.array([[9, 1]] * 2)
    found = check(lambda: FakeGrammar(table), [], logprobs, ids, 4, SMALL)
    assert found[0] == [NO_TOKEN, 1, 1, NO_TOKEN, NO_TOKEN]


def test_a_candidate_beyond_the_mask_is_forbidden() -> None:
    beyond = 32 * words(SMALL)
    logprobs = np.log(np.array([[0.3, 0.2, 0.1]] * 2, dtype=np.float32))
    ids = np.array([[beyond, beyond + 7, 5], [10**6, 9, beyond + 31]])
    found = check(AllowAll, [], logprobs, ids, 5, SMALL)
    assert found[0][:3] == [NO_TOKEN, 5, 9]
    assert found[1][3:] == [NO_PARENT] * 3


@pytest.mark.parametrize("token", [0, 31, 32, 63, 64, SMALL - 1])
@pytest.mark.parametrize("budget", [1, 3, 6, 9])
def test_a_forced_token_that_nobody_proposed_fills_the_tree_to_its_depth(budget: int, token: int) -> None:
    table: list[dict[int, int | None]] = [{token: 0}]
    logprobs, ids = np.full((6, 2), -1.0, dtype=np.float32), np.array([[1, 2]] * 6)
    found = check(lambda: FakeGrammar(table), [], logprobs, ids, budget, SMALL)
    run = min(6, budget)
    assert found[0] == [NO_TOKEN, *[token] * run, *[NO_TOKEN] * (budget - run)]
    assert found[1] == [NO_PARENT, *range(run), *[NO_PARENT] * (budget - run)]


@pytest.mark.parametrize("tokens", [range(32, 64), range(33, 64), range(62, 64)])
def test_many_tokens_in_one_word_of_the_mask_are_no_forced_token(tokens: range) -> None:
    """As signed numbers some of these words look like a single bit."""
    logprobs, ids = np.array([[-0.5, -1.5, -2.0]] * 3, dtype=np.float32), np.array([[63, 9, 62]] * 3)
    found = check(lambda: FakeGrammar([dict.fromkeys(tokens, 0)]), [], logprobs, ids, 8, SMALL)
    assert set(found[0][1:]) == {62, 63}


def test_forced_tokens_need_no_finite_candidate() -> None:
    logprobs, ids = np.full((4, 1), -INF, dtype=np.float32), np.array([[1]] * 4)
    found = check(lambda: FakeGrammar([{9: 0}]), [], logprobs, ids, 4, SMALL)
    assert found[0] == [NO_TOKEN, 9, 9, 9, 9]


def test_a_token_that_ends_the_grammar_is_never_a_node() -> None:
    table: list[dict[int, int | None]] = [{5: None, 6: 1}, {7: None}]
    logprobs, ids = np.array([[-0.1, -3.0]] * 4, dtype=np.float32), np.array([[5, 6]] * 4)
    found = check(lambda: FakeGrammar(table), [], logprobs, ids, 5, SMALL)
    assert found[0] == [NO_TOKEN, 6, *[NO_TOKEN] * 4]


def test_a_grammar_that_has_ended_gives_the_root_alone() -> None:
    logprobs, ids = np.array([[-0.1]] * 4, dtype=np.float32), np.array([[5]] * 4)
    found = check(lambda: FakeGrammar([{5: None}]), [5], logprobs, ids, 3, SMALL)
    assert found == ([NO_TOKEN] * 4, [NO_PARENT] * 4, [0] * 4)


@pytest.mark.parametrize(("depth", "topk"), [(0, 0), (0, 3), (2, 0)])
def test_without_candidates_the_root_is_masked_and_alone(depth: int, topk: int) -> None:
    logprobs, ids = np.zeros((depth, topk), dtype=np.float32), np.zeros((depth, topk), dtype=np.int64)
    found = check(lambda: FakeGrammar([{5: 0, 6: 0}]), [], logprobs, ids, 3, SMALL)
    assert found[0] == [NO_TOKEN] * 4


# xgrammar's matchers

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["red", "green", "blue"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": ("json", json.dumps(SCHEMA)),
    "numbers": ("json", json.dumps({"type": "array", "items": {"type": "integer"}, "maxItems": 3})),
    "any json": ("json", "$$ANY$$"),
    "word": ("regex", "[a-z]{1,6}"),
    "literal": ("regex", "def main\\(self\\): return (None|True|False)"),
    "digits": ("regex", "([0-9]{2}-){1,3}"),
    "anything": ("regex", "(.|\\n)*"),
    "sums": ("ebnf", 'root ::= term | term "+" root\nterm ::= "(" root ")" | [0-9]+'),
    "one letter": ("ebnf", 'root ::= "x"'),
}


def likely(source: random.Random, make: Make, outputs: Sequence[int], depth: int, topk: int) -> np.ndarray:
    """Ids per depth that the grammar may allow there, the end of text and others among them."""
    walks = [walk(source, lambda: replayed(make, outputs), depth, VOCABULARY) for _ in range(3)]
    rows = []
    for at in range(depth):
        tokens = [tokens[at] for tokens in walks if len(tokens) > at]
        tokens += [EOS] * source.randint(0, 1) + source.sample(range(1, VOCABULARY), 2 * topk)
        rows.append(list(dict.fromkeys(tokens))[:topk])
    return np.array(rows)


@pytest.mark.parametrize("name", GRAMMARS)
def test_trees_in_real_grammars_equal_a_plain_search(name: str) -> None:
    make = xgrammar(*GRAMMARS[name])
    source, numbers = random.Random(name), np.random.default_rng(1)
    sizes = set()
    for _ in range(12):
        outputs = walk(source, make, source.choice([0, 0, 1, 2, 5]), VOCABULARY)
        depth, topk, budget = source.randint(1, 8), source.randint(2, 12), source.choice([1, 2, 4, 7, 12, 25])
        ids = likely(source, make, outputs, depth, topk)
        found = check(make, outputs, *ranked(numbers, ids), budget, VOCABULARY)
        sizes.add(sum(token != NO_TOKEN for token in found[0]))
        assert EOS not in found[0]
    assert len(sizes) > 2 or name == "one letter"


def test_a_matcher_goes_on_as_if_no_tree_had_been_built() -> None:
    make = xgrammar(*GRAMMARS["schema"])
    source, numbers = random.Random(2), np.random.default_rng(2)
    grammar = make()
    for token in walk(source, make, 40, VOCABULARY):
        ids = likely(source, make, list(grammar.accepted_tokens), 5, 8)
        constrained_tree(grammar, *ranked(numbers, ids), ones(13, VOCABULARY))
        grammar.accept_token(token)  # raises if the matcher is elsewhere
        if grammar.is_terminated():
            break
        assert torch.equal(
            mask_after(lambda: grammar, [], VOCABULARY), mask_after(make, grammar.accepted_tokens, VOCABULARY)
        )
    assert len(grammar.accepted_tokens) > 5


def test_a_literal_that_no_longer_token_spells_is_drafted_whole() -> None:
    """Each character is one token, and none of two fits: the grammar alone writes the text."""
    text = "qzjxqwvkzqjqxzqwqjvzx"
    vocabulary = tokenizer().get_vocab()
    assert not any(part in vocabulary for part in (text[i : i + 2] for i in range(len(text) - 1)))
    logprobs, ids = np.full((15, 2), -3.0, dtype=np.float32), np.array([[400, 401]] * 15)
    found = check(xgrammar("regex", text), [], logprobs, ids, 16, VOCABULARY)
    assert found[0] == [NO_TOKEN, *(token_of(letter) for letter in text[:15]), NO_TOKEN]
    assert found[2] == [*range(16), 0]


def forced_names() -> Make:
    schema = {
        "type": "object",
        "properties": {"customer_name": {"type": "boolean"}},
        "required": ["customer_name"],
        "additionalProperties": False,
    }
    return xgrammar("json", json.dumps(schema))


NOBODYS = (np.full((15, 2), -9.0, dtype=np.float32), np.array([[400, 401]] * 15))


def test_a_forced_text_is_drafted_as_the_tokenizer_cuts_it() -> None:
    """All of it but the last token, which may merge with what follows."""
    grammar = replayed(forced_names(), tokenizer().encode('{"', add_special_tokens=False))
    before = state_of(grammar, VOCABULARY)
    mask = ones(17, VOCABULARY)
    token_ids, parents, _ = constrained_tree(grammar, *NOBODYS, mask, tokenizer())
    expected = tokenizer().encode('customer_name"', add_special_tokens=False)[:-1]
    assert len(expected) > 3
    assert token_ids == [NO_TOKEN, *expected, *[NO_TOKEN] * (16 - len(expected))]
    assert parents[1 : len(expected) + 1] == [*range(len(expected))]
    assert state_of(grammar, VOCABULARY) == before
    for node in range(len(expected) + 1):
        asked = replayed(lambda: replayed(forced_names(), tokenizer().encode('{"')), expected[:node])
        assert torch.equal(mask[node], mask_after(lambda asked=asked: asked, [], VOCABULARY)), node


def test_a_forced_text_does_not_push_out_what_is_more_probable() -> None:
    grammar = replayed(forced_names(), tokenizer().encode('{"', add_special_tokens=False))
    letter, first = token_of("c"), tokenizer().encode("customer_name", add_special_tokens=False)[0]
    other = next(token for token in sorted(allowed(mask_after(lambda: grammar, [], VOCABULARY))) if token != first)
    logprobs, ids = np.array([[-0.01, -5.0]] * 3, dtype=np.float32), np.array([[other, letter]] * 3)
    token_ids, parents, _ = constrained_tree(grammar, logprobs, ids, ones(3, VOCABULARY), tokenizer())
    assert (token_ids[1], parents[1]) == (other, ROOT)


def test_between_the_bytes_of_a_character_no_text_is_forced() -> None:
    first, second = tokenizer().encode("ö", add_special_tokens=False)
    grammar = replayed(xgrammar("regex", "ööö=[a-z]{3}"), [first])
    with pytest.raises(UnicodeDecodeError):
        grammar.try_jump_forward(tokenizer())
    token_ids, _, _ = constrained_tree(grammar, *NOBODYS, ones(17, VOCABULARY), tokenizer())
    assert token_ids[1] == second


def test_no_text_is_forced_while_thinking() -> None:
    make = reasoner(forced_names(), THINK_END, thinking=True)
    plain = constrained_tree(make(), *NOBODYS, ones(17, VOCABULARY))
    assert constrained_tree(make(), *NOBODYS, ones(17, VOCABULARY), tokenizer()) == plain


def test_where_only_the_end_is_left_nothing_is_drafted() -> None:
    letters = [token_of(letter) for letter in "abcd"]
    make = xgrammar("regex", "[a-z]{4}")
    logprobs, ids = np.array([[-0.01, -5.0]] * 3, dtype=np.float32), np.array([[EOS, letters[0]]] * 3)
    whole = check(make, letters, logprobs, ids, 4, VOCABULARY)
    assert whole[0] == [NO_TOKEN] * 5
    almost = check(make, letters[:3], logprobs, ids, 4, VOCABULARY)
    assert almost[0] == [NO_TOKEN, letters[0], *[NO_TOKEN] * 3]
    ended = check(make, [*letters, EOS], logprobs, ids, 4, VOCABULARY)
    assert ended[0] == [NO_TOKEN] * 5


# Thinking

THINK_END = (7, 9)


def reasoner(inner: Make, ends: Sequence[int], thinking: bool, limit: int = -1) -> Make:
    def make() -> Any:
        module = import_sglang("sglang.srt.constrained.reasoner_grammar_backend")
        grammar = module.ReasonerGrammarObject(
            inner(),
            list(ends),
            max_think_tokens=limit,
            enable_token_filter=limit >= 0,
            token_filter_fn=backend().set_token_filter if limit >= 0 else None,
        )
        grammar.maybe_init_reasoning(thinking)
        return grammar

    return make


@pytest.mark.parametrize("limit", [-1, 0, 3])
@pytest.mark.parametrize("ends", [(7,), THINK_END, (7, 7)])
@pytest.mark.parametrize("thinking", [False, True])
def test_trees_across_the_end_of_thinking_equal_a_plain_search(
    thinking: bool, ends: tuple[int, ...], limit: int
) -> None:
    make = reasoner(xgrammar(*GRAMMARS["word"]), ends, thinking, limit)
    source, numbers = random.Random(4), np.random.default_rng(4)
    letters = [token_of(letter) for letter in "abc"]
    across = 0
    for _ in range(10):
        outputs = walk(source, make, source.randint(0, 4), VOCABULARY) if source.random() < 0.5 else []
        depth, budget = source.randint(2, 6), source.choice([6, 16])
        rows = [source.sample([7, 9, EOS, 50, *letters], 5) for _ in range(depth)]
        found = check(make, outputs, *ranked(numbers, np.array(rows)), budget, VOCABULARY)
        across += any(found[0][parent] == ends[-1] for parent in found[1][1:] if parent > ROOT)
    assert not thinking or across


def test_nodes_behind_the_end_of_thinking_are_constrained_and_others_are_not() -> None:
    letter, other = token_of("a"), token_of("(")
    make = reasoner(xgrammar(*GRAMMARS["word"]), (7,), thinking=True)
    logprobs = np.log(np.array([[0.5, 0.4], [0.5, 0.4], [0.5, 0.4]], dtype=np.float32))
    ids = np.array([[7, other], [other, letter], [other, letter]])
    token_ids, parents, _ = check(make, [], logprobs, ids, 14, VOCABULARY)
    children: dict[int, set[int]] = {}
    for node, parent in enumerate(parents):
        if parent != NO_PARENT:
            children.setdefault(parent, set()).add(token_ids[node])
    end, still_thinking = token_ids.index(7), token_ids.index(other)
    assert children[ROOT] == {7, other}
    assert children[end] == {letter}
    assert children[still_thinking] == {other, letter}


def test_while_thinking_the_tree_is_the_free_one() -> None:
    make = reasoner(xgrammar(*GRAMMARS["word"]), (4000,), thinking=True)
    logprobs, ids = (part[0].numpy() for part in candidates(1, (1, 6, 5), LEVELS["continuous"]))
    token_ids, parents, depths = check(make, [12, 13], logprobs, ids, 12, VOCABULARY)
    tree = build_tree(logprobs, ids, 12)
    assert (token_ids, parents, depths) == (list(tree.token_ids), list(tree.parents), list(tree.depths))


# A batch


def test_only_requests_with_a_grammar_get_other_trees_and_masks() -> None:
    source = random.Random(6)
    makes: list[Make | None] = [
        None,
        xgrammar(*GRAMMARS["sums"]),
        None,
        reasoner(xgrammar(*GRAMMARS["word"]), (7,), thinking=True),
        xgrammar(*GRAMMARS["one letter"]),
        xgrammar("regex", "qzjxqwvkzqjqxzqw"),
        None,
    ]
    outputs = [[] if make is None else walk(source, make, 1, VOCABULARY) for make in makes]
    requests = [
        SimpleNamespace(grammar=make and replayed(make, tokens), tokenizer=None)
        for make, tokens in zip(makes, outputs, strict=True)
    ]
    budget, width = 10, 11
    numbers = np.random.default_rng(6)
    ids = np.stack([np.argsort(numbers.random((6, 40)), axis=-1)[:, :8] for _ in makes])
    ids[1, :, 0], ids[1, :, 1] = token_of("1"), token_of("(")
    logprobs, ids = map(np.stack, zip(*(ranked(numbers, each) for each in ids), strict=True))
    drafted = torch.from_numpy(logprobs), torch.from_numpy(ids)
    free = build_trees(*drafted, budget)
    before = [free.token_ids.clone(), free.parents.clone(), free.depths.clone(), free.ancestors.clone()]

    trees, node_masks = constrain_trees(requests, free, drafted, VOCABULARY)

    for unchanged, old in zip([free.token_ids, free.parents, free.depths, free.ancestors], before, strict=True):
        assert torch.equal(unchanged, old)
    assert node_masks.rows == [row for row, make in enumerate(makes) if make is not None]
    assert node_masks.words.shape == (len(node_masks.rows) * width, words(VOCABULARY))
    mask_of = dict(zip(node_masks.rows, node_masks.words.split(width), strict=True))
    for row, make in enumerate(makes):
        if make is None:
            for new, old in zip([trees.token_ids, trees.parents, trees.depths, trees.ancestors], before, strict=True):
                assert torch.equal(new[row], old[row])
            continue
        found, masks = by_search(make, outputs[row], logprobs[row], ids[row], budget, VOCABULARY)
        assert (trees.token_ids[row].tolist(), trees.parents[row].tolist(), trees.depths[row].tolist()) == found
        assert torch.equal(mask_of[row], masks)
        tree = Tree(*map(tuple, found), scores=())
        sees = [set(tree.ancestors(node)) for node in range(width)]
        assert trees.ancestors[row].tolist() == [[column in each for column in range(width)] for each in sees]
    assert trees.ancestors.is_contiguous()
    assert (trees.token_ids[5] != NO_TOKEN).sum() == 6  # forced to the depth of the drafts
    assert (trees.token_ids[4] == NO_TOKEN).all()


def test_the_mask_is_laid_over_every_nodes_logits() -> None:
    makes = [None, xgrammar(*GRAMMARS["word"]), None]
    requests = [SimpleNamespace(grammar=make and make(), tokenizer=None) for make in makes]
    drafted = candidates(2, (3, 4, 3), None)
    trees, node_masks = constrain_trees(requests, build_trees(*drafted, 5), drafted, VOCABULARY)
    logits = torch.randn(3, 6, VOCABULARY)
    masked = logits.clone()
    node_masks.apply(masked)
    assert torch.equal(masked[0], logits[0]) and torch.equal(masked[2], logits[2])
    for node in range(6):
        kept = masked[1, node].isfinite().nonzero().flatten().tolist()
        is_node = node == ROOT or int(trees.parents[1, node]) != NO_PARENT
        path = []
        while is_node and node != ROOT:
            path.insert(0, int(trees.token_ids[1, node]))
            node = int(trees.parents[1, node])
        expected = allowed(mask_after(makes[1], path, VOCABULARY)) if is_node else set(range(VOCABULARY))
        assert set(kept) == expected
        assert torch.equal(masked[6:12][masked[6:12].isfinite()], logits[6:12][masked[6:12].isfinite()])

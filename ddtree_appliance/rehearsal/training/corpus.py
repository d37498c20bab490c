"""The training text: which files it is made of, how it is split and how it becomes token ids.

The same interpreter version gives the same text, split and tokenizer on every machine. Files that record how that one
interpreter was built (paths of the build host) are left out: the text ends up in the published `heldout.bin`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ddtree_appliance.errors import UsageError

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|mask|>")
END_OF_TEXT_ID = 0
PAD_ID = 3
MASK_ID = 4
VOCAB_SIZE = 4096
HELDOUT_FILES = 60
# Not the training seed: pairs trained with different seeds stay comparable on one held-out text.
SPLIT_SEED = 0

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})

TokenArray = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Source:
    """One source file: `name` is its path below the library's folder, with forward slashes."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """The encoded text. `train` and `heldout` hold the documents end to end, each closed by END_OF_TEXT_ID."""

    tokenizer: Tokenizer
    train: TokenArray
    heldout: TokenArray
    train_files: int
    heldout_files: int
    label: str


def collect_sources(library: Path) -> list[Source]:
    """The library's non-empty UTF-8 .py files, sorted by name; a text that occurs twice is kept once."""
    if not library.is_dir():
        raise UsageError(f"--stdlib: {library} is not a folder")
    found: list[Source] = []
    seen: set[str] = set()
    paths = {path.relative_to(library).as_posix(): path for path in library.rglob("*.py")}
    for name in sorted(paths):
        if _is_skipped(name) or paths[name].is_symlink():
            continue
        try:
            text = paths[name].read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # the library's own tests of other encodings
        # Duplicates (lib2to3 and test data) would leak training text into the held-out files.
        if text.strip() and text not in seen:
            seen.add(text)
            found.append(Source(name, text))
    return found


def _is_skipped(name: str) -> bool:
    parts = name.split("/")
    build_record = parts[-1].startswith("_sysconfigdata") or any(part.startswith("config-") for part in parts[:-1])
    return build_record or not _SKIPPED_FOLDERS.isdisjoint(parts)


def split_sources(
    sources: Sequence[Source], heldout_files: int = HELDOUT_FILES, seed: int = SPLIT_SEED
) -> tuple[list[Source], list[Source]]:
    """(training, held-out) sources; depends on the sorted names and the seed only."""
    if len(sources) < 4 * heldout_files:
        raise UsageError(
            f"--stdlib: {len(sources)} usable .py files are too few to hold out {heldout_files}",
            hint="pass the folder of a full standard library, e.g. that of a python.org or pyenv build",
        )
    order = sorted(sources, key=lambda source: source.name)
    random.Random(seed).shuffle(order)
    return sorted(order[heldout_files:], key=lambda source: source.name), order[:heldout_files]


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A byte-level BPE in which SPECIAL_TOKENS have the ids 0..4 and every byte has a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> TokenArray:
    """[N] uint16: the texts' ids in order, END_OF_TEXT_ID after each."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False):
        ids.extend(encoding.ids)
        ids.append(END_OF_TEXT_ID)
    return np.asarray(ids, dtype=np.uint16)


def build_corpus(library: Path) -> Corpus:
    """Collect, split, train the tokenizer on the training part, and encode both parts."""
    train, heldout = split_sources(collect_sources(library))
    tokenizer = train_tokenizer(source.text for source in train)
    return Corpus(
        tokenizer=tokenizer,
        train=encode_documents(tokenizer, [source.text for source in train]),
        heldout=encode_documents(tokenizer, [source.text for source in heldout]),
        train_files=len(train),
        heldout_files=len(heldout),
        label=library.resolve().name,
    )

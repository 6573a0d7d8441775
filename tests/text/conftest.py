"""A few lines of text, and a byte-level BPE learned from them."""

import random

import pytest
from tokenizers import ByteLevelBPETokenizer

WORDS = "the of heron river north built in 1887 é ñandú 東京 bridge was opened ; @-@ , . <unk> state".split()  # noqa: SIM905


def make_text(num_lines, seed=0):
    """Headings, paragraphs and blank lines, as in WikiText."""
    rng = random.Random(seed)
    lines = []
    for _ in range(num_lines):
        kind = rng.random()
        words = " ".join(rng.choices(WORDS, k=rng.randint(3, 40)))
        lines.append(" \n" if kind < 0.2 else f" = {words[:20]} = \n" if kind < 0.3 else f" {words} \n")
    return "".join(lines)


def without_blank(text):
    return "".join(line for line in text.splitlines(keepends=True) if line.strip())


@pytest.fixture(scope="session")
def bpe(tmp_path_factory):
    """A folder with vocab.json and merges.txt."""
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([make_text(50)], vocab_size=300, show_progress=False)
    tokenizer.save_model(str(folder))
    return str(folder)


@pytest.fixture
def texts():
    """By the split's name in file names."""
    return {"train": make_text(200, 1), "valid": make_text(20, 2), "test": make_text(30, 3)}

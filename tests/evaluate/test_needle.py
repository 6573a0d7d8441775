"""Where a needle is, what it says, and how its value is scored."""

import itertools
import re

import numpy as np
import pytest

from loglinear_jax.evaluate import needle
from loglinear_jax.evaluate.needle import Needles, hide_needles, needle_measures, needle_scores
from loglinear_jax.settings import SettingError
from loglinear_jax.text import load_tokenizer
from loglinear_jax.text.tokenizer import train_tokenizer

BYTES = load_tokenizer("bytes")
TEXTS = ["a heron stands in the river, " * 20, "north of the bridge it rains; " * 20]
DEPTHS = [0, 30, 100]


def documents_of(tokenizer, length):
    return [np.array([0, *tokenizer.encode(text).ids])[:length] for text in TEXTS]


@pytest.mark.parametrize("tokenizer", [BYTES, train_tokenizer(TEXTS, 300)], ids=["bytes", "bpe"])
def test_a_needle_is_at_its_depth_and_asked_for_at_the_end(tokenizer):
    documents = documents_of(tokenizer, 150)
    needles = hide_needles(tokenizer, documents, [3, 8], 150, DEPTHS)
    assert needles.windows.shape == (2, 3, 151)
    said = set()
    for document, windows, size in zip(documents, needles.windows, needles.values, strict=True):
        for depth, window in zip(DEPTHS, windows, strict=True):
            assert window[0] == 0
            before, sentence, rest = tokenizer.decode(window[1:].tolist()).partition(" The secret number of ")
            value = tokenizer.decode(window[-size:].tolist())
            key = sentence and rest.split()[0]
            needle_text = f" The secret number of {key} is{value}."
            assert rest.endswith(f" The secret number of {key} is{value}") and value.strip().isdecimal()
            text = before + sentence + rest
            assert text.count(f" of {key} is{value}") == 2 and needle_text in text
            inside = len(tokenizer.encode(needle_text).ids)
            room = 151 - inside - (inside - 1)
            at = 1 + round(depth / 100 * (room - 1))
            kept = np.concatenate([window[:at], window[at + inside : room + inside]])
            np.testing.assert_array_equal(kept, document[:room])
            said.add((key, value))
    assert len(said) == 2  # one for each document, at every depth
    longer = hide_needles(tokenizer, documents_of(tokenizer, 190), [3, 8], 190, [50])
    last = np.s_[:, 0, -needles.values[0] :]
    np.testing.assert_array_equal(longer.windows[last], needles.windows[last])


def test_the_value_alone_is_scored(monkeypatch):
    losses = np.arange(24, dtype=np.float32).reshape(4, 6)
    right = np.array([[0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 0, 1], [0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 1, 1]], bool)
    monkeypatch.setattr(needle, "window_scores", lambda *_: (losses, right))
    sums, correct = needle_scores(None, None, Needles(np.zeros((2, 2, 7), np.int32), np.array([2, 3])))
    np.testing.assert_array_equal(sums, [[4 + 5, 10 + 11], [15 + 16 + 17, 21 + 22 + 23]])
    np.testing.assert_array_equal(correct, [[True, False], [True, False]])


def test_lengths_with_different_documents_are_put_together():
    rng, numbers, values = np.random.default_rng(0), [[1, 4, 6], [4, 9]], [np.array([7, 6, 5]), np.array([6, 3])]
    scores = [(rng.random((len(n), 2)), rng.random((len(n), 2)) < 0.5) for n in numbers]
    measures = {one.name: one for one in needle_measures([128, 256], [0, 50], numbers, values, {"a": [scores]})}
    loss, accuracy = measures["needle loss by length"], measures["needle accuracy by length and depth"]
    np.testing.assert_array_equal(loss.counts, [[14, 0], [12, 12], [10, 0], [0, 6]])
    for length, (sums, right) in enumerate(scores):
        assert loss.mean("a", length)[0] == pytest.approx(sums.sum() / (2 * values[length].sum()))
        for depth in range(2):
            assert accuracy.mean("a", 2 * length + depth)[0] == pytest.approx(100 * right[:, depth].mean())
    assert accuracy.groups == [f"{length}, {depth}" for length, depth in itertools.product(*accuracy.grid)]
    other = [(2 * sums, ~right) for sums, right in scores]
    of_two = needle_measures([128, 256], [0, 50], numbers, values, {"a": [scores, other]})
    two_losses, two_accuracies = (one for one in of_two if one.grid is None)
    for length in range(2):
        assert two_losses.mean("a", length)[0] == pytest.approx(1.5 * loss.mean("a", length)[0])
        mean, *interval = two_accuracies.mean("a", length)
        assert mean == pytest.approx(50) and np.isnan(interval).all()


def test_a_length_without_room_is_named():
    with pytest.raises(SettingError, match=r"length=60: expected at least \d\d, the tokens of the needle") as raised:
        hide_needles(BYTES, documents_of(BYTES, 60)[:1], [0], 60, DEPTHS)
    least = int(re.search(r"least (\d+)", str(raised.value))[1])
    assert hide_needles(BYTES, documents_of(BYTES, least)[:1], [0], least, DEPTHS).windows.shape == (1, 3, least + 1)

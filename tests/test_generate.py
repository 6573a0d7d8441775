"""Sampling, and generation against the full forward pass."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loglinear_jax.generate import _advance_by_block, _start, generate, sample, stream
from loglinear_jax.models import LanguageModel, LanguageSettings
from loglinear_jax.settings import SettingError

SETTINGS = LanguageSettings(
    vocab_size=23, max_length=32, hidden=16, layers=1, heads=2, head_dim=8, key_dim=16, dtype="float32"
)
MODEL = LanguageModel(SETTINGS)
PROMPT = np.array([[3, 5, 7], [1, 2, 0]])


def drawn(model):
    params = jax.jit(model.init)(jax.random.key(0), jnp.asarray(PROMPT))
    return jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), params)


@pytest.fixture(scope="module")
def params():
    return drawn(MODEL)


def test_the_likeliest_tokens_are_those_of_the_full_pass(params):
    tokens = generate(MODEL, params, PROMPT, 12, temperature=0)
    assert tokens.shape == (2, 12)
    sequence = np.concatenate([PROMPT, tokens], axis=1)
    logits = jax.jit(MODEL.apply)(params, sequence[:, :-1])
    np.testing.assert_array_equal(np.argmax(logits[:, 2:], axis=-1), tokens)


@pytest.mark.parametrize("mixer", ["log_linear_delta", "softmax"])
@pytest.mark.slow
def test_a_prompt_is_taken_in_parts(mixer, monkeypatch):
    model = LanguageModel(dataclasses.replace(SETTINGS, mixer=mixer))
    prompt = np.arange(22).reshape(2, 11)
    params = drawn(model)
    expected = generate(model, params, prompt, 12, temperature=0)
    monkeypatch.setattr("loglinear_jax.generate.PROMPT_TOKENS", 8)  # four of each sequence
    np.testing.assert_array_equal(generate(model, params, prompt, 12, temperature=0), expected)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lam": "content", "mixer": "log_linear,softmax", "layers": 2},
        {"mixer": "log_linear_delta"},
        {"mixer": "gated_delta,softmax(window=4)", "layers": 2},
    ],
    ids=str,
)
@pytest.mark.slow
def test_prompts_of_different_lengths_go_on_as_alone(settings, monkeypatch):
    model = LanguageModel(dataclasses.replace(SETTINGS, **settings))
    prompts = [np.arange(length) % 23 for length in (7, 1, 2)]
    params = drawn(model)
    monkeypatch.setattr("loglinear_jax.generate.PROMPT_TOKENS", 12)  # four of each sequence
    together = generate(model, params, prompts, 8, temperature=0)
    for prompt, tokens in zip(prompts, together, strict=True):
        np.testing.assert_array_equal(generate(model, params, prompt[None], 8, temperature=0)[0], tokens)


def test_what_is_compiled_serves_the_next_call(params):
    first = generate(MODEL, params, PROMPT, 12, seed=3)
    compiled = _start._cache_size(), _advance_by_block._cache_size()
    np.testing.assert_array_equal(generate(LanguageModel(SETTINGS), params, PROMPT, 12, seed=3), first)
    assert (_start._cache_size(), _advance_by_block._cache_size()) == compiled


def test_a_lam_without_levels_goes_on_beyond_the_trained_length():
    model = LanguageModel(dataclasses.replace(SETTINGS, lam="content"))
    params = drawn(model)
    tokens = generate(model, params, PROMPT, 40, temperature=0)
    logits = jax.jit(model.apply)(params, np.concatenate([PROMPT, tokens], axis=1)[:, :-1])
    np.testing.assert_array_equal(np.argmax(logits[:, 2:], axis=-1), tokens)


def test_parameters_that_do_not_fit_are_named(params):
    with pytest.raises(ValueError, match="the params of one seed, not of several"):
        generate(MODEL, jax.tree.map(lambda x: jnp.stack([x, x]), params), PROMPT, 2)


def test_the_seed_decides(params):
    first, again, other = (generate(MODEL, params, PROMPT, 10, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    likeliest = generate(MODEL, params, PROMPT, 8, temperature=0)
    np.testing.assert_array_equal(generate(MODEL, params, PROMPT, 8, temperature=1e-30), likeliest)


def test_a_sequence_stops_at_one_of_some_tokens_and_the_other_goes_on(params):
    free = generate(MODEL, params, PROMPT, 20, temperature=0)
    for stops in ([int(free[0, 4])], [int(free[0, 6]), int(free[0, 3])]):
        tokens = generate(MODEL, params, PROMPT, 20, temperature=0, stop_token=stops)
        ends = [next((t for t, token in enumerate(row) if token in stops), 20) for row in free]
        for row, expected, end in zip(tokens, free, ends, strict=True):
            np.testing.assert_array_equal(row[: end + 1], expected[: end + 1][: len(row)])
            assert np.isin(row[end:], stops).all()
        assert tokens.shape[1] == min(max(ends) + 1, 20)


@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 3.0, "top_k": 4}])
def test_only_ids_of_the_tokenizer_are_taken(params, how):
    assert generate(MODEL, params, PROMPT, 20, **how).max() >= 5
    assert generate(MODEL, params, PROMPT, 20, num_ids=5, **how).max() < 5


def test_parameters_that_are_not_finite_give_no_tokens(params):
    """Of a prompt that meets them, and of a later token that does."""
    for temperature in (0, 1.0):
        with pytest.raises(SettingError, match="params give logits that are not finite, at token 0 after the prompt"):
            generate(MODEL, jax.tree.map(lambda x: x * jnp.nan, params), PROMPT, 3, temperature=temperature)
    free = generate(MODEL, params, PROMPT, 12, temperature=0)
    later = next(
        index for index, token in enumerate(free[0]) if token not in {*PROMPT.ravel(), *free[:, :index].ravel()}
    )
    embedding = params["params"]["embed"]["embedding"].at[free[0, later]].set(jnp.inf)
    damaged = {"params": params["params"] | {"embed": {"embedding": embedding}}}
    tokens = stream(MODEL, damaged, PROMPT, 12, temperature=0)
    np.testing.assert_array_equal([next(tokens)[0] for _ in range(later + 1)], free[0, : later + 1])
    with pytest.raises(SettingError, match=f"not finite, at token {later + 1} after the prompt"):
        next(tokens)


def test_sampling_follows_the_logits():
    logits = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1]))
    many = jnp.broadcast_to(logits, (20_000, 4))

    def shares(**how):
        return np.bincount(sample(jax.random.key(0), many, **how), minlength=4) / len(many)

    np.testing.assert_allclose(shares(), [0.4, 0.3, 0.2, 0.1], atol=0.015)
    np.testing.assert_allclose(shares(top_k=2), [4 / 7, 3 / 7, 0, 0], atol=0.015)
    np.testing.assert_allclose(shares(top_p=0.6), [4 / 7, 3 / 7, 0, 0], atol=0.015)  # 0.4 is not enough, 0.7 is
    np.testing.assert_allclose(shares(top_p=0.4), [1, 0, 0, 0], atol=0.015)
    squared = np.array([16, 9, 4, 1]) / 30
    np.testing.assert_allclose(shares(temperature=0.5), squared, atol=0.015)
    np.testing.assert_array_equal(shares(temperature=0), [1, 0, 0, 0])


@pytest.fixture
def kept(monkeypatch):
    """Of one row of logits: the ids among which a token is drawn."""

    def of(logits, **how):
        seen = []
        monkeypatch.setattr(jax.random, "categorical", lambda key, logits, axis: seen.append(logits))
        sample(jax.random.key(0), jnp.asarray(logits)[None], **how)
        return np.flatnonzero(np.isfinite(seen[0][0])).tolist()

    return of


def test_of_equal_logits_the_first_are_taken(kept):
    for how, num in ({"top_k": 3}, 3), ({"top_p": 0.1}, 1), ({"top_p": 0.5}, 4), ({"top_p": 0.51}, 5):
        assert kept(np.zeros(8), **how) == list(range(num))
    assert kept([0, 2, 2, 1, 2], top_k=2) == [1, 2]
    assert kept([0, 2, 1, 1, 1], top_k=3, top_p=0.8) == [1, 2, 3]  # e²/(e² + 2e) = 0.58, with another 0.79


def test_top_p_takes_the_fewest_tokens_of_a_large_vocabulary(kept):
    logits = 4 * np.random.default_rng(0).normal(size=50_257).astype(np.float32)
    order = np.argsort(-logits, kind="stable")
    probability = np.exp(logits[order].astype(np.float64))
    reached = np.cumsum(probability / probability.sum())
    for top_p in (0.3, 0.9, 0.99):
        assert kept(logits, top_p=top_p) == sorted(order[: np.searchsorted(reached, top_p) + 1])
    assert len(kept(logits, top_p=1.0)) == len(logits)


@pytest.mark.parametrize(
    ("prompt", "num_tokens", "kwargs", "message"),
    [
        (PROMPT, 30, {}, "33 tokens, prompt included: the model's λ, mlp_softplus, has levels for 32"),
        (PROMPT, 10, {"max_length": 12}, "num_tokens=10 after a prompt of 3: .* max_length=12"),
        (PROMPT, True, {}, "num_tokens must be a whole number from 1 to .*, got True"),
        (PROMPT, 1, {"stop_token": [3, 23]}, "stop_token must be a whole number from 0 to 22, got 23"),
        (PROMPT, 1, {"temperature": math.nan}, "temperature must be 0, or a number from .* on, got nan"),
        (PROMPT, 1, {"top_p": 0.0}, "top_p must be a number above 0 and at most 1, got 0.0"),
        (PROMPT, 1, {"num_ids": 24}, "num_ids must be a whole number from 1 to 23, got 24"),
        (PROMPT, 1, {"num_ids": 5, "top_k": 6}, "top_k must be a whole number from 1 to 5, got 6"),
        ([[1, 2], []], 1, {}, r"prompt has a sequence of shape \(0,\) .*: expected token ids \[T\], at least one"),
        ([[1, 2], [3.5]], 1, {}, r"prompt has a sequence of shape \(1,\) and dtype float64: expected token ids"),
        ([[[1, 2], [3]]], 1, {}, r"^prompt\[0\] is not a flat list of numbers, got \[\[1, 2\], \[3\]\]: expected the"),
        ([[1, 2], [3, [4]]], 1, {}, r"^prompt\[1\] is not a flat list of numbers, got \[3, \[4\]\]: expected the"),
        ([[[[1], [2, 3]]], [[4]]], 1, {}, r"^prompt\[0\] is not a flat list of numbers, got .*: expected the"),
        (jnp.asarray(PROMPT) - 1, 1, {}, "prompt has ids -1 to 6: expected 0 to 22"),
    ],
)
def test_what_cannot_be_generated_is_named(params, prompt, num_tokens, kwargs, message):
    with pytest.raises(ValueError, match=message):
        generate(MODEL, params, prompt, num_tokens, **kwargs)

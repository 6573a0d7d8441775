"""Segment ids on their way from packed documents into the losses of a model, and a run that goes on within an epoch."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.books import get_config
from loglinear_jax.config import ConfigError, check_config, default_config
from loglinear_jax.losses import token_losses
from loglinear_jax.models import OwnModel, OwnSettings
from loglinear_jax.modules.positions import at_positions
from loglinear_jax.runs import run
from loglinear_jax.runs.folders import read_lines
from loglinear_jax.tasks import load_task
from loglinear_jax.train import ManySeeds, SeedTrainer, TrainSettings, measure_test, open_data


class CountsDocuments(nn.Module):
    """Its loss at a position is a parameter, 1, times the number of the document, as segment_ids have it."""

    @nn.compact
    def token_losses(self, tokens, targets, positions=slice(None), segment_ids=None):
        losses = self.param("scale", nn.initializers.ones, ()) * segment_ids * (targets >= 0)
        return at_positions(losses, positions), jnp.zeros_like(at_positions(targets, positions), bool)

    def summed_loss(self, tokens, targets, positions=slice(None), segment_ids=None):
        return jnp.sum(self.token_losses(tokens, targets, positions, segment_ids)[0])

    def __call__(self, tokens):
        return self.token_losses(tokens, tokens, segment_ids=tokens)


SETTINGS = TrainSettings(
    num_seeds=2, batch_size=4, learning_rate=1e-9, grad_clip=None, grad_accumulation=2, eval_batch_size=3, stop_at=None
)


@pytest.fixture
def task(tmp_path):
    for split, count in (("train", 30), ("valid", 20), ("test", 20)):
        rows = [json.dumps({"text": "heron" * (index % 5 + 1)}) + "\n" for index in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("".join(rows), encoding="utf-8")
    return load_task("documents", corpus=str(tmp_path), tokenizer="bytes", cache=str(tmp_path / "cache"), seq_len=16)


def expected(targets, segments):
    return (segments * (targets >= 0)).sum() / (targets >= 0).sum()


def test_segment_ids_come_with_the_batches_of_training_validation_and_test(task):
    seeds = ManySeeds(SeedTrainer(CountsDocuments(), task, SETTINGS), SETTINGS.seeds)
    data = open_data(seeds, 0)
    size, batches = next(data.dispatches([3]))
    tokens, targets, segments = (np.asarray(x) for x in batches["batches"])
    assert tokens.shape == (2, 3, 4, 16) and segments.max() > 1 and size == 3
    state = seeds.train_steps(seeds.init(seeds.seeds), batches, 3)
    for seed in range(2):
        mean = sum(expected(targets[seed, step], segments[seed, step]) for step in range(3))
        np.testing.assert_allclose(state.loss_sum[seed], mean, rtol=1e-5)
    for split, measured in (
        ("test", measure_test(seeds, state.params)["test_loss"]),
        ("validation", seeds.evaluate_and_record(state, data.validation)[1]),
    ):
        _, targets, segments = task.windows(split)
        np.testing.assert_allclose(measured, expected(targets, segments), rtol=1e-5)


def test_a_new_reader_goes_on_from_the_state_after_a_dispatch(task):
    seeds = ManySeeds(SeedTrainer(CountsDocuments(), task, SETTINGS), SETTINGS.seeds)
    data = open_data(seeds, 0)
    dispatches = data.dispatches([3, 2, 4, 1])
    next(dispatches), next(dispatches)
    state = json.loads(json.dumps(data.state))
    expected = next(dispatches)[1]
    for given in (state, None):
        again = next(open_data(seeds, 5, given).dispatches([4]))[1]
        assert jax.tree.all(jax.tree.map(np.array_equal, again, expected))


def test_documents_that_see_each_other_have_no_segment_ids(task, tmp_path):
    settings = {name: getattr(task, name) for name in ("corpus", "tokenizer", "cache", "seq_len")}
    joined = load_task("documents", **settings, cross_documents=True)
    for ours, other in zip(joined.windows("test"), task.windows("test"), strict=False):
        np.testing.assert_array_equal(ours, other)
    assert len(joined.windows("test")) == 2
    seeds = ManySeeds(SeedTrainer(CountsDocuments(), joined, SETTINGS), SETTINGS.seeds)
    assert len(next(open_data(seeds, 0).dispatches([1]))[1]["batches"]) == 2


def test_inspected_windows_hold_one_document_alone(task):
    tokens, targets = task.inspection_sequences(2)
    end = task.data.manifest["end_token"]
    assert (task.windows("validation")[0][:, 1:] == end).any()  # some hold several
    assert tokens.shape == (2, 16) and (tokens[:, 1:] == targets[:, :-1]).all() and (tokens[:, 1:] != end).all()
    with pytest.raises(ValueError, match="seq_len=64: no document of the validation split has so many tokens"):
        task.inspection_sequences(1, 64)


class Plain(nn.Module):
    vocab_size: int

    @nn.compact
    def __call__(self, tokens):
        return nn.Embed(self.vocab_size, self.vocab_size)(tokens)


class Aware(nn.Module):
    """Its logits are larger in later documents."""

    vocab_size: int

    @nn.compact
    def __call__(self, tokens, segment_ids=None):
        scale = 1 if segment_ids is None else segment_ids[..., None]
        return scale * nn.Embed(self.vocab_size, self.vocab_size)(tokens)


def test_a_model_that_can_not_keep_documents_apart_is_refused():
    for kind in ("recall", f"{__name__}:Plain", "language", f"{__name__}:Aware"):
        config = default_config(kind, "documents")
        config.task.seq_len = 16
        if kind == f"{__name__}:Plain":
            with pytest.raises(
                ConfigError, match="cross_documents=False: model.kind=.* takes no segment_ids, and can't"
            ):
                check_config(config)
            config.task.cross_documents = True
        check_config(config)


def test_a_model_of_ones_own_gets_the_segment_ids():
    model = OwnModel(OwnSettings(vocab_size=8, max_length=4, kind=f"{__name__}:Aware"))
    tokens, targets, segments = jnp.array([[1, 2, 3, 4]]), jnp.array([[2, 3, 4, -1]]), jnp.array([[1, 1, 2, 2]])
    params = model.init(jax.random.key(0), tokens)
    logits = model.apply(params, tokens) * segments[..., None]
    expected = jnp.sum(token_losses(logits, targets)[0])
    for method in ("summed_loss", "token_losses"):
        found = model.apply(params, tokens, targets, segment_ids=segments, method=method)
        np.testing.assert_allclose(found if method == "summed_loss" else jnp.sum(found[0]), expected, rtol=1e-6)


@pytest.mark.slow
def test_a_run_that_goes_on_reads_the_next_batches(tmp_path):
    """Runs of 12 steps: at once, 6 first, and 6 by a process that is killed before it writes where the reading stands."""

    def curve(name, *num_steps, killed=False):
        for steps in num_steps:
            for checkpoint in (tmp_path / name).glob("*/checkpoints/*") if killed else ():
                (checkpoint / "data.json").unlink()
                (checkpoint / "SHA256SUMS").unlink()
            config = get_config("smoke")
            config.task.update(seq_len=32, packing="first_fit", cache=str(tmp_path / "cache"))
            config.model.update(hidden=16, layers=1, head_dim=8, key_dim=8, max_length=32)
            config.train.update(num_steps=steps, eval_every=3, checkpoint_every=3, steps_per_dispatch=2, num_seeds=2)
            config.train.update(schedule="constant", warmup_steps=0)
            run(config, tmp_path / name)
        records = read_lines(tmp_path / name / "mlp_softplus" / "metrics.jsonl")
        return np.array([[r["train_loss"], r["val_loss"]] for r in records])

    expected = curve("whole", 12)
    np.testing.assert_array_equal(curve("parts", 6, 12), expected)
    np.testing.assert_array_equal(curve("killed", 6, 12, killed=True), expected)
    checkpoint = tmp_path / "parts" / "mlp_softplus" / "checkpoints" / "12"
    assert json.loads((checkpoint / "data.json").read_text(encoding="utf-8")).keys() == {"0", "1"}
    assert "data.json" in (checkpoint / "SHA256SUMS").read_text(encoding="utf-8")

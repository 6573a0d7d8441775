"""Training over several devices: as on one, with the collectives that it should have and no other."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from loglinear_jax.config import ConfigError, default_config
from loglinear_jax.config.building import check_config
from loglinear_jax.layers import GatedDeltaNetBlock, LogLinearAttention, LogLinearMamba2Block
from loglinear_jax.mixers import TokenMixer
from loglinear_jax.models import LanguageModel, LanguageSettings
from loglinear_jax.runs.checkpoints import Checkpoints
from loglinear_jax.settings import SettingError
from loglinear_jax.tasks import Task
from loglinear_jax.train import ManySeeds, SeedTrainer, TrainSettings, device_mesh
from loglinear_jax.train.data import place_windows

CPUS = jax.devices("cpu")  # four virtual ones
VOCAB, LENGTH, BATCH = 72, 32, 8
MODEL = LanguageSettings(VOCAB, LENGTH, hidden=64, layers=1, head_dim=16, key_dim=16, dtype="float32", lam_hidden=8)
SETTINGS = TrainSettings(
    num_steps=50, batch_size=BATCH, learning_rate=1e-3, weight_decay=0.1, z_loss=1e-3, grad_clip=0.5, stream=True, stop_at=None,
    eval_batch_size=2,
)  # fmt: skip


def many_of(data=1, fsdp=1, sequence=1, settings=SETTINGS, seeds=(0,), devices=CPUS, **model):
    mesh = device_mesh(1, BATCH, devices[: data * fsdp * sequence], fsdp, sequence)
    assert tuple(mesh.shape.values()) == (1, data, fsdp, sequence)
    task = Task(LENGTH, VOCAB)  # its batches are given
    return ManySeeds(SeedTrainer(LanguageModel(dataclasses.replace(MODEL, **model)), task, settings), list(seeds), mesh)


def batches(steps, segmented=False, seeds=1):
    """Sequences in which each second token is that before, of which uneven parts are scored."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (seeds, steps, BATCH, LENGTH + 1), np.int32)
    tokens[..., 1::2] = tokens[..., :-1:2]
    scored = rng.random((seeds, steps, BATCH, LENGTH)) < np.linspace(0.1, 1, LENGTH)
    found = tokens[..., :-1], np.where(scored, tokens[..., 1:], -1)
    starts = rng.random((seeds, steps, BATCH, LENGTH)) < 0.1
    return (*found, np.cumsum(starts, axis=-1, dtype=np.int32)) if segmented else found


def trained(many, steps, dispatch, segmented=False):
    """(the losses of dispatches, the state after so many steps)"""
    state, sums = many.init(many.seeds), [np.zeros(len(many.numbers))]
    arrays = batches(steps, segmented, len(many.numbers))
    for first in range(0, steps, dispatch):
        given = many.place("batches", tuple(x[:, first : first + dispatch] for x in arrays))
        state = many.train_steps(state, {"batches": given}, dispatch)
        sums.append(np.array(state.loss_sum))
    return np.diff(sums, axis=0) / dispatch, state


@functools.cache
def on_one_device(steps, dispatch, segmented=False, seeds=(0,), **model):
    losses, state = trained(many_of(seeds=seeds, **model), steps, dispatch, segmented)
    return losses, jax.device_get(state)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [dict(fsdp=4), dict(data=2, sequence=2)], ids=str)
def test_many_steps_are_those_of_one_device(mesh):
    expected, _ = on_one_device(50, 10)
    losses, _ = trained(many_of(**mesh), 50, 10)
    assert losses[-1] < losses[0] - 0.2
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.slow
def test_a_few_steps_over_every_axis():
    """Documents in a pack go on from device to device, each of which has another number of scored tokens."""
    expected, _ = on_one_device(2, 2, segmented=True, layers=2, lam="content")
    losses, _ = trained(many_of(fsdp=2, sequence=2, layers=2, lam="content", remat="block"), 2, 2, segmented=True)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "segmented"),
    [
        (dict(mixer="log_linear_delta", lam="content_mlp"), False),
        (dict(mixer="gated_linear"), False),
        (dict(mixer="gated_delta"), True),
        (dict(mixer="softmax(window=11),softmax(qk_norm=True)", layers=2), True),
    ],
    ids=str,
)
def test_every_mixer(model, segmented):
    expected, _ = on_one_device(4, 4, segmented, **model)
    losses, _ = trained(many_of(fsdp=2, sequence=2, **model), 4, 4, segmented)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.slow
def test_seeds_that_are_mapped_and_accumulated_gradients():
    settings = dataclasses.replace(SETTINGS, grad_accumulation=2)
    expected, one = on_one_device(4, 2, seeds=(3, 5))
    losses, state = trained(many_of(fsdp=2, sequence=2, settings=settings, seeds=(3, 5)), 4, 2)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), state.params, one.params)


@pytest.mark.slow
def test_evaluation_and_what_it_records():
    arrays = tuple(x[0, 0, :7] for x in batches(1, segmented=True))  # no multiple of the devices
    found = []
    for mesh in ({}, dict(fsdp=2, sequence=2)):
        many = many_of(**mesh)
        state, windows = many.init(many.seeds), place_windows(many, arrays)
        by_position = many.sums_by_position(state.params, windows)
        state, loss, accuracy = many.evaluate_and_record(state, {"validation": (windows,)})
        found.append(jax.device_get((by_position, loss, accuracy, state.best_loss, state.best_params)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), *found)


@pytest.mark.slow
def test_a_checkpoint_goes_on_over_other_devices(tmp_path):
    _, state = trained(many_of(fsdp=4), 4, 2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, state)
    expected = None
    for mesh in ({}, dict(data=2, fsdp=2)):
        many = many_of(**mesh)
        restored = Checkpoints(tmp_path, read_only=True).restore_latest(many.abstract_state())
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), jax.device_get(state))
        given = many.place("batches", tuple(x[:, 4:6] for x in batches(6)))
        loss = np.array(many.train_steps(restored, {"batches": given}, 2).loss_sum)
        expected = loss if expected is None else expected
        np.testing.assert_allclose(loss, expected, rtol=1e-6)


# --- What lies where, and what is sent ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_large_parameters_and_their_moments_are_cut():
    many = many_of(fsdp=4)
    state = many.init(many.seeds)
    for tree in (state.params, state.best_params, state.opt_state[1][0].mu, state.opt_state[1][0].nu):
        kernel, table = tree["params"]["layer_0"]["up_proj"]["kernel"], tree["params"]["embed"]["embedding"]
        assert kernel.shape == (1, 64, 256) and kernel.addressable_shards[0].data.shape == (1, 64, 64)
        assert table.shape == (1, 72, 64) and table.addressable_shards[0].data.shape == (1, 18, 64)
        assert tree["params"]["norm"]["scale"].addressable_shards[0].data.shape == (1, 64)
    one_device = many_of()
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (state, one_device.init(one_device.seeds))))


NAMES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
COLLECTIVE = re.compile(rf"= \(?(.*?)\)? ({NAMES})(?:-start)?\(")


def lowered(many):
    """A step, as JAX gives it to XLA."""
    step = jax.jit(lambda state, data: many.train_steps(state, data, 1))
    return step.lower(many.abstract_state(), {"batches": many.place("batches", batches(1))})


def collectives(many):
    """The collectives of a step, each by its name with the sizes of all that it gives."""
    text = lowered(many).compile().as_text()
    found = {}
    for shapes, name in COLLECTIVE.findall(text):
        for dimensions in re.findall(r"\w\d+\[([\d,]*)\]", shapes):
            size = int(np.prod([int(x) for x in dimensions.split(",") if x]))
            found[name] = sorted([*found.get(name, []), size])
    return found


@pytest.mark.slow
def test_what_is_sent_of_sequences():
    """For each layer one all-gather, of a state for each head and how much is left of it, and for the gradient one
    reduce-scatter; and what the convolution reads of the piece before. Of the rest sums alone: gradients and the loss."""
    many = many_of(sequence=4)
    sent, heads = collectives(many), 4
    states = 4 * BATCH * heads * (16 * 16 + 1)
    assert sent.pop("all-gather") == [states] and sent.pop("reduce-scatter") == [states // 4]
    in_window = BATCH * 3 * (heads * 16 + 2 * 16)
    assert sent.pop("collective-permute") == [in_window] * 2
    params = sorted(x.size for x in jax.tree.leaves(many.abstract_state().params))
    assert list(sent) == ["all-reduce"]
    assert sent["all-reduce"] == sorted([1, 1, *params])


@pytest.mark.slow
def test_what_is_sent_of_parameters():
    """Each large one is put together forward, and once more backward where remat computes its layer again."""
    many = many_of(fsdp=4)
    sent, shapes = collectives(many), many.abstract_state().params["params"]
    sizes = [x.size for x in jax.tree.leaves(shapes)]
    large = sorted(size for size in sizes if size >= 4096)
    assert large[:2] == [64 * 64, 64 * VOCAB] and len(large) == 7
    assert sent.pop("all-gather") == large
    assert sent.pop("reduce-scatter") == [size // 4 for size in large]
    assert list(sent) == ["all-reduce"]  # of small gradients, the loss, how many tokens are scored, and the norm
    assert sent["all-reduce"] == sorted([1] * 3 + [size for size in sizes if size < 4096])

    again = lowered(many_of(fsdp=4, remat="block")).as_text()
    assert again.count("stablehlo.all_gather") == 2 * 5 + 2


@pytest.mark.slow
def test_parameters_that_are_rounded_where_they_are_read_are_sent_so(monkeypatch):
    """The convolution's, which a kernel reads in float32, are not, and no gradient is."""
    model = dict(dtype="bfloat16", conv_width=8, key_dim=256, layers=2)
    text = lowered(many_of(fsdp=4, **model)).as_text()
    ends = r'".*?-> tensor<[\dx]*x(\w+)>'
    gathered, summed = (re.findall(name + ends, text, re.S) for name in ("all_gather", "reduce_scatter"))
    assert sorted(gathered) == 12 * ["bf16"] + 2 * ["f32"] and summed == 14 * ["f32"]
    found, _ = trained(many_of(fsdp=4, **model), 4, 2)
    monkeypatch.setattr(LanguageModel, "ROUNDED", None)
    expected, _ = trained(many_of(fsdp=4, **model), 4, 2)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer",
    [
        LogLinearAttention(12, heads=2, lam="content_mlp", conv_width=3, max_length=32),
        LogLinearAttention(12, heads=2, mixer="softmax", max_length=32),
        LogLinearMamba2Block(12, heads=2, key_groups=1, max_length=32),
        GatedDeltaNetBlock(12, heads=2, mixer="log_linear_delta", max_length=32),
    ],
    ids=lambda layer: f"{type(layer).__name__}-{layer.mixer}",
)
def test_a_layer_of_pieces_is_the_layer(layer):
    """Outputs and gradients, with documents that begin in other pieces than they end."""
    with jax.enable_x64(True):
        layer = layer.clone(dtype=jnp.float64, param_dtype=jnp.float64)
        cut = layer.clone(axis_name="sequence")
        x = jax.random.normal(jax.random.key(0), (2, 32, 12), jnp.float64)
        segments = jnp.stack([jnp.arange(32) // 13, jnp.arange(32) // 31])
        params = cut.init(jax.random.key(1), x)  # outside of shard_map
        mesh = jax.sharding.Mesh(np.array(CPUS).reshape(4), "sequence")
        pieces = PartitionSpec(None, "sequence")
        apply = jax.shard_map(
            lambda params, x, segments: cut.apply(params, x, segment_ids=segments),
            mesh=mesh, in_specs=(PartitionSpec(), pieces, pieces), out_specs=pieces,
            # JAX 0.12.0's gradient of erfc does not pass the check.
            check_vma=jax.__version_info__ < (0, 12),
        )  # fmt: skip

        def both(function):
            out, pull = jax.vjp(lambda params, x: function(params, x, segments), params, x)
            return out, pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

        found = jax.jit(lambda: both(apply))()
        expected = jax.jit(lambda: both(lambda params, x, segments: layer.apply(params, x, segment_ids=segments)))()
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert np.abs(x - y).max() <= 1e-10 * max(np.abs(y).max(), 1)


# --- What is refused --------------------------------------------------------------------------------------------------


class Mean(TokenMixer):
    def mix(self, q, k, v, *, cache, max_length, segment_ids=None):
        return jnp.cumsum(v, axis=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sequence_devices": 0}, "train.sequence_devices must be at least 1"),
        ({"sequence_devices": 3}, "sequence_devices=3 must cut task.seq_len=64 into pieces of a power of two"),
        ({"sequence_devices": 32}, "at least model.conv_width=4 tokens"),
        ({"sequence_devices": 2, "mixer": f"{__name__}:Mean"}, "must be 1 with model.mixer=.*Mean, which takes no pieces"),
        ({"task": "mqar", "fsdp_devices": 2}, "train.fsdp_devices=2 is for texts: expected 1"),
    ],
)  # fmt: skip
def test_impossible_settings(settings, message):
    task = settings.pop("task", "text")
    config = default_config("language" if task == "text" else "recall", task)
    config.task.seq_len = 64
    config.model.mixer = settings.pop("mixer", "log_linear")
    config.train.update(settings)
    with pytest.raises(ConfigError, match=message):
        check_config(config)


def test_too_few_devices_and_sequences():
    with pytest.raises(SettingError, match="fsdp_devices=3 times .*sequence_devices=2 must be at most .* devices, 4"):
        device_mesh(1, 6, CPUS, fsdp=3, sequence=2)
    with pytest.raises(SettingError, match="train.fsdp_devices=4 must divide the sequences of a batch, 6"):
        device_mesh(1, 6, CPUS, fsdp=4)


def test_a_layer_refuses_what_does_not_go_with_pieces():
    x = jnp.ones((1, 8, 4))
    own = LogLinearAttention(4, heads=1, mixer=f"{__name__}:Mean", axis_name="sequence")
    with pytest.raises(ValueError, match="axis_name is 'sequence': expected None with mixer=.*Mean'"):
        own.init(jax.random.key(0), x)
    layer = LogLinearAttention(4, heads=1, axis_name="sequence")
    params = layer.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="cache or max_length is given: expected None with axis_name = 'sequence'"):
        layer.apply(params, x, max_length=16)

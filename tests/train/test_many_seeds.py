"""Many seeds in one program: the same as alone, sharded, frozen where they diverge, stopped where they converge."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from loglinear_jax.fenwick import occupied_levels
from loglinear_jax.models import RecallModel, RecallSettings
from loglinear_jax.tasks import load_task
from loglinear_jax.train import (
    PRECISIONS,
    ManySeeds,
    SeedTrainer,
    TrainSettings,
    device_mesh,
    make_optimizer,
    mean_loss,
    measure_test,
    scored_sums,
)
from loglinear_jax.train.meshes import AXES
from loglinear_jax.train.seed_trainer import means

TASK = load_task("mqar", seq_len=16, vocab_size=16, num_pairs=2)
MODEL = RecallModel(
    RecallSettings(vocab_size=16, max_length=16, hidden=16, head_dim=8, key_dim=8, layers=1, implementation="parallel")
)
CPUS = jax.devices("cpu")  # four virtual ones, also beside a GPU
SETTINGS = TrainSettings(
    num_steps=6, batch_size=8, num_train=50, num_validation=30, num_test=30, eval_batch_size=20, stop_at=None
)


@functools.cache  # whose functions are compiled once
def many_seeds(seeds, settings, devices, loss):
    return ManySeeds(SeedTrainer(MODEL, TASK, settings, loss), seeds, device_mesh(len(seeds), devices=devices))


def train(seeds, settings=SETTINGS, devices=None, loss=None, periods=(2, 2)):
    """periods: of two steps each, so that few programs are compiled."""
    many = many_seeds(tuple(seeds), settings, tuple(devices or jax.devices()[:1]), loss)
    state, data = many.init(many.seeds), many.data()
    losses, accuracies = [], []
    for num_steps in periods:
        state = many.train_steps(state, data, num_steps)
        losses.append(np.array(state.loss_sum))  # a copy: the state is donated next
        state, _, accuracy = many.evaluate_and_record(state, data)
        accuracies.append(np.asarray(accuracy))
    return jax.device_get(state), np.array(losses), np.array(accuracies), jax.device_get(data)


def assert_equal_trees(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_seed_of_many_is_the_seed_alone(stream):
    settings = dataclasses.replace(SETTINGS, stream=stream)
    state, losses, accuracies, data = train([3, 4], settings)
    for index, seed in enumerate([3, 4]):
        alone, loss, accuracy, alone_data = train([seed], settings)
        np.testing.assert_array_equal(data["validation"][0][0][index], alone_data["validation"][0][0][0])
        np.testing.assert_allclose(losses[:, index], loss[:, 0], rtol=1e-5)
        np.testing.assert_allclose(accuracies[:, index], accuracy[:, 0], atol=1e-6)
        ours, theirs = (jax.tree.map(lambda x: x[row], of.params) for of, row in ((state, index), (alone, 0)))
        assert_equal_trees(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_logits_where_the_task_scores_are_enough():
    scored, losses, accuracies, data = train([0, 1])
    everywhere, expected, *_ = train([0, 1], loss=mean_loss)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_equal_trees(scored.params, everywhere.params, rtol=1e-3, atol=1e-5)
    params = jax.tree.map(lambda x: x[1], scored.params)
    batch = jax.tree.map(lambda x: x[1], data["validation"][0])
    _, right, count = jax.jit(scored_sums, static_argnums=0)(MODEL, params, batch)
    assert accuracies[-1][1] == pytest.approx(float(right / count), abs=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_training_again_gives_the_same_bits(implementation):
    settings = dataclasses.replace(MODEL.settings, implementation=implementation, head_dim=16, key_dim=16)
    many = ManySeeds(
        SeedTrainer(RecallModel(settings), TASK, SETTINGS), range(4), device_mesh(4, devices=jax.devices()[:1])
    )
    data = many.data()
    once, again = (jax.device_get(many.train_steps(many.init(many.seeds), data, 6).params) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, once, again)


def test_seeds_differ_in_everything():
    state, losses, _, data = train([0, 1])
    for purpose in ("train", "validation"):
        assert (data[purpose][0][0][0] != data[purpose][0][0][1]).any()
    assert (data["train"][0][0][0, :30] != data["validation"][0][0][0]).any()
    assert losses[0, 0] != losses[0, 1]
    assert np.abs(np.diff(state.params["params"]["embed"]["embedding"], axis=0)).max() > 0


def measured_on_tests(state, devices):
    """(loss, accuracy) [seeds] of the seeds from 0 on."""
    many = many_seeds(tuple(range(len(state.seed))), SETTINGS, tuple(devices), None)
    return np.array(many.test(jax.device_put(state.best_params, many.sharding)))


def test_the_test_is_on_sequences_of_its_own():
    """Drawn here by their key, and scored from the logits."""
    state, _, _, data = train([0, 1])
    found = measured_on_tests(state, CPUS[:1])[..., 0]
    for seed in range(2):
        key = jax.random.fold_in(jax.random.key(seed), 4)
        tokens, targets = jax.jit(TASK.sample, static_argnums=1)(key, SETTINGS.num_test)
        logits = jax.jit(MODEL.apply)(jax.tree.map(lambda x: x[seed], state.best_params), tokens)
        scored = np.asarray(targets) >= 0
        chosen = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), np.asarray(targets)[..., None], axis=-1)
        right = np.asarray(logits).argmax(-1) == targets
        np.testing.assert_allclose(found[:, seed], [-chosen[scored].mean(), right[scored].mean()], rtol=1e-5)
        seen = {row.tobytes() for name in ("train", "validation") for row in data[name][0][0][seed]}
        assert not seen & {row.tobytes() for row in np.asarray(tokens)}


def test_validation_and_test_are_what_the_task_is_evaluated_on():
    class EvaluatedOnOnes(type(TASK)):
        def sample_evaluation(self, key, num):
            tokens, targets = self.sample(key, num)
            return jnp.ones_like(tokens), targets

    task = EvaluatedOnOnes(seq_len=16, vocab_size=16, num_pairs=2)
    trainer, usual = SeedTrainer(MODEL, task, SETTINGS), SeedTrainer(MODEL, TASK, SETTINGS)
    seed = jnp.int32(3)
    ours, theirs = jax.jit(trainer.data)(seed), jax.jit(usual.data)(seed)
    assert (ours["validation"][0][0] == 1).all()
    np.testing.assert_array_equal(ours["train"][0][0], theirs["train"][0][0])
    [[(tokens, _)]] = jax.jit(trainer.test_data)(seed)
    assert (tokens == 1).all()


@pytest.mark.slow
def test_four_devices_give_what_one_gives():
    one, losses_one, accuracies_one, _ = train([0, 1, 2, 3], devices=CPUS[:1])
    four, losses_four, accuracies_four, _ = train([0, 1, 2, 3], devices=CPUS)
    tests = [measured_on_tests(one, devices) for devices in (CPUS[:1], CPUS)]
    np.testing.assert_allclose(*tests, rtol=1e-5)
    np.testing.assert_allclose(losses_four, losses_one, rtol=1e-5)
    np.testing.assert_allclose(accuracies_four, accuracies_one, atol=1e-6)
    assert_equal_trees(four.params, one.params, rtol=1e-3, atol=1e-5)
    many = many_seeds(tuple(range(4)), SETTINGS, tuple(CPUS), None)
    leaf = jax.tree.leaves(many.init(many.seeds).params)[0]
    assert len(leaf.sharding.device_set) == 4 and leaf.addressable_shards[0].data.shape[0] == 1
    assert device_mesh(6, devices=CPUS).size == 3 and device_mesh(5, devices=CPUS).size == 1


@pytest.mark.parametrize("what", ["loss", pytest.param("gradient", marks=pytest.mark.slow)])
def test_a_seed_that_diverges_is_frozen_and_the_others_go_on(what):
    """One seed's loss becomes nan from its third batch on, or its gradient does while the loss stays finite."""
    before, _, _, data = train([0, 1, 2], periods=(2,))
    healthy, *_ = train([0, 1, 2], periods=(2, 2, 2))
    sequences = data["train"][0][0][1]
    rows = jax.random.randint(jax.random.fold_in(jax.random.fold_in(jax.random.key(1), 3), 2), (8,), 0, 50)
    third_batch = jnp.asarray(sequences[np.asarray(rows)])

    @jax.custom_vjp
    def scale_gradient(x, factor):
        return x

    scale_gradient.defvjp(lambda x, factor: (x, factor), lambda factor, grad: (grad * factor, jnp.zeros_like(factor)))

    def loss(model, params, batch):
        poison = jnp.where(jnp.all(batch[0] == third_batch), jnp.nan, 1.0)
        value = mean_loss(model, params, batch)
        return value * poison if what == "loss" else scale_gradient(value, poison)

    state, losses, _, _ = train([0, 1, 2], loss=loss, periods=(2, 2, 2))
    np.testing.assert_array_equal(state.diverged_step, [-1, 2, -1])
    np.testing.assert_array_equal(state.step, [6, 6, 6])
    for index in range(3):
        pick = lambda tree: jax.tree.map(lambda x: x[index], tree)  # noqa: E731
        expected = before if index == 1 else healthy
        assert_equal_trees(pick(state.params), pick(expected.params), rtol=1e-4, atol=1e-6)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(pick(state.opt_state)))


def test_a_seed_that_diverges_at_once_is_scored_as_it_started():
    state, _, accuracies, _ = train([0, 1], loss=lambda *args: mean_loss(*args) * jnp.nan)
    np.testing.assert_array_equal(state.diverged_step, [0, 0])
    np.testing.assert_array_equal(state.best_accuracy, accuracies[0])
    fresh, *_ = train([0, 1], periods=())
    assert_equal_trees(state.best_params, fresh.params)


@pytest.mark.slow
def test_early_stopping_and_the_records_of_a_seed():
    """With a bar that one seed passes at its first evaluation, that seed stops there; another goes on."""
    _, _, accuracies, _ = train([0, 1, 2, 3], periods=(2, 2, 2))
    bar = float(np.sort(accuracies[0])[-1])
    state, _, again, _ = train([0, 1, 2, 3], dataclasses.replace(SETTINGS, stop_at=bar), periods=(2, 2, 2))
    first = accuracies[0] >= bar
    np.testing.assert_array_equal(state.stopped[first], True)
    np.testing.assert_array_equal(state.best_step[first], 2)
    np.testing.assert_allclose(again[1][first], accuracies[0][first])  # its parameters no longer move
    for index in np.flatnonzero(~first):
        seen = accuracies[:, index]
        stop = np.argmax(seen >= bar) + 1 if (seen >= bar).any() else 3
        assert state.best_accuracy[index] == pytest.approx(seen[:stop].max())
        assert state.best_step[index] == 2 * (np.argmax(seen[:stop]) + 1)
    np.testing.assert_array_equal(state.solved_step, -1)


@pytest.mark.slow
def test_steps_of_active_seeds_alone_are_the_same():
    """On two devices, of which one has more of them."""
    many = many_seeds(tuple(range(8)), SETTINGS, tuple(CPUS[:2]), None)
    active = np.isin(np.arange(8), [1, 4, 5])
    ends = []
    for rows in (None, many.rows_to_train(active)):
        state, data = many.init(many.seeds), many.data()
        state = state.replace(stopped=jax.device_put(~active, many.sharding))
        start = jax.device_get(state.params)
        state, _, accuracy = many.evaluate_and_record(many.train_steps(state, data, 2, rows), data)
        ends.append(jax.device_get((many.train_steps(state, data, 2, rows), accuracy)))
    (every, accuracy), (some, some_accuracy) = ends
    np.testing.assert_array_equal(some.step, 4)
    assert_equal_trees(some.params, every.params, rtol=1e-3, atol=1e-5)
    assert_equal_trees(*(jax.tree.map(lambda x: x[~active], tree) for tree in (some.params, start)), rtol=0)
    np.testing.assert_allclose(some_accuracy, accuracy, atol=1e-6)
    np.testing.assert_allclose(some.loss_sum, every.loss_sum, rtol=1e-5)
    np.testing.assert_array_equal(np.isfinite(some.loss_sum), active)


@given(st.integers(0, 2), st.data())
def test_rows_to_train_hold_all_active_seeds(log_devices, data):
    devices = 1 << log_devices
    active = data.draw(arrays(bool, (devices, 9)))
    rows = many_seeds(tuple(range(9 * devices)), SETTINGS, tuple(CPUS[:devices]), None).rows_to_train(
        active.reshape(-1)
    )
    if rows is None:
        assert active.sum(1).max() > 5
        return
    rows = np.asarray(rows).reshape(devices, -1)
    assert rows.shape[1] == next(size for size in (2, 3, 5) if size >= active.sum(1).max())
    for of_device, chosen in zip(active, rows, strict=True):
        assert len(set(chosen)) == len(chosen) and set(np.flatnonzero(of_device)) <= set(chosen)


def test_best_parameters_are_those_of_the_best_evaluation():
    periods = (2,) * 4
    state, _, accuracies, data = train([0, 1, 2], dataclasses.replace(SETTINGS, learning_rate=0.05), periods=periods)
    sums = jax.jit(SeedTrainer(MODEL, TASK, SETTINGS).sums_of_parts)
    for index in range(3):
        params = jax.tree.map(lambda x: x[index], state.best_params)
        validation = jax.tree.map(lambda x: x[index], data["validation"])
        _, [accuracy] = means(*sums(params, validation))
        assert accuracy == pytest.approx(accuracies[:, index].max(), abs=1e-6) == state.best_accuracy[index]


def test_gradient_clipping_is_by_global_norm():
    params = {"w": jnp.array([3.0, 4.0])}
    grads = {"w": jnp.array([30.0, 40.0])}
    for clip, norm in ((1.0, 1.0), (None, 50.0)):
        trainer = SeedTrainer(MODEL, TASK, dataclasses.replace(SETTINGS, grad_clip=clip))
        _, opt_state = trainer.optimizer.update(grads, trainer.optimizer.init(params), params)
        first_moment = jax.tree.leaves(opt_state[1][0].mu)[0]
        assert np.linalg.norm(first_moment) == pytest.approx(0.1 * norm, rel=1e-5)


@pytest.mark.slow
def test_gradients_in_lower_precision_are_close():
    """Of a model whose weights are large enough for every part of it to matter."""

    def gradient(precision):
        model = RecallModel(dataclasses.replace(MODEL.settings, dtype=precision, weight_std=0.3, embed_std=1.0))
        params = model.init(jax.random.key(0), jnp.zeros((1, TASK.seq_len), jnp.int32))
        with jax.default_matmul_precision(PRECISIONS[precision]):
            return jax.jit(jax.grad(lambda p: mean_loss(model, p, TASK.sample(jax.random.key(1), 8))))(params)

    exact, lower = gradient("float32"), gradient("bfloat16")
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, lower, exact)) / optax.tree.norm(exact)
    assert 1e-4 < difference < 5e-2  # it is another arithmetic


@pytest.mark.slow
def test_a_replica_is_the_seed_at_its_rates_alone():
    """With all that follows from a rate: its schedule, and the decay that AdamW multiplies by it."""
    settings = dataclasses.replace(SETTINGS, schedule="cosine", warmup_steps=1, weight_decay=0.1, decay_all=True)
    rates = [(0.01, settings.weight_decay), (0.001, 10 * settings.weight_decay)]
    mesh = device_mesh(4, devices=jax.devices()[:1])
    many = ManySeeds(SeedTrainer(MODEL, TASK, settings), [0, 1] * 2, mesh, rates=[rate for rate in rates for _ in "01"])
    data = many.data()
    state = many.train_steps(many.init(many.seeds), data, 2)
    state = many.train_steps(state, data, 2, jax.device_put(np.arange(3, dtype=np.int32), many.sharding))
    state, losses, _ = many.evaluate_and_record(state, data)
    for index, (learning_rate, weight_decay) in enumerate(rates):
        own = dataclasses.replace(settings, learning_rate=learning_rate, weight_decay=weight_decay)
        alone = ManySeeds(SeedTrainer(MODEL, TASK, own), [0, 1], device_mesh(2, devices=jax.devices()[:1]))
        data = alone.data()
        expected = alone.train_steps(alone.init(alone.seeds), data, 2)
        expected = alone.train_steps(expected, data, 2)
        expected, of_alone, _ = alone.evaluate_and_record(expected, data)
        rows = slice(2 * index, 2 * index + 2 - index)  # the last replica was left out at the end
        same = jax.tree.map(lambda x, rows=rows: x[rows], state.params)
        np.testing.assert_allclose(losses[rows], of_alone[: 2 - index], rtol=1e-5)
        of_alone = jax.tree.map(lambda x, count=2 - index: x[:count], expected.params)
        assert_equal_trees(same, of_alone, rtol=1e-3, atol=1e-5)


REPLICAS = [5, 3] * 2, [(0.01, 0.0)] * 2 + [(0.001, 0.0)] * 2


@pytest.mark.slow
def test_replicas_on_one_device_have_their_seeds_data_in_common():
    """Every one of them reads its own seed's: also where steps are computed for some alone, and where replicas are shared out
    over devices, which hold the data of each."""
    ends = {}
    for devices, some in ((1, [1, 2]), (2, [1, 0])):  # rows: counted on each device
        trainer = SeedTrainer(MODEL, TASK, SETTINGS)
        many = ManySeeds(trainer, REPLICAS[0], device_mesh(4, devices=CPUS[:devices]), rates=REPLICAS[1])
        held = [5, 3] if devices == 1 else REPLICAS[0]
        assert many.seeds_of_data == held
        data, data_of_seed = many.data(), jax.jit(many.trainer.data)
        for row, seed in enumerate(held):
            own = data_of_seed(jnp.int32(seed))
            jax.tree.map(lambda x, y, row=row: np.testing.assert_array_equal(x[row], y), data, own)
        assert {len(x) for x in jax.tree.leaves(data)} == {len(held)}
        for rows in None, jax.device_put(np.array(some, np.int32), many.sharding):
            state = many.train_steps(many.init(many.seeds), data, 2)
            state, losses, _ = many.evaluate_and_record(many.train_steps(state, data, 2, rows), data)
            ends[devices, rows is None] = jax.device_get((state.params, losses))
    every = ends.pop((1, True))
    assert_equal_trees(ends.pop((2, True)), every, rtol=1e-3, atol=1e-5)
    for some in ends.values():
        assert_equal_trees(*(jax.tree.map(lambda x: x[1:3], end) for end in (some, every)), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_replicas_have_the_batches_that_come_from_the_host_in_common():
    tokens = np.random.default_rng(0).integers(0, 16, (2, 2, 8, 17), np.int32)
    batches, windows = ((x[..., :-1], x[..., 1:]) for x in (tokens, tokens[:, 0]))
    mesh = jax.sharding.Mesh(np.array(CPUS[:2]).reshape(1, 2, 1, 1), AXES)
    results = []
    for seeds, rates in (REPLICAS, (REPLICAS[0][:2], REPLICAS[1][:2]), (REPLICAS[0][2:], REPLICAS[1][2:])):
        many = ManySeeds(SeedTrainer(MODEL, TASK, SETTINGS), seeds, mesh, rates=rates)
        state = many.train_steps(many.init(many.seeds), {"batches": many.place("batches", batches)}, 2)
        sums, _ = many.sums_by_position(state.params, many.place("validation", windows))
        results.append(jax.device_get((state.loss_sum, sums)))
    together, *alone = results
    assert_equal_trees(together, jax.tree.map(lambda *parts: np.concatenate(parts), *alone), rtol=1e-4)


MIXED = load_task("zoology_mqar", seq_len=12, vocab_size=16, num_pairs=2, mixture="8/1*2,12/2", tests="8/2,16/3")


def length_loss(model, params, batch):
    """1 for sequences of 12 tokens, 2 for those of 8; with gradients as usual."""
    return 24 / batch[0].shape[1] - 1 + 0 * mean_loss(model, params, batch)


@pytest.mark.slow
def test_a_step_of_a_mixture_trains_on_one_part_and_goes_on_exactly():
    many = ManySeeds(SeedTrainer(MODEL, MIXED, SETTINGS, length_loss), [0, 1], device_mesh(2, devices=CPUS[:1]))
    state, data = many.init(many.seeds), many.data()
    assert [x[0].shape for x in data["train"]] == [(2, 33, 8), (2, 17, 12)]
    seen = []
    for _ in range(6):
        before = np.array(state.loss_sum)
        state = many.train_steps(state, data, 1)
        seen.append(np.array(state.loss_sum) - before)
    expected = 2 - np.asarray(MIXED.trained_on.at(jnp.arange(6)))
    np.testing.assert_array_equal(seen, np.stack([expected] * 2, axis=1))
    assert sorted(expected[:3].tolist()) == [1, 2, 2]
    whole = many.train_steps(many.init(many.seeds), data, 6)
    assert_equal_trees(jax.device_get(whole.params), jax.device_get(state.params), rtol=1e-5, atol=1e-6)
    train = {"train": data["train"]}
    lowered = jax.jit(jax.vmap(functools.partial(many.trainer.train_steps, num_steps=2), in_axes=(0, 0, None)))
    assert "stablehlo.case" in lowered.lower(state, train, jnp.int32(0)).as_text()  # a choice, not both parts


@pytest.mark.parametrize("num_validation, num_test, traced", [(31, 47, 1), (2, 80, 2)])
@pytest.mark.slow
def test_what_validates_also_tests(num_validation, num_test, traced):
    """In as many pieces as it takes, the last of them not full; more than 32 are one instead. Replicas draw their seed's."""
    settings = dataclasses.replace(SETTINGS, num_train=20, num_validation=num_validation, num_test=num_test)
    trainer, traces = SeedTrainer(MODEL, MIXED, settings), []
    compute = trainer.sums_of_parts
    trainer.sums_of_parts = lambda *arguments: traces.append(1) or compute(*arguments)
    rates = [(1e-3, 0.0), (1e-3, 0.0), (1e-2, 0.0), (1e-2, 0.0)]
    many = ManySeeds(trainer, [3, 5, 3, 5], device_mesh(4, devices=CPUS[:1]), rates=rates)
    data = many.data()
    state, *evaluated = many.evaluate_and_record(many.train_steps(many.init(many.seeds), data, 2), data)
    alone = [jax.tree.map(lambda x: x[0], (state.params, batch)) for batch in data["validation"]]
    sums = [jax.jit(scored_sums, static_argnums=0)(MODEL, *params_and_batch) for params_and_batch in alone]
    of_parts = np.array([(loss / scored, right / scored) for loss, right, scored in sums])
    np.testing.assert_allclose([mean[0] for mean in evaluated], of_parts.mean(axis=0), rtol=1e-5)
    measured = measure_test(many, state.params)
    of_parts = np.array([measured["test_accuracy_of_parts"][part] for part in ("8/2", "16/3")])
    np.testing.assert_allclose(measured["test_accuracy"], of_parts.mean(axis=0))
    found = many.test(state.params)
    assert len(traces) == traced
    for row, seed in enumerate(many.numbers):
        key = jax.random.fold_in(jax.random.key(seed), 4)
        whole = MIXED.evaluated_on.draw(key, num_test, "sample_evaluation")
        params = jax.tree.map(lambda x, row=row: x[row], state.params)
        for ours, theirs in zip(found, means(*jax.jit(compute)(params, whole)), strict=True):
            np.testing.assert_allclose(ours[row], theirs, rtol=1e-5)
    assert len(set(found[0][:, 0])) == 4


def uneven(batch=8):
    """(tokens, targets) [1, 1, batch, 16] in whose first half nothing is scored, and in each later sequence another number."""
    tokens = np.random.default_rng(0).integers(0, 16, (1, 1, batch, 16), np.int32)
    counts = np.arange(batch) - batch // 2
    return tokens, np.where(np.arange(16) < counts[:, None], np.roll(tokens, 1, axis=-1), -1)


@pytest.mark.parametrize("devices, accumulation", [(1, 4), (2, 2)])
@pytest.mark.slow
def test_parts_of_a_batch_weigh_as_much_as_is_scored_in_them(devices, accumulation):
    batches = uneven()

    def step(devices, settings):
        mesh = jax.sharding.Mesh(np.array(CPUS[:devices]).reshape(1, devices, 1, 1), AXES)
        many = ManySeeds(SeedTrainer(MODEL, TASK, settings), [0], mesh)
        state = many.train_steps(many.init(many.seeds), {"batches": many.place("batches", batches)}, 1)
        return jax.device_get((state.loss_sum, state.opt_state[1][0].mu))  # Adam's mean is 0.1 of the gradient

    parts = step(devices, dataclasses.replace(SETTINGS, grad_accumulation=accumulation))
    assert_equal_trees(parts, step(1, SETTINGS), rtol=1e-4, atol=1e-8)


def test_a_batch_in_which_nothing_is_scored_leaves_the_seed_as_it_is():
    tokens, targets = uneven()
    many = many_seeds((0,), SETTINGS, tuple(CPUS[:1]), None)
    batches = {"batches": many.place("batches", (tokens, np.full_like(targets, -1)))}
    before = jax.device_get(many.init(many.seeds))
    after = jax.device_get(many.train_steps(many.init(many.seeds), batches, 1))
    assert after.diverged_step == [-1] and after.loss_sum == [0]
    assert_equal_trees(after.params, before.params, rtol=0)


@pytest.mark.parametrize("lam", ["mlp_softplus", "content"])
def test_weight_decay_reaches_matrices_but_not_lambda(lam):
    """Of a step whose gradients are 0, so that decay alone moves parameters."""
    model = RecallModel(dataclasses.replace(MODEL.settings, lam=lam, lam_head_slope=0.0 if lam == "content" else 1.0))
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 16), jnp.int32))["params"]
    optimizer = make_optimizer(dataclasses.replace(SETTINGS, weight_decay=0.1, learning_rate=0.5))
    gradients, state = jax.tree.map(jnp.zeros_like, params), jax.jit(optimizer.init)(params)
    updates, _ = jax.jit(optimizer.update)(gradients, state, params)
    paths = jax.tree_util.tree_leaves_with_path(updates)
    for (path, update), value in zip(paths, jax.tree.leaves(params), strict=True):
        path = jax.tree_util.keystr(path)
        decays = value.ndim >= 2 and "mixer" not in path  # which has decays, λ, and λ's slope over the heads
        np.testing.assert_allclose(update, -0.05 * value if decays else 0 * value, rtol=1e-5, err_msg=path)


@pytest.mark.slow
def test_a_seed_is_the_same_whatever_settings_jax_has():
    settings = dataclasses.replace(SETTINGS, stream=True)

    def three_seeds():
        many = ManySeeds(SeedTrainer(MODEL, TASK, settings), [0, 1, 2], device_mesh(3, devices=CPUS[:1]))
        state, data = many.init(many.seeds), many.data()
        state, loss, _ = many.evaluate_and_record(many.train_steps(state, data, 2), data)
        return jax.device_get((state, data, loss, many.test(state.params))), many.abstract_state()

    expected, abstract = three_seeds()
    with jax.default_prng_impl("rbg"), jax.threefry_partitionable(False), jax.enable_x64(True):
        found, also = three_seeds()
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert [x.dtype for x in jax.tree.leaves((found, also))] == [x.dtype for x in jax.tree.leaves((expected, abstract))]


def first_position_model(number, **settings):
    settings = {"max_length": 64, "random_first_position": number} | settings
    return RecallModel(dataclasses.replace(MODEL.settings, **settings))


@pytest.mark.parametrize(
    ("mixer", "lam"),
    [("log_linear", "fixed"), pytest.param("log_linear_delta", "content_mlp", marks=pytest.mark.slow)],
)
def test_random_first_positions_train_the_levels_that_no_sequence_from_0_reaches(mixer, lam):
    """Of 16 tokens from 0, the queries, which stand at even positions, read levels 0 and 2 to 4. Evaluation reads no others."""
    batch = jax.jit(TASK.sample, static_argnums=1)(jax.random.key(1), 32)
    usual, moved = (first_position_model(number, mixer=mixer, lam=lam) for number in (0, 48))
    params, others = (jax.jit(model.init)(jax.random.key(0), batch[0]) for model in (usual, moved))
    jax.tree.map(np.testing.assert_array_equal, params, others)
    sums = [jax.jit(scored_sums, static_argnums=0)(model, params, batch)[0] for model in (usual, moved)]
    np.testing.assert_array_equal(*sums)

    def of_levels(model, key):
        grads = jax.jit(jax.grad(lambda params: mean_loss(model, params, batch, position_key=key)))(params)
        of_lam = grads["params"]["layer_0"]["mixer"]["lam"]
        found = of_lam["bias"][0] if lam == "fixed" else of_lam["out_proj"]["bias"]
        return np.asarray(found) != 0

    for model, key in ((usual, jax.random.key(2)), (moved, None)):
        np.testing.assert_array_equal(of_levels(model, key), [True, False, True, True, True, False, False])
    assert of_levels(moved, jax.random.key(2)).all()


def test_all_layers_start_each_sequence_at_the_same_drawn_position():
    """Bucket scores are 0 where a token has no bucket, which tells its position."""
    model, tokens, key = first_position_model(40, lam="content", layers=2), jnp.ones((8, 16), int), jax.random.key(3)
    params = jax.jit(model.init)(jax.random.key(0), tokens)
    apply = jax.jit(functools.partial(model.apply, mutable="intermediates"))
    _, seen = apply(params, tokens, rngs={"first_position": key})
    first = np.asarray(jax.random.randint(key, (8,), 0, 40))
    expected = occupied_levels(first[:, None] + np.arange(16), 7, first[:, None])
    for layer in seen["intermediates"].values():
        np.testing.assert_array_equal(layer["mixer"]["bucket_scores"][0][:, :, 0] != 0, expected)

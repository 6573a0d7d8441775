"""MAD's tasks against their definitions, and beside samplers in plain NumPy."""

import numpy as np
import pytest
from scipy.stats import chi2_contingency, chisquare

from loglinear_jax.tasks import load_task
from tests.tasks.drawing import sample


def same_distribution(ours, theirs):
    """Whether two samples of small integers may come from one distribution; the rare ones count as one."""
    end = max(np.max(ours), np.max(theirs)) + 1
    counts = np.array([np.bincount(np.ravel(x), minlength=end) for x in (ours, theirs)])
    often = counts.sum(0) >= 20
    counts = np.column_stack([counts[:, often], counts[:, ~often].sum(1)])
    counts = counts[:, counts.any(0)]
    return counts.shape[1] == 1 or chi2_contingency(counts).pvalue > 1e-4


# --- In-context recall and noisy recall ------------------------------------------------------------------------------------


def numpy_recall(rng, num, seq_len, vocab, noise_vocab, frac_noise):
    """(tokens, targets), one sequence after another."""
    low = vocab - noise_vocab
    pairs = seq_len // 2 - 1
    all_tokens, all_targets = [], []
    for _ in range(num):
        tokens, targets, value_of, spared = [], [], {}, rng.integers(pairs)
        for pair in range(pairs):
            if pair != spared and rng.random() < frac_noise:
                tokens += rng.integers(low, vocab, 2).tolist()
                targets += [-1, -1]
                continue
            key, value = int(rng.integers(low // 2)), int(rng.integers(low // 2, low))
            targets += [value_of.get(key, -1), -1]
            tokens += [key, value_of.setdefault(key, value)]
        key = int(rng.choice(sorted(value_of)))
        all_tokens.append([*tokens, key, value_of[key]])
        all_targets.append([*targets, value_of[key], -1])
    return np.array(all_tokens), np.array(all_targets)


RECALL = [
    {},
    {"seq_len": 20, "vocab_size": 7},
    {"seq_len": 12, "vocab_size": 9, "noise_vocab_size": 3, "frac_noise": 0.9},
]


@pytest.mark.parametrize("settings", RECALL)
def test_a_key_that_was_there_before_is_answered_with_its_value(settings):
    task = load_task("mad_recall", **settings)
    tokens, targets = sample(task)
    low = task.vocab_size - task.noise_vocab_size
    for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
        value_of = {}
        for place in range(0, task.seq_len, 2):
            first, second = row[place : place + 2]
            assert target[place + 1] == -1
            if first >= low:
                assert low <= second < task.vocab_size and target[place] == -1 and place < task.seq_len - 2
                continue
            assert 0 <= first < low // 2 <= second < low
            assert target[place] == value_of.get(first, -1)
            assert value_of.setdefault(first, second) == second
        assert target[-2] >= 0  # the last key is never new
    scored = np.zeros(task.seq_len, bool)
    scored[task.scored] = True
    assert (targets[:, ~scored] == -1).all() and (targets[:, scored] >= 0).any(0).all()


@pytest.mark.parametrize("settings", RECALL[1:])
def test_recall_is_drawn_as_by_numpy(settings):
    task = load_task("mad_recall", **settings)
    ours = sample(task, 2000)
    sizes = task.seq_len, task.vocab_size, task.noise_vocab_size, task.frac_noise
    theirs = numpy_recall(np.random.default_rng(0), 2000, *sizes)
    for place in {*range(4), task.seq_len // 2, *range(task.seq_len - 4, task.seq_len)}:
        assert same_distribution(ours[0][:, place], theirs[0][:, place]), place
        assert same_distribution(ours[1][:, place] + 1, theirs[1][:, place] + 1), place
    for count in (lambda x: (x[1] >= 0).sum(1), lambda x: (x[0] < task.num_keys).sum(1)):  # queries, pairs
        assert same_distribution(count(ours), count(theirs))
    # How often the last key was there before: it is any of those that were, however often.
    assert same_distribution(*((x[0][:, :-2:2] == x[0][:, [-2]]).sum(1) for x in (ours, theirs)))


# --- Fuzzy recall ----------------------------------------------------------------------------------------------------------


def numpy_fuzzy(rng, num, seq_len, vocab, key_motif, value_motif, shortest_key):
    """(tokens, targets), one sequence after another."""
    half, all_tokens, all_targets = (vocab - 1) // 2, [], []

    def draw(shortest, longest, first, end):
        return tuple(rng.permutation(np.arange(first, end))[: rng.integers(shortest, longest + 1)].tolist())

    def draw_pair():
        return draw(shortest_key, key_motif, 0, half), draw(1, value_motif, half, vocab - 1)

    for _ in range(num):
        probe, probe_value = draw_pair()
        room = seq_len - len(probe + probe_value) - key_motif - value_motif
        place, value_of, tokens, targets = rng.integers(room - key_motif - value_motif + 1), {}, [], []
        while len(tokens) < room:
            key, value = (probe, probe_value) if len(tokens) >= place and probe not in value_of else draw_pair()
            known = value_of.get(key)
            value = known or (probe_value if key == probe else value)
            value_of[key] = value
            tokens += key + value
            targets += (-1,) * len(key) + (value if known else (-1,) * len(value))
        tokens, targets = [*tokens, *probe, *probe_value], [*targets, *(-1 for _ in probe), *probe_value]
        padding = seq_len + 1 - len(tokens)
        all_tokens.append([*[vocab - 1] * padding, *tokens][:-1])
        all_targets.append([*[-1] * padding, *targets][1:])
    return np.array(all_tokens), np.array(all_targets)


def pairs_of(row, target, vocab):
    """[(key, value, its scored tokens)] of a sequence, with its last target as its last token."""
    half, pairs, answers = (vocab - 1) // 2, [], [-1, *target]
    for place, token in enumerate([*row, target[-1]]):
        if token == vocab - 1:
            assert not pairs and answers[place] == -1  # padding stands in front
        elif token < half:
            if not pairs or pairs[-1][1]:
                pairs.append(([], [], []))
            pairs[-1][0].append(token)
            assert answers[place] == -1
        else:
            pairs[-1][1].append(token)
            pairs[-1][2].append(answers[place])
    return pairs


FUZZY = [{"seq_len": 18, "vocab_size": 7}, {"seq_len": 40, "vocab_size": 9, "key_motif": 2, "value_motif": 1}]


@pytest.mark.parametrize("settings", FUZZY)
@pytest.mark.parametrize("method", ["sample", "sample_evaluation"])
@pytest.mark.slow
def test_motifs_that_were_there_before_are_answered(settings, method):
    task = load_task("mad_fuzzy", **settings)
    tokens, targets = sample(task, 200, method=method)
    shortest, lengths = 1 if method == "sample" else task.key_motif, set()
    for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
        value_of, pairs = {}, pairs_of(row, target, task.vocab_size)
        for key, value, scored in pairs:
            assert shortest <= len(key) <= task.key_motif and 1 <= len(value) <= task.value_motif
            assert len(set(key)) == len(key) and len(set(value)) == len(value)
            assert scored == (value if tuple(key) in value_of else [-1] * len(value))
            assert value_of.setdefault(tuple(key), value) == value
        assert pairs[-1][2] == pairs[-1][1]  # the last key is never new
        # Padding is what is left where no pair fits beside the probe.
        assert 1 <= row.count(task.vocab_size - 1) <= task.longest + 1
        lengths |= {len(key) for key, _, _ in pairs}
    assert lengths == {*range(shortest, task.key_motif + 1)}


@pytest.mark.parametrize("settings", FUZZY)
@pytest.mark.parametrize("method", ["sample", "sample_evaluation"])
@pytest.mark.slow
def test_fuzzy_recall_is_drawn_as_by_numpy(settings, method):
    task = load_task("mad_fuzzy", **settings)
    shortest = 1 if method == "sample" else task.key_motif
    arguments = task.seq_len, task.vocab_size, task.key_motif, task.value_motif, shortest
    ours, theirs = sample(task, 1500, method=method), numpy_fuzzy(np.random.default_rng(0), 1500, *arguments)
    for place in range(0, task.seq_len, 3):
        assert same_distribution(ours[0][:, place], theirs[0][:, place]), place
        assert same_distribution(ours[1][:, place] + 1, theirs[1][:, place] + 1), place
    rows = (zip(*(y.tolist() for y in x), strict=True) for x in (ours, theirs))
    read = [[pairs_of(*pair, task.vocab_size) for pair in x] for x in rows]
    for count in (
        len,
        lambda pairs: [pair[0] for pair in pairs].index(pairs[-1][0]),  # where the probe stands
        lambda pairs: sum(pair[2][0] >= 0 for pair in pairs),  # queries
    ):
        assert same_distribution(*([count(pairs) for pairs in x] for x in read))


def test_fuzzy_recall_s_sources_belong_to_the_key():
    task = load_task("mad_fuzzy", seq_len=40, vocab_size=9)
    for method in ("sample", "sample_evaluation"):
        tokens, targets = sample(task, method=method)
        sources = task.sources(tokens, targets)
        named = np.asarray(task.ROLES)[task.roles(tokens)]
        np.testing.assert_array_equal(named == "padding", tokens == 8)
        for row, target, source in zip(tokens, targets, sources, strict=True):
            for place in np.flatnonzero(target >= 0):
                # Behind the source's pair, as behind the target's, stands the same key, and as much of the value.
                asked, found = (key_before(row.tolist(), at) for at in (place, source[place] - 1))
                assert asked == found and row[source[place]] == target[place]


def key_before(row, at):
    """(The tokens of the key, those of its value) up to a position."""
    end = at
    while row[end] >= 4:
        end -= 1
    begin = end
    while begin > 0 and row[begin - 1] < 4:
        begin -= 1
    return row[begin : end + 1], row[end + 1 : at + 1]


# --- Selective copying -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seq_len", "vocab", "count"), [(256, 16, 16), (12, 4, 5), (20, 6, 4)])
def test_the_data_are_copied_in_order(seq_len, vocab, count):
    task = load_task("mad_copying", seq_len=seq_len, vocab_size=vocab, num_tokens=count)
    tokens, targets = sample(task)
    context, blank, copy = seq_len - count - 1, vocab - 2, vocab - 1
    assert (tokens[:, context] == copy).all() and (tokens[:, context + 1 :] == blank).all()
    assert (targets[:, : context + 1] == -1).all()
    for row, target in zip(tokens[:, :context], targets, strict=True):
        assert row[-1] < blank and row.max() <= blank
        np.testing.assert_array_equal(target[context + 1 :], row[row != blank])
    np.testing.assert_array_equal(np.arange(seq_len)[task.scored], np.arange(context + 1, seq_len))
    assert chisquare(np.bincount(targets[targets >= 0], minlength=blank)).pvalue > 1e-4
    named = np.asarray(task.ROLES)[task.roles(tokens)]
    assert ((named == "data").sum(1) == count).all() and ((named == "copy").sum(1) == 1).all()
    assert task.marks() == {"copy": context}


def test_each_blank_goes_before_a_data_token_drawn_uniformly():
    """As by insertion into a list."""
    rng, places = np.random.default_rng(0), []
    for _ in range(6000):
        row = np.insert(np.ones(4, int), rng.integers(0, 4, 11), 0)
        places.append(np.flatnonzero(row))
    tokens, _ = sample(load_task("mad_copying", seq_len=20, vocab_size=6, num_tokens=4), 6000)
    ours = np.nonzero(tokens < 4)[1].reshape(6000, 4)
    for place in range(4):
        assert same_distribution(ours[:, place], np.array(places)[:, place])
    assert same_distribution(ours[:, 0] * 15 + ours[:, 2], np.array(places)[:, 0] * 15 + np.array(places)[:, 2])


# --- Memorisation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab", "seq_len"), [(256, 32), (5, 2)])
def test_values_are_the_same_in_all_sequences(vocab, seq_len):
    task = load_task("mad_memorisation", vocab_size=vocab, seq_len=seq_len)
    tokens, targets = (np.concatenate(x) for x in zip(sample(task, seed=0), sample(task, seed=1), strict=True))
    half = (vocab - 1) // 2
    assert (tokens[:, 1::2] == vocab - 1).all() and (targets[:, ::2] == -1).all()
    keys, values = tokens[:, ::2].ravel(), targets[:, 1::2].ravel()
    assert keys.min() >= 0 and keys.max() < half <= values.min() and values.max() < vocab - 1
    value_of = dict(zip(keys.tolist(), values.tolist(), strict=True))
    assert [value_of[key] for key in keys.tolist()] == values.tolist()
    assert len(set(value_of.values())) == len(value_of)  # one to one
    assert chisquare(np.bincount(keys, minlength=half)).pvalue > 1e-4
    assert task.sources(tokens, targets) is None
    np.testing.assert_array_equal(np.arange(seq_len)[task.scored], np.arange(1, seq_len, 2))
    named = np.asarray(task.ROLES)[task.roles(tokens)]
    assert (named[:, ::2] == "key").all() and (named[:, 1::2] == "insert").all()


def test_the_map_is_its_seed_s():
    by_key = []
    for map_seed in (12345, 7):
        tokens, targets = sample(load_task("mad_memorisation", map_seed=map_seed))
        by_key.append([targets[:, 1::2][tokens[:, ::2] == key][0] for key in range(127)])
    assert 0 <= (np.array(by_key[0]) == by_key[1]).sum() < 10  # of 127; by chance about one
    assert np.abs(np.corrcoef(by_key[0], np.arange(127))[0, 1]) < 0.3  # no order

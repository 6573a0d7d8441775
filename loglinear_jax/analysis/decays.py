"""Which seeds converge? Whether it is decided by how far back their heads remember before training."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loglinear_jax.analysis import style
from loglinear_jax.analysis.experiments import changed_settings
from loglinear_jax.analysis.lam_values import mixer_params
from loglinear_jax.analysis.section import Section
from loglinear_jax.analysis.table import Cell, Table, accuracy_note
from loglinear_jax.config import ConfigError, build, variant_config
from loglinear_jax.mixers import find_mixer, parse_pattern
from loglinear_jax.progress import progress_bar
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import on_one_set
from loglinear_jax.statistics import longer_among
from loglinear_jax.tasks import CONVERGED_ACCURACY, BaseTask
from loglinear_jax.tasks.draws import standard_settings
from loglinear_jax.train import SeedTrainer, TrainSettings


def layers_with_decays(run: Run, variant: str) -> tuple[int, ...]:
    """The layers whose mixer decays: all or none, but in a model of several mixers, and none in a model of one's own."""
    model = variant_config(run.config, variant).model
    decay = [find_mixer(mixer)[0].has_decays for mixer in parse_pattern(model.get("mixer", "softmax"))]
    return tuple(layer for layer in range(model.get("layers", 0)) if decay[layer % len(decay)])


def initial_memory(run: Run, variant: str) -> Float[np.ndarray, "seeds layers heads"]:
    """Tokens after which a head's state has decayed to 1/e at the start, 1 / (exp(A_log) · softplus(dt_bias)), in the
    `layers_with_decays`.

    From every seed's initial parameters, drawn again: they follow from its number, so neither a checkpoint nor a GPU is needed.
    A token's own part of the step size is left out. It is small with weight_std = 0.02 (within about 5 %), but not with 0.125.
    Raises ConfigError for a model without decays.
    """
    if not (layers := layers_with_decays(run, variant)):
        raise ConfigError(f"{run.name}: {variant} has no decays")
    # The draws of decays depend neither on the vocabulary, for which a text would have to be opened, nor on λ: one program
    # serves the variants of several λ.
    experiment = build(run.config, variant, vocab_size=1)
    model = type(experiment.model)(dataclasses.replace(experiment.model.settings, lam="fixed"))
    return _initial_memory(model, experiment.task, experiment.train, tuple(experiment.seeds), layers)


@functools.cache
@standard_settings()
def _initial_memory(
    model: nn.Module, task: BaseTask, settings: TrainSettings, seeds: tuple[int, ...], layers: tuple[int, ...]
) -> np.ndarray:
    trainer = SeedTrainer(model, task, settings)

    def rates(seed: Array) -> Array:
        params = trainer.init(seed).params["params"]
        mixers = [mixer_params(params[f"layer_{layer}"]) for layer in layers]
        return jnp.stack([jnp.exp(m["a_log"]) * nn.softplus(m["dt_bias"]) for m in mixers])

    return 1 / np.asarray(jax.jit(jax.vmap(rates))(np.asarray(seeds, np.int32)), np.float64)


def memory_table(memory: Sequence[tuple[Run, str, Float[np.ndarray, "S layers heads"]]]) -> Table:
    """Whether the seeds that converged are those that remembered further back at the start.

    memory: runs, variants and their `initial_memory`. Of each layer, and of all, the head that remembers longest counts.
    """
    changes = changed_settings([run for run, *_ in memory])
    outcomes = on_one_set({index: run.outcomes[variant] for index, (run, variant, _) in enumerate(memory)})
    rows = []
    for (run, variant, tokens), changed, outcome in zip(memory, changes, outcomes.values(), strict=True):
        converged = np.array(outcome.reached(CONVERGED_ACCURACY))
        names = {"task": run.task.describe(), "changed": changed or "nothing", "variant": variant}
        numbers = {"run": run.name, "num_converged": int(converged.sum()), "num_seeds": len(converged)}
        row = {name: Cell(text, **{name: text}) for name, text in names.items()}
        row["≥ 90 %"] = Cell(f"{converged.sum()}/{len(converged)}", **numbers)
        longest = zip(layers_with_decays(run, variant), tokens.max(2).T, strict=True)
        for place, of_seeds in [*((f"layer {i}", of_layer) for i, of_layer in longest), ("all", tokens.max((1, 2)))]:
            chance, p = longer_among(of_seeds, converged)
            text = f"{chance:.2f} (p = {p:.1g})" if np.isfinite(chance) else "–"
            row[place] = Cell(text, **{f"{place}: probability": chance, f"{place}: p": p})
        rows.append(row)
    note = (
        f"{accuracy_note(outcome)} "
        "The probability that a seed that reached 90 % started with a longer memory than one that did not (0.5: no matter; 1: "
        "the outcome follows from it), and the p-value of the Mann-Whitney test, not corrected for the number of comparisons. "
        "Memory: tokens after which a head's state has decayed to 1/e before training; the longest of the heads of a layer, "
        "or of all. Layers without decays, of softmax attention, are left out."
    )
    return Table("Which seeds converge, by how far back they remember at the start", rows, note)


class InitialDecays(Section):
    """From the summaries of tasks whose score has thresholds; the seeds' first parameters are drawn again."""

    NAME = "decays"
    TITLE = "Which seeds converge"

    def show_all(self) -> None:
        runs = [run for run in self.context.runs if run.outcomes and run.task.score.thresholds]
        asked = [(run, v) for run in runs for v in run.variants if v in run.outcomes and layers_with_decays(run, v)]
        found = []
        with progress_bar("initial decays", len(asked), unit="variant", shown=bool(asked)) as bar:
            for run, variant in asked:
                with self.context.attempt(run.workdir, f"{variant}: initial decays"):
                    found.append((run, variant, initial_memory(run, variant)))
                bar.update()
        if not found:
            return
        layer, panels = self.context.choices.layer, {}
        changed = changed_settings([run for run, *_ in found])
        outcomes = on_one_set({index: run.outcomes[variant] for index, (run, variant, _) in enumerate(found)})
        for (run, variant, tokens), changes, outcome in zip(found, changed, outcomes.values(), strict=True):
            name = run.task.describe() + (f"; {changes}" if changes else "")
            panel = panels.setdefault(run.workdir, style.SeedPanel(name, run.task.trained_on.longest, {}))
            panel.by_variant[variant] = tokens[:, layer].max(1), outcome.accuracy
        table = memory_table(found)
        whose = "the last layer" if layer == -1 else f"layer {layer}"
        x, y = f"longest memory in {whose} at the start (tokens)", f"{outcome.shown_as} (%)"
        figure, axis = style.draw_seeds(list(panels.values()), x, y, "length of the sequences", message_of(table))
        axis.set_xscale("log")
        style.log_ticks(axis.xaxis, most=5)
        self.add(figure, "initial-memory", title="Every seed's outcome, by how far back it remembers")
        self.add(table, "initial-memory-table")


def message_of(table: Table) -> str:
    """With how many variants those seeds converge that remember furthest, over all layers; or, if of each variant all seeds
    or none converge, which."""
    chances = [(row["all: probability"], row["all: p"]) for row in table.raw]
    tested = [(chance, p) for chance, p in chances if np.isfinite(chance)]
    if tested:
        longer = sum(chance > 0.5 and p < 0.05 for chance, p in tested)
        found = f"{longer} of {len(tested)} variants"
        return f"Seeds that remember further back at the start converge more often (p < 0.05): {found}"
    all_converge = [row["num_converged"] == row["num_seeds"] for row in table.raw]
    none, every = all_converge.count(False), all_converge.count(True)
    if none and every:
        return (
            f"Variants of which every seed converges: {every}; of which none does, whatever the initial memory: {none}"
        )
    return f"{'No' if none else 'Every'} seed converges, however far back it remembers at the start"

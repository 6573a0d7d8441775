"""The language model that a command uses: of a run, or an external checkpoint."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loglinear_jax.command_line import BadInput, comma_separated, whole_number

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from loglinear_jax.models import LanguageModel
    from loglinear_jax.tasks import BaseTask

log = logging.getLogger(__name__)
ALL = "all"  # seeds of a run
ENOUGH_IDS = 0.9  # of the vocabulary: embeddings have some rows more than tokenizers have ids, so that sizes are round


class Trained(NamedTuple):
    """A language model, one seed's parameters, its tokenizer, where `load_tokenizer` finds that, the ids that end a text, where
    they were asked for; and of a run its task, and the parameters of all the seeds that were asked for."""

    model: LanguageModel
    params: Any
    tokenizer: Tokenizer
    tokenizer_name: str
    stop_tokens: tuple[int, ...] = ()
    task: BaseTask | None = None
    seeds: Mapping[int, Any] = {}


def add_trained_arguments(parser: argparse.ArgumentParser, several_seeds: bool = False) -> None:
    """What `load_trained` reads, beside the model."""
    help_of_tokenizer = "tokenizer of an external checkpoint without one: a folder, or a name on the hub"
    parser.add_argument("--tokenizer", help=help_of_tokenizer)
    add_run_arguments(parser, several_seeds)
    help_of_lam = "go beyond the levels of λ: higher levels take the λ of the last one"
    parser.add_argument("--extend_lam", action="store_true", help=help_of_lam)


def add_run_arguments(parser: argparse.ArgumentParser, several_seeds: bool = False) -> None:
    """What `trained_of_run` reads, beside the run."""
    parser.add_argument("--variant", help="variant of the run; needed if it has several")
    help_of_seed = "seed whose parameters are used (default: the first)"
    if several_seeds:
        help_of_seed += "; or several, such as 0,1,2, or all: then means and intervals are over seeds"
    parser.add_argument("--model_seed", type=_seeds if several_seeds else _seed, help=help_of_seed)


def _seed(text: str) -> list[int]:
    return [whole_number(text)]


def _seeds(text: str) -> list[int] | str:
    try:
        return text if text == ALL else comma_separated(whole_number)(text)
    except argparse.ArgumentTypeError:
        expected = f"expected {ALL}, or whole numbers separated by commas"
        raise argparse.ArgumentTypeError(f"{expected}, got {text!r}") from None


def load_trained(args: argparse.Namespace, run: Path | None, model: str | None, stops: bool = False) -> Trained:
    """The model of a run, or an external checkpoint; with --extend_lam for sequences of any length.

    args: with the arguments of `add_trained_arguments`. stops: with the ids at which a text ends: of a run's task.end_token,
    or those in the config of a checkpoint. Raises BadInput or SettingError where one is not there, or they do not fit together.
    """
    from loglinear_jax.models import LanguageModel

    if model is None and args.tokenizer is not None:
        raise BadInput("--tokenizer is of an external checkpoint: a run has its own")
    trained = trained_of_run(args, run, stops) if model is None else _of_others(args, model, stops)
    if (offset := getattr(trained.task, "target_offset", 1)) != 1:
        raise BadInput(
            f"{run} predicts the {trained.task.predicts} (task.target_offset={offset}): expected a model of the next token"
        )
    if not args.extend_lam:
        return trained
    settings = trained.model.settings.extended()
    settings.check()
    return trained._replace(model=LanguageModel(settings))


def trained_of_run(args: argparse.Namespace, workdir: Path, stops: bool) -> Trained:
    """By --variant and --model_seed. stops: as in `load_trained`, which also says what is raised."""
    from loglinear_jax.models import LanguageModel
    from loglinear_jax.runs.loading import load_run
    from loglinear_jax.text import load_tokenizer

    run = load_run(workdir, args.variant)
    if not isinstance(run.model, LanguageModel):
        raise BadInput(f"{run.workdir} holds no language model, but the task {run.config.task.name}")
    tokenizer = load_tokenizer(str(run.workdir))
    wanted = run.seeds[:1] if args.model_seed is None else args.model_seed
    untrained = [seed for seed, loss in zip(run.seeds, run.best_loss, strict=True) if not math.isfinite(loss)]
    if wanted == ALL:
        wanted = [seed for seed in run.seeds if seed not in untrained]
        if untrained:
            log.warning("%s: seeds %s have no finite validation loss and are left out", run.variant, untrained)
        if not wanted:
            raise BadInput(f"{run.workdir}: no seed of {run.variant} has a finite validation loss")
    for seed in wanted:
        if seed not in run.seeds:
            raise BadInput(f"--model_seed={seed} is not in this run, which has {run.seeds}")
        if seed in untrained:
            log.warning(
                "%s: seed %s has no finite validation loss: its parameters are the initial ones", run.variant, seed
            )
    seeds = {seed: run.params(seed) for seed in wanted}
    has_end = stops and hasattr(run.task, "end_token")  # a text without documents has none
    ends = (tokenizer.token_to_id(run.task.end_token),) if has_end else ()
    return Trained(run.model, seeds[wanted[0]], tokenizer, str(run.workdir), ends, run.task, seeds)


def _of_others(args: argparse.Namespace, model: str, stops: bool) -> Trained:
    from loglinear_jax.hub.folders import find_folder, load_model, stop_tokens
    from loglinear_jax.models import LanguageModel
    from loglinear_jax.text import CorpusError, load_tokenizer
    from loglinear_jax.text.tokenizer import holds_tokenizer, tokenizer_size
    from pallas_kernels import runs_on_gpu

    given = "--model" if hasattr(args, "model") else "MODEL"  # which evaluate has
    for name in ("variant", "model_seed"):
        if getattr(args, name) is not None:
            raise BadInput(f"--{name} is for a run, but {given} {model} is not the folder of one")
    try:
        folder, root = find_folder(model)
        settings, params = load_model(folder, dtype="bfloat16" if runs_on_gpu() else "float32")
        ends = stop_tokens(folder, settings.vocab_size) if stops else ()
    except ValueError as error:
        raise BadInput(f"{given}: {error}") from error
    own = root if holds_tokenizer(root) and not holds_tokenizer(folder) else folder
    where = str(own) if args.tokenizer is None else args.tokenizer
    try:
        tokenizer = load_tokenizer(where)
    except CorpusError as error:
        raise CorpusError(f"{error}{'; or give another as --tokenizer' * (args.tokenizer is None)}") from error
    if (ids := tokenizer_size(tokenizer)) > settings.vocab_size:
        most = settings.vocab_size - 1
        raise BadInput(
            f"--tokenizer: that of {where} has ids up to {ids - 1:,}: expected at most {most:,}, as in the model"
        )
    if ids < ENOUGH_IDS * settings.vocab_size:
        log.warning(
            "--tokenizer: that of %s has only %s ids of the %s in the model's vocabulary: is it another model's?",
            where, f"{ids:,}", f"{settings.vocab_size:,}",
        )  # fmt: skip
    return Trained(LanguageModel(settings), params, tokenizer, where, ends)

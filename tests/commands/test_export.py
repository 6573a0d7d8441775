"""Folders for flash-linear-attention, by the command line."""

import dataclasses
import shutil

import pytest
from safetensors import SafetensorError

from loglinear_jax.commands import export
from loglinear_jax.commands.main import main
from loglinear_jax.commands.trained_models import Trained
from loglinear_jax.hub import import_params
from loglinear_jax.hub.folders import stop_tokens
from loglinear_jax.models import LanguageModel
from loglinear_jax.text import load_tokenizer
from tests.hub.checkpoints import CONFIGS, draw, write_tokenizer


@pytest.fixture
def exported(tmp_path, monkeypatch):
    """The command's exit code for a drawn model, with --out=tmp_path / "out"."""
    write_tokenizer(tmp_path, 19)

    def export_drawn(architecture, levels, **changes):
        config = CONFIGS[architecture] | {"architectures": [architecture]}
        settings, params = import_params(draw(config, levels=levels), config)
        model = LanguageModel(dataclasses.replace(settings, **changes))
        trained = Trained(model, params, load_tokenizer(str(tmp_path)), str(tmp_path), (3,))
        monkeypatch.setattr(export, "trained_of_run", lambda *args, **options: trained)
        return main(["export", "--workdir=run", f"--out={tmp_path / 'out'}"])

    return export_drawn


@pytest.mark.parametrize("architecture", ["LogLinearMamba2ForCausalLM", "HGatedDeltaNetForCausalLM"])
def test_a_lam_with_other_levels_than_theirs_is_refused_before_anything_is_written(
    architecture, exported, tmp_path, capsys
):
    assert exported(architecture, levels=10) == 2
    error = capsys.readouterr().err
    assert "λ has 10 levels, for model.max_length=512, and that of flash-linear-attention 15: train with" in error
    assert not (tmp_path / "out").exists()
    assert exported(architecture, levels=15, max_length=9_000) == 0  # as many levels
    files = {"config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    assert stop_tokens(tmp_path / "out", 19) == (3,)


def test_a_full_disk_is_one_line(exported, tmp_path, monkeypatch, full_disk, capsys):
    """For the tokenizer, and for the model, of which nothing is left, so that the same command can be given again."""

    def full(arrays, file, metadata):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    assert exported("HGatedDeltaNetForCausalLM", levels=15, max_length=9_000) == 1
    shutil.rmtree(tmp_path / "out")
    monkeypatch.setattr("safetensors.numpy.save_file", full)
    assert exported("HGatedDeltaNetForCausalLM", levels=15, max_length=9_000) == 1
    assert not list((tmp_path / "out").iterdir())
    tokenizer, model = capsys.readouterr().err.splitlines()
    assert "tokenizer.json can't be written: No space left on device" in tokenizer
    assert f"--out: {tmp_path / 'out'}: the model can't be written there: Error while serializing: I/O" in model

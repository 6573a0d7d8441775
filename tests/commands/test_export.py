"""Folders for flash-linear-attention, by the command line."""

import dataclasses

import pytest

from loglinear_jax.commands import export
from loglinear_jax.commands.main import main
from loglinear_jax.commands.trained_models import Trained
from loglinear_jax.hub import import_params
from loglinear_jax.models import LanguageModel
from loglinear_jax.text import load_tokenizer
from tests.hub.checkpoints import CONFIGS, draw, write_tokenizer


@pytest.mark.parametrize("architecture", ["LogLinearMamba2ForCausalLM", "HGatedDeltaNetForCausalLM"])
def test_a_lam_with_other_levels_than_theirs_is_refused_before_anything_is_written(
    architecture, tmp_path, monkeypatch, capsys
):
    write_tokenizer(tmp_path, 19)

    def exported(levels, **changes):
        config = CONFIGS[architecture] | {"architectures": [architecture]}
        settings, params = import_params(draw(config, levels=levels), config)
        model = LanguageModel(dataclasses.replace(settings, **changes))
        trained = Trained(model, params, load_tokenizer(str(tmp_path)), str(tmp_path))
        monkeypatch.setattr(export, "trained_of_run", lambda *args: trained)
        return main(["export", "--workdir=run", f"--out={tmp_path / 'out'}"])

    assert exported(levels=10) == 2
    error = capsys.readouterr().err
    assert "λ has 10 levels, for model.max_length=512, and that of flash-linear-attention 15: train with" in error
    assert not (tmp_path / "out").exists()
    assert exported(levels=15, max_length=9_000) == 0  # as many levels
    files = {"config.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files

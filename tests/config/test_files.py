"""Config files: found by name or path, loaded, and changed by the settings of a command line."""

from pathlib import Path

import pytest

from loglinear_jax.command_line import split_arguments
from loglinear_jax.config import ConfigError, default_config
from loglinear_jax.config.files import config_names, find_config_file, load_config_file, read_config_arguments
from loglinear_jax.config.variants import override

ROOT = Path(__file__).parents[2]


def test_configs_are_found_by_name_and_by_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(config_names()) == 12 and {"mqar", "task", "books"} <= set(config_names())
    assert find_config_file("mqar").samefile(ROOT / "configs" / "mqar.py")
    (tmp_path / "mqar").write_text("", encoding="utf-8")
    assert find_config_file("mqar") == Path("mqar")  # a file of one's own comes first


@pytest.mark.parametrize("name", config_names())
def test_every_config_says_what_it_is_and_what_its_presets_do(name):
    file = load_config_file(name)
    assert file.docstring and file.presets
    assert all(change.__doc__ for change in file.presets.values())


def test_arguments_of_the_config_are_told_from_the_others():
    argv = "--config a.py:b --workdir=x --config.train.num_seeds 3 --config.train.stream --configs=y z".split()  # noqa: SIM905
    own = ["--config=a.py:b", "--config.train.num_seeds=3", "--config.train.stream"]
    assert split_arguments(argv) == (own, ["--workdir=x", "--configs=y", "z"])


def test_settings_are_changed_and_the_run_is_named():
    settings = "--config.train.num_seeds=3", "--config.train.stream"
    chosen = read_config_arguments([settings[0], "--config=mqar:smoke,kv=4", settings[1], "--workdir=elsewhere"])
    assert chosen.name == "mqar-smoke+kv=4"  # needs no quoting in a shell
    assert (chosen.config.train.num_seeds, chosen.config.train.stream, chosen.config.task.num_pairs) == (3, True, 4)
    assert chosen.config.is_locked


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("def get_config(:\n", "can't be read: invalid syntax"),
        ("config = 3\n", "has no function get_config"),
        ("def get_config(presets):\n    return 3\n", "needs presets"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path, content, message):
    path = tmp_path / "own.py"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_config_arguments([f"--config={path}"])


def test_a_bug_in_a_config_keeps_its_traceback(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("def get_config():\n    return int('nothing')\n", encoding="utf-8")
    with pytest.raises(ValueError, match="nothing") as caught:
        read_config_arguments([f"--config={path}"])
    assert not isinstance(caught.value, ConfigError)


def changed(argument):
    config = default_config(task="mqar")
    config.task.lags = (1, 2)
    config.lock()
    section, _, field = override(config, argument).partition(".")
    return config[section][field] if field else config[section]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("train.num_steps=1000", 1000),
        ("train.num_steps=1e3", 1000),
        ("train.first_seed=-3", -3),
        ("train.grad_clip=1e-3", 0.001),
        ("train.stream", True),
        ("train.stream=Yes", True),
        ("train.patience=", None),
        ("model.lam=fixed", "fixed"),
        ("variants=linear,mixer=softmax", "linear,mixer=softmax"),
        ("task.lags=(3, 4)", (3, 4)),
        ("train.learning_rate=1e-3,2.0", [0.001, 2.0]),
    ],
)
def test_what_can_mean_one_thing_alone_is_read(argument, value):
    found = changed(f"--config.{argument}")
    assert found == value and type(found) is type(value)
    assert changed("--noconfig.train.stream") is False


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("train.num_steps=1.5", "^train.num_steps: expected a whole number, got '1.5'$"),
        ("train.grad_clip=few", "expected a number, got 'few'"),
        ("train.stream=maybe", "expected true or false, got 'maybe'"),
        ("train=3", "^there is no setting train$"),
        ("train.num_sedes=3", "^there is no setting train.num_sedes: did you mean train.num_seeds[?]$"),
        ("num_seeds=3", "^there is no setting num_seeds: did you mean train.num_seeds[?]$"),
        ("train.num_seeds.x=3", "^there is no setting train.num_seeds.x: did you"),
        ("__class__=1", "^there is no setting __class__$"),
    ],
)
def test_what_came_is_named_with_what_was_expected(argument, message):
    with pytest.raises(ConfigError, match=message):
        changed(f"--config.{argument}")

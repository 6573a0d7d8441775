"""Config files: found by name or path, loaded, and changed by arguments."""

from pathlib import Path

import pytest

from loglinear_jax.command_line import split_arguments
from loglinear_jax.config import ConfigError
from loglinear_jax.config.files import (
    config_names,
    find_config_file,
    load_config_file,
    read_config_arguments,
)

ROOT = Path(__file__).parents[2]


def test_configs_are_found_by_name_and_by_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [
        "books",
        "forgetting",
        "interleaved",
        "mad",
        "mqar",
        "power_law",
        "selective_copy",
        "state_tracking",
        "task",
    ]
    assert config_names() == [*names, "wikitext103", "wikitext2", "zoology_mqar"]
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
    chosen = read_config_arguments(
        ["--config.train.num_seeds=3", "--config=mqar:smoke,kv=4", "--config.train.stream", "--workdir=elsewhere"]
    )
    assert chosen.name == "mqar-smoke+kv=4"  # needs no quoting in a shell
    assert (chosen.config.train.num_seeds, chosen.config.train.stream, chosen.config.task.num_pairs) == (3, True, 4)
    assert chosen.config.is_locked


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("def get_config(:\n", "can't be read: invalid syntax"),
        (
            "from loglinear_jax.lam import find_lam\nget_config = lambda: find_lam('nope')",
            "lam must be one of .*, got 'nope'",
        ),
        ("config = 3\n", "has no function get_config"),
        ("def get_config():\n    return 3\n", "get_config returns a int, expected a ConfigDict"),
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

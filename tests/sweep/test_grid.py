"""Grid files: the cells they stand for, and how whatever is wrong in them is named."""

import re

import pytest

from loglinear_jax.config import ConfigError
from loglinear_jax.sweep.grid import read_grid
from loglinear_jax.sweep.states import State, track

GRID = """
keep_in = "kept"
[values]
paper = "fixed,linear"
[settings]
train.precision = "tf32"
[[grid]]
name = "kv{kv}-seq{seq}"
config = "mqar:kv={kv},seq={seq}"
kv = [4, 8]
seq = [128, 256]
settings.variants = "{paper}"
settings.train = {learning_rate = 1e-3, stream = true}
[[grid]]
name = "alone"
config = "mqar"
settings.train.precision = "highest"
"""


@pytest.fixture
def written(tmp_path):
    def write(text):
        (tmp_path / "grid.toml").write_text(text, encoding="utf-8")
        return tmp_path / "grid.toml"

    return write


def test_a_grid_is_the_product_of_its_axes(written, tmp_path):
    several = GRID.replace("learning_rate = 1e-3", "learning_rate = [0.001, 1e-2]")
    assert "--config.train.learning_rate=0.001,0.01" in read_grid(written(several)).cells[0].arguments
    grid = read_grid(written(GRID))
    assert [cell.name for cell in grid.cells] == ["kv4-seq128", "kv4-seq256", "kv8-seq128", "kv8-seq256", "alone"]
    assert grid.cells[1].arguments == (
        "--config=mqar:kv=4,seq=256",
        "--config.train.precision=tf32",
        "--config.variants=fixed,linear",
        "--config.train.learning_rate=0.001",
        "--config.train.stream=true",
    )
    assert grid.cells[4].arguments == ("--config=mqar", "--config.train.precision=highest")
    assert grid.keep_in == tmp_path / "kept"


def test_patterns_choose_cells(written):
    grid = read_grid(written(GRID))
    assert [cell.name for cell in grid.only(["*-seq256", "al*"])] == ["kv4-seq256", "kv8-seq256", "alone"]
    assert grid.only([]) == grid.cells
    with pytest.raises(ConfigError, match=r"no cell's name matches 'kv5\*': there are kv4-seq128, kv4-seq256, "):
        grid.only(["alone", "kv5*"])


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[[grid]]", "[[grid]", "grid.toml can't be read as TOML: "),
        ("keep_in", "keep", "grid.toml: there is no key keep (= 'kept'): expected keep_in, values, settings, grid"),
        ('"kept"', "3", "grid.toml: keep_in is 3: expected a text"),
        ('name = "alone"\n', "", "grid.toml, grid 2 has no name: expected a text"),
        ('"alone"', '"a/b"', "grid.toml, grid 2 (a/b): the name 'a/b': expected up to 200 letters, digits"),
        ("kv = [4, 8]", "kv = 4", "grid 1 (kv{kv}-seq{seq}): there is no key kv (= 4): expected name, config, "),
        ("kv = [4, 8]", "kv = []", "grid 1 (kv{kv}-seq{seq}): kv is an empty list: expected at least one value"),
        ("kv = [4, 8]", "kv = [4, 8]\npaper = ['a']", "paper is an axis here and one of [values]: expected another"),
        ("kv = [4, 8]", "kv = [4, 8]\nrate = [1]", "nothing uses {rate}: expected it in the name and the config or"),
        ("kv{kv}-seq", "kv{kv}{ks}-seq", "a name in braces has no values, or is no name ('ks'): expected an axis"),
        ("kv{kv}-seq", "kv{kv.x}-seq{kv}", "is no name ('str' object has no attribute 'x'): expected an axis"),
        ("seq = [128, 256]", "seq = [128, 128]", "grid 1 (kv{kv}-seq{seq}): 2 cells have the name kv4-seq128: "),
        ("rate = 1e-3", "rate = []", "settings.train.learning_rate is an empty list: expected at least one"),
        ("stream = true", "stream = [[1]]", "settings.train.stream is [1]: expected a text, a number, true or false"),
    ],
)
def test_what_is_wrong_is_named(before, after, message, written):
    assert before in GRID
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        read_grid(written(GRID.replace(before, after)))
    assert "\n" not in str(raised.value)


def test_a_file_without_grids_or_that_is_not_there_is_named(written, tmp_path):
    with pytest.raises(ConfigError, match=r"grid.toml has no \[\[grid\]\]: expected at least one"):
        read_grid(written("[settings]\n"))
    with pytest.raises(ConfigError, match="none.toml can't be read: No such file"):
        read_grid(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('{seq}"\nkv', '{seq},robst"\nkv', "cell kv4-seq128: no preset 'robst'"),
        ("stream = true", "strem = true", "cell kv4-seq128: there is no setting train.strem: did you mean"),
        ('paper = "fixed', 'paper = "fixd', "cell kv4-seq128: variants: 'fixd' is not a λ"),
    ],
)
def test_every_cell_is_resolved_before_anything_starts(before, after, message, written, tmp_path):
    assert before in GRID
    grid = read_grid(written(GRID.replace(before, after)))
    with pytest.raises(ConfigError, match=re.escape(message)):
        track(grid, grid.cells, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_changes_of_the_command_line_come_last(written, tmp_path):
    grid = read_grid(written(GRID))
    cells = track(grid, grid.cells, tmp_path / "runs", ["--config.train.num_seeds=3", "--config.train.precision=tf32"])
    assert all(one.of.config.train.num_seeds == 3 and one.of.config.train.precision == "tf32" for one in cells)
    assert all(cell.state is State.NOT_STARTED for cell in cells)
    alone = next(one for one in cells if one.of.cell.name == "alone")
    settings = [f"--config.train.{name}" for name in ("precision=highest", "num_seeds=3", "precision=tf32")]
    assert alone.arguments[:5] == ["--config=mqar", *settings, f"--workdir={tmp_path}/runs/alone"]

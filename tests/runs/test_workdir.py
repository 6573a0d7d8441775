"""Files of a run's folder."""

from loglinear_jax.runs.workdir import Workdir


def test_a_line_that_a_kill_cut_off_is_left_out_and_replaced(tmp_path):
    directory = Workdir(tmp_path)
    first, second = ({"variant": "linear", "step": step} for step in (5, 10))
    directory.append_metrics(first)
    with directory.metrics_file.open("a") as file:
        file.write('{"variant": "lin')
    assert directory.read_metrics() == [first]
    directory.append_metrics(second)
    assert directory.read_metrics() == [first, second]

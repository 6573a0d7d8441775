"""Reading a run back."""

import pytest

from loglinear_jax.config import ConfigError
from tests.analysis.made_runs import made_run


def test_a_variant_that_a_run_has_not_is_named(tmp_path):
    with pytest.raises(ConfigError, match="kv4 holds no variant 'fixed': there are linear, mlp_softplus"):
        made_run(tmp_path).metrics("fixed")

"""Bad calls of the public functions: one argument of a good call is changed; an error of one line names it, or the change is
harmless and the output is of the documented shape."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import loglinear_jax
from loglinear_jax.fenwick import occupied_levels
from loglinear_jax.generate import generate
from loglinear_jax.hub import export_params, import_params
from loglinear_jax.lam import make_lam
from loglinear_jax.models import LanguageModel, LanguageSettings, RecallSettings
from loglinear_jax.ops import bucket_scores, softmax_attention
from loglinear_jax.runs import load_run, read_run
from loglinear_jax.tasks import load_task
from tests.torture import runs
from tests.torture.judge import Outcome, line_failure, traceback_failure

NUMBER = 200
LIMIT_S = 60
B, T, G, H, K, V, LEVELS = 2, 6, 1, 2, 8, 4, 4
SETTINGS = LanguageSettings(
    vocab_size=19, max_length=64, lam="linear", hidden=16, layers=2, heads=2, head_dim=8, key_dim=8, dtype="float32"
)


@dataclasses.dataclass(frozen=True)
class Call:
    """A public function, good arguments for it, and what each is; right: whether an output is as documented for arguments."""

    function: Callable
    good: Callable[[Path], dict[str, Any]]
    sorts: dict[str, str]
    right: Callable[[Any, dict[str, Any]], bool]


@dataclasses.dataclass(frozen=True)
class Change:
    """One argument's change. harmless: it may be accepted. names: what an error may name in the argument's place."""

    what: str
    change: Callable[[Any], Any]
    harmless: bool = False
    names: tuple[str, ...] = ()


def replaced(value: Any, harmless: bool = False, *names: str) -> Change:
    return Change(repr(value)[:60], lambda good: value, harmless, names)


def _without(mapping: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in mapping.items() if k != key}


def _axis(axis: int, size: Callable[[int], int]) -> Callable:
    """Another size of one axis; of an array without axes, nothing."""
    return lambda x: np.resize(x, [size(n) if i == axis % np.ndim(x) else n for i, n in enumerate(np.shape(x))])


def _longer(axis: int) -> Callable:
    return _axis(axis, lambda n: n + 1)


JUNK = tuple(replaced(value) for value in ("x", {}, b"x", 1j))
ARRAYS = (
    *JUNK,
    replaced(None),
    replaced(3),
    replaced(2.5),
    Change("a list", lambda x: np.asarray(x).tolist()),
    Change("an axis less", lambda x: x[0]),
    Change("an axis more", lambda x: x[None]),
    Change("an object array", lambda x: np.asarray(x).astype(object)),
    Change("strings", lambda x: np.asarray(x).astype(str)),
    Change("complex", lambda x: np.asarray(x).astype(np.complex64)),
    *(Change(f"axis {axis} empty", _axis(axis, lambda n: 0)) for axis in (0, 1, -1)),
    *(Change(f"axis {axis} longer", _longer(axis)) for axis in (0, 1)),
    Change("NumPy", np.asarray, True),
)
FLOATING = (
    *ARRAYS,
    Change("integers", lambda x: jnp.ones(x.shape, int)),
    Change("booleans", lambda x: jnp.ones(x.shape, bool)),
    Change("NaN", lambda x: x * np.nan, True),
    Change("inf", lambda x: x + np.inf, True),
    Change("float16", lambda x: x.astype(jnp.float16), True),
    Change("not contiguous", lambda x: np.asarray(x)[..., ::-1], True),
)
COUNTS = (
    *JUNK,
    *(replaced(value) for value in (0, -1, 2.5, True, "3", np.nan, np.inf, [3], -(2**63), 1.0, None)),
    replaced(np.int64(3), True),
)
SORTS: dict[str, tuple[Change, ...]] = {
    "floating": FLOATING,
    "tokens": (
        *ARRAYS,
        Change("floats", lambda x: x * 1.0),
        Change("too large", lambda x: x + 99),
        Change("negative", lambda x: -x - 1),
    ),
    "count": COUNTS,
    "position": (
        *JUNK,
        *(replaced(value) for value in (-1, 2.5, None, "3", np.nan, [2.5], True)),
        replaced(2**40, True),
        Change("an array", lambda p: np.arange(3), True),
    ),
    "optional count": tuple(c for c in COUNTS if c.what != "None"),
    "size": (*COUNTS, replaced(2**31), replaced(2**63)),
    "chunk": (*JUNK, *(replaced(value) for value in (0, -1, 3, 2.0, True, "4", [4], 2**70 + 1)), replaced(4, True)),
    "choice": (*JUNK, *(replaced(value) for value in ("nope", "", 3, True, [], "PARALLEL", ("xla",), np.nan))),
    "state": (
        *JUNK,
        *(replaced(value) for value in (3, "x", [], (1, 2))),
        *(Change(f"position {p!r}", lambda s, p=p: s.replace(position=p)) for p in (-1, 1.5, "x", None, 2**31, [1], np.nan)),
        Change("positions", lambda s: s.replace(position=jnp.zeros(B, jnp.int32))),
        Change("levels of no array", lambda s: s.replace(levels=None)),
        Change("integer levels", lambda s: s.replace(levels=s.levels.astype(int))),
        *(Change(f"levels' axis {a}", lambda s, a=a: s.replace(levels=_longer(a)(s.levels))) for a in (0, 1, 3, 4)),
        Change("no levels", lambda s: s.replace(levels=s.levels[:, :, :0])),
        Change("NaN", lambda s: s.replace(levels=s.levels * np.nan), True),
        Change("position of NumPy", lambda s: s.replace(position=np.int64(1)), True),
    ),
    "matrix state": tuple(c for c in FLOATING if c.what != "None"),
    "share": (*JUNK, *(replaced(value) for value in (0.0, -0.1, 1.1, np.nan, np.inf, "0.5", [0.5], True)), replaced(1, True)),
    "positive": (*JUNK, *(replaced(value) for value in (-1.0, np.nan, np.inf, "0.5", [1.0], None, True))),
    "seed": (*JUNK, *(replaced(value) for value in (-1, 0.5, np.nan, "0", None, [0], 2**63, True))),
    "token": (*JUNK, *(replaced(value) for value in (-1, 19, 2.5, "x", np.nan, [1], True))),
    "parameters": (
        *(replaced(value, False, "params") for value in (None, {}, [], 3, "x")),
        Change("NaN", lambda p: jax.tree.map(lambda x: x * np.nan, p), False, ("finite", "logits")),
        Change("a stack of seeds", lambda p: jax.tree.map(lambda x: jnp.stack([x, x]), p)),
        Change("without a layer", lambda p: {"params": _without(p["params"], "layer_1")}, False, ("layer_1",)),
        Change("transposed", lambda p: jax.tree.map(lambda x: x.T if x.ndim > 1 else x[:-1], p), False, ("shape",)),
    ),
    "folder": tuple(
        replaced(value, False, str(value), "no run", "os.PathLike")
        for value in ("", "no/such", "/dev/null", None, 3, b"x", "a\0b", [])
    ),
    "variant": tuple(replaced(value, False, str(value)) for value in ("", "nope", 3, "linear,mlp_softplus", [], b"linear")),
    "known seed": tuple(replaced(value) for value in (-1, 7, "0", None, 0.5, [0], True, np.nan)),
    "dtype": tuple(replaced(value) for value in ("nope", 3, int, "int8", [], bool)),
    "lam": tuple(replaced(value) for value in ("", "nope", None, 3, "a:b", "os:path", ":", "λ", [])),
    "settings": tuple(replaced(value) for value in (None, {}, "x", 3, RecallSettings(vocab_size=19, max_length=64))),
    "task": tuple(replaced(value) for value in ("", "..", "nope", None, 3, "mqar.x", "a b", [])),
}  # fmt: skip


def _fla_changes(state: dict[str, np.ndarray]) -> tuple[Change, ...]:
    """Wrong state dicts: each key lost, of another shape, rank or type; one too many."""
    changes = [replaced(None), replaced({}), replaced([]), replaced("x")]
    for key in state:

        def put(change, key=key):
            return lambda good: good | {key: change(good[key])}

        changes += [
            Change(f"{key} left out", lambda good, key=key: _without(good, key), "conv1d.bias" in key, (key,)),
            Change(f"{key} longer", put(lambda x: np.resize(x, (x.shape[0] + 1, *x.shape[1:]))), False, (key,)),
            Change(f"{key} flat", put(lambda x: x[None]), False, (key,)),
            Change(f"{key} transposed", put(lambda x: x.T[:, :-1] if x.ndim > 1 else x[:-1]), False, (key,)),
            Change(f"{key} of integers", put(lambda x: x.astype(int)), False, (key,)),
            Change(f"{key} of objects", put(lambda x: x.astype(object)), False, (key,)),
            Change(f"{key} is None", put(lambda x: None), False, (key,)),
        ]  # fmt: skip
    return (
        *changes,
        Change("an unknown key", lambda good: good | {"backbone.nope": np.ones(3)}, False, ("backbone.nope",)),
    )


@functools.cache
def _arrays(step: bool = False) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {"q": (B, T, G, K), "k": (B, T, G, K), "v": (B, T, H, V), "log_decay": (B, T, H), "lam": (B, T, H, LEVELS)}
    arrays = {name: jnp.asarray(-abs(rng.normal(size=shape)), jnp.float32) for name, shape in shapes.items()}
    return {name: x[:, 0] for name, x in arrays.items()} if step else arrays


def _state() -> Any:
    return loglinear_jax.init_fenwick_state(B, H, K, V, 8)


@functools.cache
def _params() -> Any:
    """Small numbers in place of initial values, for which a program would have to be compiled."""
    shapes = jax.eval_shape(LanguageModel(SETTINGS).init, jax.random.key(0), jnp.zeros((1, 3), jnp.int32))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype), shapes)


@functools.cache
def _of_fla() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return export_params(SETTINGS, _params())


def _generation(folder: Path) -> dict[str, Any]:
    return {"model": LanguageModel(SETTINGS), "params": _params(), "prompt": np.array([[3, 5], [1, 2]]), "num_tokens": 3} | {
        "temperature": 1.0, "top_k": 5, "top_p": 0.9, "seed": 0, "stop_token": 4, "max_length": 8,
    }  # fmt: skip


ATTENTION = dict.fromkeys(("q", "k", "v", "log_decay"), "floating")
OPTIONS = {"chunk_size": "chunk", "implementation": "choice"}


def _as_v(out: Any, arguments: dict[str, Any]) -> bool:
    out = out[0] if isinstance(out, tuple) else out
    return out.shape == np.shape(arguments["v"]) and out.dtype == arguments["v"].dtype


def _params_of(workdir: Path, seed: Any, which: Any) -> Any:
    return load_run(workdir).params(seed, which)


def _inspect(num: Any, seq_len: Any) -> Any:
    return load_task("mqar", seq_len=16, vocab_size=16, num_pairs=2).inspection_sequences(num, seq_len)


def _fixed_task(**settings: Any) -> Any:
    return load_task(**settings)


FOLDER = {"workdir": "folder"}
CALLS: dict[str, Call] = {
    "num_levels": Call(loglinear_jax.num_levels, lambda f: {"length": 9}, {"length": "count"}, lambda o, a: isinstance(o, int)),
    "init_fenwick_state": Call(
        loglinear_jax.init_fenwick_state,
        lambda f: dict(batch=B, heads=H, key_dim=K, value_dim=V, max_length=8, dtype=jnp.float32),
        dict.fromkeys(("batch", "heads", "key_dim", "value_dim"), "count") | {"max_length": "size", "dtype": "dtype"},
        lambda o, a: o.levels.shape[3:] == (a["key_dim"], a["value_dim"]),
    ),
    "log_linear_attention": Call(
        loglinear_jax.log_linear_attention,
        lambda f: _arrays() | {"initial_state": _state(), "chunk_size": 2, "implementation": "xla", "return_state": True},
        ATTENTION | OPTIONS | {"lam": "floating", "initial_state": "state"},
        _as_v,
    ),
    "bucket_scores": Call(
        bucket_scores,
        lambda f: {name: _arrays()[name] for name in ("q", "k", "log_decay")}
        | {"num_levels": 5, "initial_state": loglinear_jax.init_fenwick_state(B, H, K, 1, 8)}
        | {"chunk_size": 2, "implementation": "xla", "return_state": True},
        dict.fromkeys(("q", "k", "log_decay"), "floating")
        | OPTIONS
        | {"num_levels": "optional count", "initial_state": "state"},
        lambda o, a: o[0].shape == (*a["log_decay"].shape, a["num_levels"]),
    ),
    "occupied_levels": Call(
        occupied_levels,
        lambda f: {"position": 5, "num_levels": 4},
        {"position": "position", "num_levels": "count"},
        lambda o, a: o.shape == (*np.shape(a["position"]), a["num_levels"]),
    ),
    "fenwick_step": Call(
        loglinear_jax.fenwick_step,
        lambda f: _arrays(step=True) | {"state": _state()},
        ATTENTION | {"lam": "floating", "state": "state"},
        _as_v,
    ),
    "log_linear_delta_attention": Call(
        loglinear_jax.log_linear_delta_attention,
        lambda f: _arrays()
        | {"beta": jnp.full((B, T, H), 0.5), "initial_state": _state(), "chunk_size": 2, "implementation": "xla"}
        | {"return_state": True},
        ATTENTION | OPTIONS | {"beta": "floating", "lam": "floating", "initial_state": "state"},
        _as_v,
    ),
    "log_linear_delta_step": Call(
        loglinear_jax.log_linear_delta_step,
        lambda f: _arrays(step=True) | {"beta": jnp.full((B, H), 0.5), "state": _state()},
        ATTENTION | {"beta": "floating", "lam": "floating", "state": "state"},
        _as_v,
    ),
    "gated_delta_attention": Call(
        loglinear_jax.gated_delta_attention,
        lambda f: {name: x for name, x in _arrays().items() if name != "lam"}
        | {"beta": jnp.full((B, T, H), 0.5), "initial_state": jnp.zeros((B, H, K, V)), "chunk_size": 2}
        | {"implementation": "xla", "return_state": True},
        ATTENTION | OPTIONS | {"beta": "floating", "initial_state": "matrix state"},
        _as_v,
    ),
    "gated_linear_attention": Call(
        loglinear_jax.gated_linear_attention,
        lambda f: {name: x for name, x in _arrays().items() if name != "lam"}
        | {"initial_state": jnp.zeros((B, H, K, V)), "chunk_size": 2, "implementation": "xla", "return_state": True},
        ATTENTION | OPTIONS | {"initial_state": "matrix state"},
        _as_v,
    ),
    "softmax_attention": Call(
        softmax_attention,
        lambda f: {name: _arrays()[name] for name in "qkv"} | {"implementation": "parallel"},
        dict.fromkeys("qkv", "floating") | {"implementation": "choice"},
        lambda o, a: o.shape == np.shape(a["v"]),
    ),
    "generate": Call(
        generate,
        _generation,
        {"params": "parameters", "prompt": "tokens", "num_tokens": "count", "temperature": "positive", "seed": "seed"}
        | {"top_k": "optional count", "top_p": "share", "stop_token": "token", "max_length": "optional count"},
        lambda o, a: o.shape[0] == 2 and o.shape[1] <= a["num_tokens"] and o.min() >= 0 and o.max() < 19,
    ),
    "load_run": Call(
        load_run,
        lambda f: {"workdir": f / "run", "variant": "linear"},
        FOLDER | {"variant": "variant"},
        lambda o, a: bool(o.best),
    ),
    "read_run": Call(read_run, lambda f: {"workdir": f / "run"}, FOLDER, lambda o, a: o.variants == ["linear"]),
    "TrainedVariant.params": Call(
        _params_of,
        lambda f: {"workdir": f / "run", "seed": 1, "which": "best"},
        {"seed": "known seed", "which": "choice"},
        lambda o, a: "params" in o,
    ),
    "inspection_sequences": Call(
        _inspect, lambda f: {"num": 2, "seq_len": 16}, {"num": "count", "seq_len": "optional count"}, lambda o, a: len(o) == 2
    ),
    "load_task": Call(
        _fixed_task,
        lambda f: {"name": "mqar", "seq_len": 16, "vocab_size": 16, "num_pairs": 2},
        {"name": "task", "seq_len": "count", "vocab_size": "count", "num_pairs": "count"},
        lambda o, a: dataclasses.is_dataclass(o),
    ),
    "make_lam": Call(
        make_lam,
        lambda f: {"lam": "mlp_softplus", "hidden": 8, "activation": "gelu", "init_scheme": "text"},
        {"lam": "lam", "hidden": "optional count", "activation": "choice", "init_scheme": "choice"},
        lambda o, a: hasattr(o, "init"),
    ),
    "import_params": Call(
        import_params,
        lambda f: {"state_dict": _of_fla()[1], "config": _of_fla()[0], "dtype": "float32"},
        {"state_dict": "state dict", "dtype": "dtype"},
        lambda o, a: isinstance(o[0], LanguageSettings),
    ),
    "export_params": Call(
        export_params,
        lambda f: {"settings": SETTINGS, "params": _params()},
        {"settings": "settings", "params": "parameters"},
        lambda o, a: "lm_head.weight" in o[1],
    ),
}  # fmt: skip
ALSO = {"lam_hidden": "hidden", "lam_activation": "activation", "name": "task"}  # an argument by its setting's name


@dataclasses.dataclass(frozen=True)
class Case:
    call: str
    argument: str
    change: Change

    def __str__(self) -> str:
        return f"{self.call}({self.argument}={self.change.what})"


def prepare(folder: Path, cases: Sequence[Case]) -> None:
    runs.make_run(runs.run_flags("recall", folder, {"train.num_steps": 10, "variants": "linear"}), folder / "run")


def make_case(rng: random.Random, number: int) -> Case:
    names = list(CALLS)
    call = names[number] if number < len(names) else rng.choice(names)  # each at least once
    argument = rng.choice(sorted(CALLS[call].sorts))
    sort = CALLS[call].sorts[argument]
    return Case(call, argument, rng.choice(_fla_changes(_of_fla()) if sort == "state dict" else SORTS[sort]))


def run_case(case: Case, folder: Path) -> Outcome:
    call, change = CALLS[case.call], case.change
    good = call.good(folder)
    arguments = good | {case.argument: change.change(good[case.argument])}
    try:
        out = jax.block_until_ready(call.function(**arguments))
    except (ValueError, TypeError, KeyError) as error:
        names = (case.argument, *change.names, *(setting for setting, name in ALSO.items() if name == case.argument))
        failure = line_failure(str(error), names)
        if failure is not None:
            failure = f"{failure.partition(':')[0]}: {traceback_failure(error)}"
        return Outcome("refused by name" if failure is None else "refused otherwise", failure)
    except Exception as error:
        return Outcome("another exception", f"{type(error).__name__}: {traceback_failure(error)}")
    if not change.harmless:
        return Outcome("accepted", "accepted: what can't be right")
    return Outcome("accepted", None if call.right(out, arguments) else "accepted: the output is not as documented")

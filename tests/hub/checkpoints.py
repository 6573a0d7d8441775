"""Small random checkpoints of every architecture: names and shapes as its own code makes them."""

import json

import jax.numpy as jnp
import numpy as np
import tokenizers
from safetensors.flax import save_file as save_jax
from safetensors.numpy import save_file

MAMBA = {
    "vocab_size": 19, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "expand": 1, "state_size": 16,
    "n_groups": 2, "conv_kernel": 4, "use_conv_bias": True, "norm_eps": 1e-5, "hidden_act": "silu", "use_bias": False,
    "rmsnorm": True, "norm_before_gate": False, "D_has_hdim": False, "residual_in_fp32": False, "tie_word_embeddings": False,
    "dt_limit": [0.0, float("inf")], "torch_dtype": "bfloat16",
}  # fmt: skip
GUOS_MAMBA = {name: value for name, value in MAMBA.items() if name not in ("norm_eps", "rmsnorm", "dt_limit")} | {
    "layer_norm_epsilon": 1e-5, "rms_norm": True, "time_step_limit": [0.0, float("inf")]
}  # fmt: skip
DELTA = {
    "vocab_size": 19, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "num_v_heads": 4, "head_dim": 8,
    "expand_v": 2.0, "conv_size": 4, "norm_eps": 1e-6, "hidden_act": "swish", "use_gate": True, "use_short_conv": True,
    "hidden_ratio": 4, "intermediate_size": None, "allow_neg_eigval": True, "attn": None, "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}  # fmt: skip
CONFIGS = {
    "LogLinearMamba2ForCausalLM": MAMBA | {"model_type": "log_linear_mamba2"},
    "Mamba2ForCausalLM": MAMBA | {"model_type": "mamba2", "expand": 1, "residual_in_fp32": True},
    "GatedDeltaNetForCausalLM": DELTA | {"model_type": "gated_deltanet"},
    "HAttentionForCausalLM": GUOS_MAMBA | {"model_type": "hattention"},
    "HGatedDeltaNetForCausalLM": DELTA
    | {"model_type": "h_gated_deltanet", "num_heads": 4, "num_v_heads": None, "allow_neg_eigval": False},
}
LEVELS = 7


def shapes(config, levels=LEVELS):
    c = config
    hidden, layers = c["hidden_size"], range(c["num_hidden_layers"])
    mlp = {f"mlp.{n}_proj.weight": (256, hidden) for n in ("gate", "up")} | {"mlp.down_proj.weight": (hidden, 256)}
    mlp["mlp_norm.weight"] = (hidden,)
    if "delta" in c["model_type"]:
        heads = c["num_v_heads"] or c["num_heads"]
        keys, values = c["num_heads"] * c["head_dim"], int(heads * c["head_dim"] * c["expand_v"])
        block = {
            f"attn.{n}_proj.weight": (size, hidden)
            for n, size in zip("qkvgab", (keys, keys, values, values, heads, heads), strict=True)
        }
        block |= {
            f"attn.{n}_conv1d.weight": (size, 1, c["conv_size"])
            for n, size in zip("qkv", (keys, keys, values), strict=True)
        }
        block |= {"attn.A_log": (heads,), "attn.dt_bias": (heads,), "attn.o_norm.weight": (values // heads,)}
        block |= {"attn.o_proj.weight": (hidden, values), "attn_norm.weight": (hidden,)} | mlp
        if c["model_type"] == "h_gated_deltanet":
            block |= {"attn.l_proj.weight": (heads * levels, hidden), "attn.L": (heads, levels)}
        outside = {"model.embeddings.weight": (c["vocab_size"], hidden), "model.norm.weight": (hidden,)}
        prefix = "model.layers"
    else:
        heads, alone = c["num_heads"], c["model_type"] == "mamba2"
        inner, channels = heads * c["head_dim"], heads * c["head_dim"] + 2 * c["n_groups"] * c["state_size"]
        block = {f"mixer.{n}": (heads,) for n in ("A_log", "D", "dt_bias")}
        block |= {"mixer.conv1d.weight": (channels, 1, c["conv_kernel"]), "mixer.conv1d.bias": (channels,)}
        block |= {"mixer.norm.weight": (inner,), "mixer.out_proj.weight": (hidden, inner)}
        block["mixer.in_proj.weight"] = (inner + channels + heads * (1 if alone else 1 + levels), hidden)
        if alone:
            block["norm.weight"] = (hidden,)
        else:
            block |= {"mixer_norm.weight": (hidden,), "mixer.L": (heads, levels)} | mlp
        outside = {"backbone.embeddings.weight": (c["vocab_size"], hidden), "backbone.norm_f.weight": (hidden,)}
        prefix = "backbone.layers"
    outside["lm_head.weight"] = (c["vocab_size"], hidden)
    return outside | {f"{prefix}.{i}.{name}": shape for i in layers for name, shape in block.items()}


def draw(config, seed=0, levels=LEVELS):
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(scale=0.4, size=shape) + ("norm" in name)).astype(np.float32)
        for name, shape in shapes(config, levels).items()
    }


def write(folder, architecture="GatedDeltaNetForCausalLM", shards=1, dtype=None):
    """The folder as others write it. Returns (config, arrays)."""
    config, arrays = CONFIGS[architecture], draw(CONFIGS[architecture])
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}), encoding="utf-8")
    if dtype:
        save_jax({name: jnp.asarray(x, dtype) for name, x in arrays.items()}, folder / "model.safetensors")
    elif shards == 1:
        save_file(arrays, folder / "model.safetensors")
    else:
        parts = [dict(list(arrays.items())[i::shards]) for i in range(shards)]
        files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
        for part, file in zip(parts, files, strict=True):
            save_file(part, folder / file)
        weight_map = {name: file for part, file in zip(parts, files, strict=True) for name in part}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8"
        )
    return config, arrays


def write_tokenizer(folder, words):
    """One that knows w0, w1, .. and nothing else."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))

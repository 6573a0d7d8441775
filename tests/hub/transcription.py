"""The models of others, written down once more: from config.json and arrays by their names to logits, in float64, by the
definition of each recurrence, one token after the other. Shares nothing with the package."""

import numpy as np


def logits(config, arrays, tokens):
    """[T, vocab] for one sequence of token ids."""
    x = {name: np.asarray(value, np.float64) for name, value in arrays.items()}
    delta = "delta" in config["model_type"]
    outside = "model" if delta else "backbone"
    h = x[f"{outside}.embeddings.weight"][tokens]
    epsilon = config["layer_norm_epsilon"] if config["model_type"] == "hattention" else config["norm_eps"]
    for layer in range(config["num_hidden_layers"]):
        of = lambda name, layer=layer: x[f"{outside}.layers.{layer}.{name}"]  # noqa: E731
        alone = config["model_type"] == "mamba2"
        first = "norm" if alone else "attn_norm" if delta else "mixer_norm"
        mixer = delta_mixer if delta else mamba_mixer
        h = h + mixer(config, of, rms_norm(h, of(f"{first}.weight"), epsilon), epsilon)
        if not alone:
            y = rms_norm(h, of("mlp_norm.weight"), epsilon)
            y = silu(y @ of("mlp.gate_proj.weight").T) * (y @ of("mlp.up_proj.weight").T)
            h = h + y @ of("mlp.down_proj.weight").T
    h = rms_norm(h, x[f"{outside}.{'norm' if delta else 'norm_f'}.weight"], epsilon)
    return h @ x.get("lm_head.weight", x[f"{outside}.embeddings.weight"]).T


def mamba_mixer(config, of, x, epsilon):
    heads, width, state, groups = (config[name] for name in ("num_heads", "head_dim", "state_size", "n_groups"))
    inner, keys = heads * width, groups * state
    z, xbc, dt, dl = np.split(x @ of("mixer.in_proj.weight").T, np.cumsum([inner, inner + 2 * keys, heads]), axis=1)
    bias = of("mixer.conv1d.bias") if config["use_conv_bias"] else 0
    v, k, q = np.split(conv(xbc, of("mixer.conv1d.weight")) + bias, [inner, inner + keys], axis=1)
    v, k, q = (silu(y).reshape(len(x), -1, size) for y, size in ((v, width), (k, state), (q, state)))
    k, q = (np.repeat(y, heads // groups, axis=1) for y in (k, q))
    step = softplus(dt + of("mixer.dt_bias"))
    decay = np.exp(-np.exp(of("mixer.A_log")) * step)
    lam = None if config["model_type"] == "mamba2" else softplus(of("mixer.L") * dl.reshape(len(x), heads, -1))
    y = recurrence(q, k, v * step[..., None], decay, np.zeros_like(decay), lam) + of("mixer.D")[:, None] * v
    y = y.reshape(len(x), inner) * silu(z)
    parts = y.reshape(len(x), 1 if config["model_type"] == "hattention" else groups, -1)
    y = rms_norm(parts, 1, epsilon).reshape(len(x), inner) * of("mixer.norm.weight")
    return y @ of("mixer.out_proj.weight").T


def delta_mixer(config, of, x, epsilon):
    keys_of, width = config["num_heads"], config["head_dim"]
    heads = config.get("num_v_heads") or keys_of
    q, k, v = (silu(conv(x @ of(f"attn.{n}_proj.weight").T, of(f"attn.{n}_conv1d.weight"))) for n in "qkv")
    q, k = (y.reshape(len(x), keys_of, width) for y in (q, k))
    q, k = (y / np.sqrt(np.sum(y**2, axis=-1, keepdims=True) + 1e-6) for y in (q, k))
    q, k = (np.repeat(y, heads // keys_of, axis=1) for y in (q * width**-0.5, k))
    v = v.reshape(len(x), heads, -1)
    beta = (1 + config.get("allow_neg_eigval", False)) / (1 + np.exp(-(x @ of("attn.b_proj.weight").T)))
    decay = np.exp(-np.exp(of("attn.A_log")) * softplus(x @ of("attn.a_proj.weight").T + of("attn.dt_bias")))
    lam = None
    if config["model_type"] == "h_gated_deltanet":
        dl = (x @ of("attn.l_proj.weight").T).reshape(len(x), heads, -1)
        lam = softplus(of("attn.L") * dl) / width**-0.5
    y = recurrence(q, k, v * beta[..., None], decay, beta, lam)
    y = rms_norm(y, of("attn.o_norm.weight"), epsilon) * silu(x @ of("attn.g_proj.weight").T).reshape(v.shape)
    return y.reshape(len(x), -1) @ of("attn.o_proj.weight").T


def recurrence(q, k, written, decay, beta, lam):
    """One matrix for each earlier token: what it wrote, and what later ones have left of it. [T, H, V]"""
    out = np.zeros_like(written)
    for head in range(written.shape[1]):
        past = []
        for t in range(len(q)):
            key = k[t, head]
            past = [decay[t, head] * (s - beta[t, head] * np.outer(key, key @ s)) for s in past]
            past.append(np.outer(key, written[t, head]))
            for s, state in enumerate(past):
                weight = 1 if lam is None else lam[t, head, (t ^ s).bit_length()]
                out[t, head] += weight * (q[t, head] @ state)
    return out


def conv(x, weight):
    """Causal and depthwise; weight [channels, 1, width]."""
    width = weight.shape[2]
    padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
    return sum(padded[j : j + len(x)] * weight[:, 0, j] for j in range(width))


def rms_norm(x, weight, epsilon):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def softplus(x):
    return np.log1p(np.exp(x))

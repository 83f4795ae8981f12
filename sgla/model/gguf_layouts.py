"""The GGUF architectures of families, made of their entries (``families``). Loads no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sgla.hub.gguf_layout import HF_KEYS, HFTensor, Layout, Stored
from sgla.model.family import QK_NORM, Family
from sgla.model.gguf_words import Gguf, one

_QKV = (("q", "qd"), ("k", "kd"), ("v", "kd"))
_OF_EXPERTS = {name for key, names in HF_KEYS.items() if key.startswith("expert_") for name in names}


def layout_of(architecture: str, family: Family, gguf: Gguf) -> Layout:
    known = frozenset(family.defaults) - (_OF_EXPERTS if gguf.dense else set())
    if gguf.top:
        return Layout(
            gguf.name,
            f"{architecture}{gguf.head}",
            family.types[0],
            known,
            family.fixed,
            gguf.tensors,
            gguf.missing,
            only={key: (value,) for key, value in gguf.when.items()},
            when=gguf.when,
            eps=f"attention.layer_norm_{'rms_' if 'rms_norm_eps' in known else ''}epsilon",
            shift=family.norm_offset,
            keys=gguf.keys,
            full_first=gguf.full_first,
            encoder=True,
            top=gguf.top,
            layers=gguf.layers,
        )
    rope = family.defaults.get("rope_parameters") or {}
    return Layout(
        gguf.name,
        architecture,
        family.types[0],
        known,
        family.fixed,
        dict(_tensors(family, gguf)),
        gguf.missing,
        {"expert_gating_func": gguf.gating} if _is_mixture(family, gguf) else {},
        gguf.when,
        eps=f"attention.layer_norm_{'rms_' if _is_rms(family) else ''}epsilon",
        shift=family.norm_offset,
        permuted=gguf.permuted,
        latent=_is_latent(family),
        mixture=_is_mixture(family, gguf),
        scans=gguf.scans,
        first_mamba=gguf.first_mamba,
        names={ours: theirs for theirs, ours in family.names.items()},
        keys=gguf.keys,
        convolves=gguf.convolves,
        deltas=gguf.deltas,
        kinds=gguf.kinds,
        wider=gguf.wider,
        altup=gguf.altup,
        last_norm=gguf.last_norm,
        by_width=gguf.by_width,
        windows_optional=gguf.windows_optional,
        longrope=family.longrope or gguf.longrope,
        mscales=family.mscales,
        yarn={"truncate": rope["truncate"]} if "truncate" in rope else {},
        stretched="factor" in rope,
        growing=family.growing,
        xielu=family.defaults.get("hidden_act") == "xielu",
        learned=family.learned,
        head_bias=family.head_bias,
        pooled=family.pooled and not gguf.both_ways,
        sees=gguf.sees,
        judges=gguf.judges,
    )


def _is_mixture(family: Family, gguf: Gguf) -> bool:
    mixed = bool(family.mixture) or "num_local_experts" in family.defaults
    return mixed and not gguf.shared and not gguf.dense


def _is_rms(family: Family) -> bool:
    """What files call the number that norms add, after HF's name of it."""
    return family.norm == "rms" or "rms_norm_eps" in family.defaults


def _is_latent(family: Family) -> bool:
    return "kv_lora_rank" in family.defaults


def _tensors(family: Family, gguf: Gguf) -> Iterator[tuple[str, Stored]]:
    found = _parts(family, gguf)
    alone = gguf.scans in ("alone", "only")
    return ((name, _alone(stored)) for name, stored in found) if alone else found


def _alone(stored: Stored) -> Stored:
    """A part that is a layer has its name."""
    tensors = (
        tensor._replace(name=re.sub(r"^(self_attn|mamba|mlp)\.", "mixer.", tensor.name))
        for tensor in stored.tensors
    )
    return replace(stored, tensors=tuple(tensors))


def _parts(family: Family, gguf: Gguf) -> Iterator[tuple[str, Stored]]:
    for name, hf in gguf.norms.items():
        yield f"{name}.weight", one(f"{hf}.weight", "d")
        if family.norm == "layer" and family.norm_bias:
            yield f"{name}.bias", one(f"{hf}.bias", "d")
    if gguf.scans:
        mamba = _first_mamba if gguf.first_mamba else _mamba
        yield from mamba(family, "" if gguf.scans == "beside" else "mamba")
    if gguf.scans == "only":
        return
    mixer = _latent(family) if _is_latent(family) else _attention(family, bool(gguf.deltas))
    if gguf.scans in ("instead", "alone") or gguf.convolves or gguf.deltas:
        both = ("attn_q.weight", "attn_output.weight") if gguf.deltas == "channels" else ()
        mixer = (
            (name, stored if name in both else replace(stored, mixer="attention")) for name, stored in mixer
        )
    yield from mixer
    if gguf.convolves:
        yield from _convolution()
    if gguf.deltas:
        yield from _channel_delta() if gguf.deltas == "channels" else _delta(gguf)
    mlp = _mlp(family, gguf)
    if gguf.scans == "alone":
        mlp = ((name, replace(stored, mixer="mlp")) for name, stored in mlp)
    yield from mlp
    yield from gguf.tensors.items()


def _attention(family: Family, gated: bool = False) -> Iterator[tuple[str, Stored]]:
    """``gated``: the rows of queries are each head's, and its gate's."""
    known = family.defaults
    names = ("use_qkv_bias", "qkv_bias", "use_bias", "attention_bias")
    bias = next((key for key in names if key in known and key not in family.names), "")
    for part, dims in _QKV:
        rows = "Qd" if gated and part == "q" else dims
        yield f"attn_{part}.weight", one(f"self_attn.{part}_proj.weight", rows)
        if family.qkv_bias or family.biased or bias:
            flag = "" if family.qkv_bias or family.biased else bias
            yield f"attn_{part}.bias", one(f"self_attn.{part}_proj.bias", dims[0], flag=flag)
    yield "attn_output.weight", one("self_attn.o_proj.weight", "dq")
    out = "attention_out_bias"
    if out not in known:
        out = bias if family.out_bias and bias in ("use_bias", "attention_bias") else ""
    if out or family.biased:
        yield "attn_output.bias", one("self_attn.o_proj.bias", "d", flag=out)
    if family.qk_norm and family.qk_norm != "unit":
        q, k = {"head": ("h", "h"), "heads": ("nh", "Nh")}.get(family.qk_norm, ("q", "k"))
        flag = next((key for key in QK_NORM if key in known), "")
        each = ".{e}" if family.qk_norm == "heads" else ""
        yield "attn_q_norm.weight", one(f"self_attn.q_norm{each}.weight", q, flag=flag)
        yield "attn_k_norm.weight", one(f"self_attn.k_norm{each}.weight", k, flag=flag)
    if family.sinks:
        yield "attn_sinks.weight", one("self_attn.sinks", "n")


def _latent(family: Family) -> Iterator[tuple[str, Stored]]:
    """Of the matrix that makes keys and values of the latent newer files have two, of which that of the keys
    is transposed."""
    yield "attn_q.weight", one("self_attn.q_proj.weight", "ud", unless="a")
    yield "attn_q_a.weight", one("self_attn.q_a_proj.weight", "ad")
    yield "attn_q_a_norm.weight", one("self_attn.q_a_layernorm.weight", "a")
    yield "attn_q_b.weight", one("self_attn.q_b_proj.weight", "ua")
    yield "attn_kv_a_mqa.weight", one("self_attn.kv_a_proj_with_mqa.weight", "ld")
    yield "attn_kv_a_norm.weight", one("self_attn.kv_a_layernorm.weight", "r")
    yield "attn_kv_b.weight", one("self_attn.kv_b_proj.weight", "br")
    yield "attn_k_b.weight", one("self_attn.k_b_proj.weight", "nrg")
    yield "attn_v_b.weight", one("self_attn.v_b_proj.weight", "nyr")
    yield "attn_output.weight", one("self_attn.o_proj.weight", "do")
    if "index_topk" in family.defaults:
        for name, hf, dims in (
            ("attn_q_b.weight", "wq_b.weight", "Ia"),
            ("attn_k.weight", "wk.weight", "Dd"),
            ("k_norm.weight", "k_norm.weight", "D"),
            ("k_norm.bias", "k_norm.bias", "D"),
            ("proj.weight", "weights_proj.weight", "Hd"),
        ):
            yield f"indexer.{name}", one(f"self_attn.indexer.{hf}", dims, layers="picks")


def _convolution() -> Iterator[tuple[str, Stored]]:
    parts = tuple(HFTensor(f"conv.{part}.weight", "dd") for part in ("before", "behind", "x"))
    yield "shortconv.in_proj.weight", Stored(parts, mixer="conv")
    yield "shortconv.conv.weight", one("conv.conv.weight", "dw", mixer="conv")
    yield "shortconv.out_proj.weight", one("conv.out_proj.weight", "dd", mixer="conv")


def _delta(gguf: Gguf) -> Iterator[tuple[str, Stored]]:
    rates = [("ssm_beta", "in_proj_b", "zd"), ("ssm_alpha", "in_proj_a", "zd")]
    if gguf.deltas == "joined":
        rates = [("ssm_ba", "in_proj_ba", "Zd")]
        yield "ssm_in.weight", one("linear_attn.in_proj_qkvz.weight", "id", mixer="delta")
    for name, hf, dims in (
        ("attn_qkv.weight", "in_proj_qkv.weight", "cd"),
        ("attn_gate.weight", "in_proj_z.weight", "jd"),
        *((f"{name}.weight", f"{hf}.weight", dims) for name, hf, dims in rates),
        ("ssm_conv1d.weight", "conv1d.weight", "cw"),
        ("ssm_dt.bias", "dt_bias", "z"),
        ("ssm_a", "A_log", "z"),
        ("ssm_norm.weight", "norm.weight", "p"),
        ("ssm_out.weight", "out_proj.weight", "dj"),
    ):
        yield name, one(f"linear_attn.{hf}", dims, mixer="delta")


def _channel_delta() -> Iterator[tuple[str, Stored]]:
    """Beside what latent attention calls alike: the matrices of queries and of what comes out."""
    for name, hf, dims in (
        ("attn_k.weight", "k_proj.weight", "jd"),
        ("attn_v.weight", "v_proj.weight", "jd"),
        *((f"ssm_conv1d_{part}.weight", f"{part}_conv1d.weight", "j1w") for part in "qkv"),
        ("ssm_f_a.weight", "f_a_proj.weight", "pd"),
        ("ssm_f_b.weight", "f_b_proj.weight", "jp"),
        ("ssm_g_a.weight", "g_a_proj.weight", "pd"),
        ("ssm_g_b.weight", "g_b_proj.weight", "jp"),
        ("ssm_beta.weight", "b_proj.weight", "zd"),
        ("ssm_a", "A_log", "z1"),
        ("ssm_dt.bias", "dt_bias", "j"),
        ("ssm_norm.weight", "o_norm.weight", "p"),
    ):
        yield name, one(f"self_attn.{hf}", dims, mixer="delta")


def _mamba(family: Family, mixer: Any) -> Iterator[tuple[str, Stored]]:
    norm = "mamba_rms_norm" if "mamba_rms_norm" in family.defaults else ""
    for name, hf, dims, flag in (
        ("ssm_in.weight", "in_proj.weight", "id", ""),
        ("ssm_conv1d.weight", "conv1d.weight", "cw", ""),
        ("ssm_conv1d.bias", "conv1d.bias", "c", _conv_bias(family)),
        ("ssm_dt.bias", "dt_bias", "z", ""),
        ("ssm_a", "A_log", "z1", ""),
        ("ssm_d", "D", "z1", ""),
        ("ssm_norm.weight", "norm.weight", "xp", norm),
        ("ssm_out.weight", "out_proj.weight", "dj", ""),
    ):
        yield name, one(f"mamba.{hf}", dims, flag=flag, mixer=mixer)


def _first_mamba(family: Family, mixer: Any) -> Iterator[tuple[str, Stored]]:
    for name, hf, dims, flag in (
        ("ssm_in.weight", "in_proj.weight", "id", ""),
        ("ssm_conv1d.weight", "conv1d.weight", "cw", ""),
        ("ssm_conv1d.bias", "conv1d.bias", "c", _conv_bias(family)),
        ("ssm_x.weight", "x_proj.weight", "Tj", ""),
        ("ssm_dt.weight", "dt_proj.weight", "jR", ""),
        ("ssm_dt.bias", "dt_proj.bias", "j", ""),
        ("ssm_a", "A_log", "jS", ""),
        ("ssm_d", "D", "j", ""),
        ("ssm_out.weight", "out_proj.weight", "dj", ""),
    ):
        yield name, one(f"mamba.{hf}", dims, flag=flag, mixer=mixer)
    if "mamba_inner_layernorms" in family.fixed:
        for part, dims in (("dt", "R"), ("b", "S"), ("c", "S")):
            yield f"ssm_{part}_norm.weight", one(f"mamba.{part}_layernorm.weight", dims, mixer=mixer)


def _conv_bias(family: Family) -> str:
    return next(key for key in ("mamba_conv_bias", "use_conv_bias") if key in family.defaults)


def _mlp(family: Family, gguf: Gguf) -> Iterator[tuple[str, Stored]]:
    known = family.defaults
    parts = {"ffn_up": (gguf.mlp[0], "fd"), "ffn_down": (gguf.mlp[1], "df")}
    if family.gated:
        parts = {"ffn_gate": ("gate_proj", "fd"), **parts}
    mixture, module = _is_mixture(family, gguf), "mlp.shared_experts" if gguf.shared else "mlp"
    layers: Any = "dense" if mixture else "all"
    flag = next((key for key in ("mlp_bias", "use_bias") if key in known), "")
    held = {name: one(f"{module}.{hf}.weight", dims, layers=layers) for name, (hf, dims) in parts.items()}
    if gguf.joined:
        up = held["ffn_up"]
        held["ffn_up"] = replace(up, tensors=held.pop("ffn_gate").tensors + up.tensors)
    for name, stored in held.items():
        yield f"{name}.weight", stored
        if (flag or family.biased or gguf.mlp_bias) and not mixture:
            biases = tuple(HFTensor(p.name.replace(".weight", ".bias"), p.dims[0]) for p in stored.tensors)
            yield f"{name}.bias", Stored(biases, flag=flag)
    if not mixture:
        return
    yield "ffn_gate_inp.weight", one("mlp.gate.weight", "ed", layers="sparse")
    for part, dims in (("gate", "md"), ("up", "md"), ("down", "dm")):
        if part == "gate" and not family.gated:
            continue
        read = dims.replace("d", "E") if "moe_latent_size" in known else dims
        hf = f"mlp.experts.{{e}}.{part}_proj.weight"
        yield f"ffn_{part}_exps.weight", one(hf, f"e{read}", layers="sparse")
        shared = f"mlp.shared_experts.{part}_proj.weight"
        yield f"ffn_{part}_shexp.weight", one(shared, dims.replace("m", "s"), layers="sparse")
    if "moe_latent_size" in known:
        yield "ffn_latent_down.weight", one("mlp.fc1_latent_proj.weight", "Ld", layers="sparse")
        yield "ffn_latent_up.weight", one("mlp.fc2_latent_proj.weight", "dL", layers="sparse")

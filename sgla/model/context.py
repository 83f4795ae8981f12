"""Whether ranks can share out the tokens of prompts (``--cp``). Loads no torch."""

from __future__ import annotations

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.model.apart import check_apart
from sgla.model.encoder import EncoderSpec
from sgla.model.generic_spec import GenericSpec
from sgla.model.indexed_spec import IndexedSpec
from sgla.model.spec import ModelSpec

# Settings that it is not together with, and why; all others are.
REFUSED = {
    "deterministic": "sums depend on how a step is shared out",
    "enable_lora": "adapters have not been tried with it",
    "kv_disk": "ranks would keep the same prefixes several times",
    "kv_host_bytes": "ranks would keep the same prefixes several times",
    "kv_host_ratio": "ranks would keep the same prefixes several times",
    "kv_store": "ranks would keep the same prefixes several times",
    "role": "the servers would have to be cut alike",
    "encode_url": "pictures are not taken",
    "logits_processors": "they have not been tried with it",
    "cpu_offload_gb": "it has not been tried with it",
    "enable_torch_compile": "a module of transformers is not cut so",
    "enable_return_routed_experts": "a rank knows those of its own tokens alone",
}


def check_cp(config: Config, device: str, spec: ModelSpec | EncoderSpec | None, vectors: bool) -> None:
    """Raise ConfigError for what ``--cp`` cannot be together with. ``spec``: None if the model is not known;
    ``vectors``: it answers with some."""
    if config.cp == 1:
        return
    obstacle = None
    if config.executor not in ("procs", "fake", "ray"):
        obstacle = f"with --executor {config.executor}"
    elif device not in ("cpu", "cuda"):
        obstacle = f"on --device {device}"
    elif vectors or isinstance(spec, EncoderSpec):
        obstacle = "by a model that answers with vectors"
    elif isinstance(spec, GenericSpec):
        obstacle = "by a model that runs through transformers' module"
    elif config.kv_cache_dtype == "int4":
        obstacle = "with --kv-cache-dtype int4, whose scales are not exchanged"
    elif spec is not None:
        obstacle = _of_model(spec)
    if obstacle:
        raise ConfigError(f"--cp {config.cp} cannot be honoured {obstacle}; use --tp", param="cp")
    check_apart(config, "--cp", REFUSED)


def _of_model(spec: ModelSpec) -> str | None:
    if spec.recurrent:
        return "by a model whose layers keep a state of all tokens, one after the other"
    if spec.heard or spec.canvas:
        return f"by {spec.architecture}"
    if any(isinstance(layer, IndexedSpec) for layer in spec.attention):
        return "by a model whose layers pick the tokens that they read"
    if any(layer.beside() for layer in spec.attention):
        return "by a model whose layers make entries of tokens that lie together"
    return None

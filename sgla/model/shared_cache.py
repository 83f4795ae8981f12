"""Whether ranks can share out the tokens of a KV cache (``--dcp``). Loads no torch."""

from __future__ import annotations

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.model.apart import check_apart
from sgla.model.encoder import EncoderSpec
from sgla.model.indexed_spec import IndexedSpec
from sgla.model.latent_spec import LatentSpec
from sgla.model.spec import ModelSpec

# Settings that it is not together with, and why; all others are.
REFUSED = {
    "pp": "stages have not been tried with it",
    "cp": "those ranks have the whole cache",
    "nnodes": "its ranks are on one host",
    "dp_attention": "those ranks have caches of their own",
    "speculative_algorithm": "it has not been tried with it",
    "enable_lora": "adapters have not been tried with it",
    "kv_disk": "a rank has a part of a page",
    "kv_host_bytes": "a rank has a part of a page",
    "kv_host_ratio": "a rank has a part of a page",
    "kv_store": "a rank has a part of a page",
    "role": "a rank has a part of a page",
    "encode_url": "pictures are not taken",
    "cpu_offload_gb": "it has not been tried with it",
    "enable_torch_compile": "a module of transformers is not cut so",
}


def check_dcp(config: Config, device: str, spec: ModelSpec | EncoderSpec | None, vectors: bool) -> None:
    """Raise ConfigError for what ``--dcp`` cannot be together with. ``spec``: None if the model is not known;
    ``vectors``: it answers with some."""
    if config.dcp == 1:
        return
    obstacle = None
    if config.dcp != config.tp:
        obstacle = f"with --tp {config.tp}: give both the same number"
    elif config.page_size % config.dcp:
        obstacle = f"with --page-size {config.page_size}, which it does not divide"
    elif config.executor not in ("procs", "fake"):
        obstacle = f"with --executor {config.executor}"
    elif device not in ("cpu", "cuda"):
        obstacle = f"on --device {device}; leave it out"
    elif vectors:
        obstacle = "by a model that answers with vectors"
    elif spec is not None:
        obstacle = _of_model(config, spec)
    if obstacle:
        raise ConfigError(f"--dcp {config.dcp} cannot be honoured {obstacle}", param="dcp")
    check_apart(config, "--dcp", REFUSED)


def _of_model(config: Config, spec: ModelSpec | EncoderSpec) -> str | None:
    if not isinstance(spec, ModelSpec) or not all(isinstance(layer, LatentSpec) for layer in spec.attention):
        return "by a model whose layers do not all keep latents; --tp shares out their heads"
    if any(isinstance(layer, IndexedSpec) or layer.window for layer in spec.attention):
        return "by a model whose layers pick the tokens that they read"
    if any(layer.heads % config.tp for layer in spec.attention):
        return f"by a model whose heads --tp {config.tp} does not divide"
    return None

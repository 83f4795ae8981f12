"""Whether ranks can have attention and requests of their own (``--dp-attention``). Loads no torch."""

from __future__ import annotations

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.model.apart import check_apart
from sgla.model.encoder import EncoderSpec
from sgla.model.generic_spec import GenericSpec
from sgla.model.spec import ModelSpec

# Settings that it is not together with, and why; all others are.
REFUSED = {
    "enable_lora": "places of adapters are of one scheduler",
    "kv_disk": "copies are of one scheduler",
    "kv_host_bytes": "copies are of one scheduler",
    "kv_host_ratio": "copies are of one scheduler",
    "kv_store": "copies are of one scheduler",
    "kv_events_config": "events are of one scheduler",
    "role": "KV is handed over by one scheduler",
    "encode_url": "pictures are not taken",
    "logits_processors": "they have not been tried with it",
    "enable_return_routed_experts": "experts see the tokens of all ranks",
    "cpu_offload_gb": "it has not been tried with it",
    "enable_torch_compile": "a module of transformers is not cut so",
}
# Architectures whose layers share out what is behind attention in a way of their own.
OTHERS = ("DeepseekV4", "Gemma4", "LongcatFlash", "NemotronH", "Whisper")


def check_data(config: Config, device: str, spec: ModelSpec | EncoderSpec | None, vectors: bool) -> None:
    """Raise ConfigError for what ``--dp-attention`` cannot be together with. ``spec``: None if the model is
    not known; ``vectors``: it answers with some."""
    if not config.dp_attention:
        return
    obstacle = None
    if config.tp == 1:
        obstacle = "with --tp 1, which has nothing to share out; give --tp"
    elif config.executor == "fake" and not config.fake_step_ms:
        obstacle = "with --executor fake without --fake-step-ms, which runs no ranks"
    elif device not in ("cpu", "cuda"):
        obstacle = f"on --device {device}"
    elif vectors or isinstance(spec, EncoderSpec):
        obstacle = "by a model that answers with vectors"
    elif isinstance(spec, GenericSpec):
        obstacle = "by a model that runs through transformers' module"
    elif spec is not None and (spec.heard or spec.canvas or spec.architecture.startswith(OTHERS)):
        obstacle = f"by {spec.architecture}"
    if obstacle:
        raise ConfigError(f"--dp-attention cannot be honoured {obstacle}", param="dp_attention")
    check_apart(config, "--dp-attention", REFUSED)

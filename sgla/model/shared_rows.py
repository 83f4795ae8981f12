"""Whether ranks can share rows out between products (``--sequence-parallel``). Loads no torch."""

from __future__ import annotations

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.model.apart import check_apart
from sgla.model.encoder import EncoderSpec
from sgla.model.generic_spec import GenericSpec
from sgla.model.spec import ModelSpec

# Settings that it is not together with, and why; all others are.
REFUSED = {
    "pp": "a stage hands on the rows of all",
    "cp": "those ranks share the tokens out",
    "dp_attention": "those ranks have rows of their own",
    "enable_lora": "adapters have not been tried with it",
    "speculative_algorithm": "it has not been tried with it",
    "enable_torch_compile": "a module of transformers is not cut so",
}


def check_rows(config: Config, device: str, spec: ModelSpec | EncoderSpec | None, vectors: bool) -> None:
    """Raise ConfigError for what ``--sequence-parallel`` cannot be together with. ``spec``: None if the model
    is not known; ``vectors``: it answers with some."""
    if not config.sequence_parallel:
        return
    obstacle = None
    if config.tp == 1:
        obstacle = "with --tp 1, whose sums are there anyway"
    elif device != "cuda":
        obstacle = f"on --device {device}"
    elif vectors or isinstance(spec, EncoderSpec):
        obstacle = "by a model that answers with vectors"
    elif isinstance(spec, GenericSpec):
        obstacle = "by a model that runs through transformers' module"
    if obstacle:
        raise ConfigError(
            f"--sequence-parallel cannot be honoured {obstacle}; leave it out", param="sequence_parallel"
        )
    check_apart(config, "--sequence-parallel", REFUSED)

"""Whether ranks can compute long steps otherwise than others: share their rows out between products
(``--sequence-parallel``), or as two batches by turns (``--two-batch-overlap``). Loads no torch."""

from __future__ import annotations

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.model.apart import check_apart
from sgla.model.encoder import EncoderSpec
from sgla.model.generic_spec import GenericSpec
from sgla.model.spec import ModelSpec

# Settings that each is not together with, and why; all others are.
REFUSED = {
    "sequence_parallel": {
        "cp": "those ranks share the tokens out",
        "dp_attention": "those ranks have rows of their own",
        "enable_torch_compile": "a module of transformers is not cut so",
    },
    "two_batch_overlap": {
        "cp": "those ranks share the tokens out",
        "dcp": "those ranks exchange queries in attention, too, by the memory that sums pass",
        "dp_attention": "those ranks share a step's tokens with others",
        "sequence_parallel": "its rows come back before the next product",
        "cpu_offload_gb": "each of the batches would copy the weights",
        "enable_torch_compile": "a module of transformers is not cut so",
        "enable_return_routed_experts": "experts of one batch a step are kept",
    },
}


def check_long_steps(
    config: Config, device: str, spec: ModelSpec | EncoderSpec | None, vectors: bool
) -> None:
    """Raise ConfigError for what these cannot be together with. ``spec``: None if the model is not known;
    ``vectors``: it answers with some."""
    for name, refused in REFUSED.items():
        if not getattr(config, name):
            continue
        flag, obstacle = f"--{name.replace('_', '-')}", None
        if config.tp == 1:
            obstacle = "with --tp 1, which has no sums over ranks"
        elif device != "cuda":
            obstacle = f"on --device {device}"
        elif vectors or isinstance(spec, EncoderSpec):
            obstacle = "by a model that answers with vectors"
        elif isinstance(spec, GenericSpec):
            obstacle = "by a model that runs through transformers' module"
        elif name == "two_batch_overlap" and spec is not None and spec.heard:
            obstacle = f"by {spec.architecture}, of which one batch a step tells when words were said"
        if obstacle:
            raise ConfigError(f"{flag} cannot be honoured {obstacle}; leave it out", param=name)
        guesses = config.speculative_algorithm
        if name == "two_batch_overlap" and guesses not in (None, "ngram"):
            raise ConfigError(
                f"--speculative-algorithm {guesses} cannot be honoured with {flag}, where one batch a step "
                "tells what heads read; ngram can",
                param="speculative_algorithm",
            )
        check_apart(config, flag, refused)

"""Whether a model answers with vectors instead of text, and how: from its config.json and the sentence-transformers files.

Loads no torch. The files: ``modules.json`` lists the modules behind the transformer; ``1_Pooling/config.json`` says how
hidden states become one, ``2_Dense/config.json`` describes a linear layer, ``2_Normalize`` has none;
``sentence_bert_config.json`` has the longest input (``max_seq_length``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sgla.errors import ConfigError
from sgla.hub.source import ModelSource
from sgla.messages import Dense, Pooling
from sgla.model.registry import body_of, is_encoder

CLASSIFIER = "ForSequenceClassification"
GENERATES = ("ForCausalLM", "ForConditionalGeneration")
KINDS = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "lasttoken": "last",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
}
NAMED_KINDS = {
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
}
ACTIVATIONS = {"Tanh": "tanh", "Identity": "identity", "ReLU": "relu", "GELU": "gelu", "Sigmoid": "sigmoid"}


def read_pooling(source: ModelSource, task: str = "auto") -> Pooling | None:
    """How the model pools; None if it generates. ``task``: as in the settings.

    Raises ConfigError for a task that the model cannot do, and for modules that are not supported.
    """
    config = source.config
    architecture = str((config.get("architectures") or [""])[0])
    found = _task(architecture, source.folder)
    if task == "auto":
        task = found
    if task in ("generate", "rerank"):
        if found == "classify" or is_encoder(architecture):
            raise ConfigError(f"{architecture} makes no text; leave --task out", param="task")
        return None
    if (task == "classify") != (found == "classify"):
        raise ConfigError(f"--task {task} does not fit {architecture}", param="task")
    text = config | (config.get("text_config") or {})
    if task == "classify":
        return _classifier(architecture, text, source.folder)
    return _embedder(architecture, text, source.folder)


def _task(architecture: str, folder: Path) -> str:
    if architecture.endswith(CLASSIFIER):
        return "classify"
    if architecture.endswith(GENERATES) and not (folder / "modules.json").is_file():
        return "generate"
    return "embed" if body_of(architecture) is not None else "generate"


def _embedder(architecture: str, config: dict[str, Any], folder: Path) -> Pooling:
    """Without a list of modules: the mean as sentence-transformers takes it, or a decoder's last token, of length 1 as
    OpenAI's embeddings are."""
    encoder = is_encoder(architecture)
    modules = _json(folder / "modules.json") or []
    kind = "mean" if encoder else "last"
    size, normalize, dense = _width(config), not modules, []
    for module in modules:
        name, path = str(module.get("type", "")).rpartition(".")[2], folder / str(module.get("path", ""))
        if name == "Pooling":
            kind = _kind(_json(path / "config.json") or {}, path)
        elif name == "Dense":
            layer = _dense(_json(path / "config.json") or {}, path)
            dense.append(layer)
            size = layer.outputs
        elif name == "Normalize":
            normalize = True
        elif name == "LogitScore":
            raise ConfigError(f"{folder} holds a reranker that makes text; add --task rerank", param="task")
        elif name != "Transformer":
            raise ConfigError(f"{folder / 'modules.json'}: module {name!r} is not supported", param="model")
    return Pooling(
        task="embed",
        kind=kind,
        size=size,
        normalize=normalize,
        dense=dense,
        dimensions=_dimensions(architecture, config, folder, bool(modules)),
        encoder=encoder,
        max_length=_max_length(folder),
    )


def _classifier(architecture: str, config: dict[str, Any], folder: Path) -> Pooling:
    names = config.get("id2label") or {}
    count = len(names) or int(config.get("num_labels", 2))
    labels = [str(names.get(str(i), names.get(i, f"LABEL_{i}"))) for i in range(count)]
    encoder = is_encoder(architecture)
    return Pooling(
        task="classify",
        kind="cls" if encoder else "last",
        size=count,
        labels=labels,
        activation=_activation(config, count),
        encoder=encoder,
        max_length=_max_length(folder),
    )


def _width(config: dict[str, Any]) -> int:
    width = config.get("hidden_size", config.get("dim"))  # DistilBERT's name
    if not isinstance(width, int):
        raise ConfigError("config.json lacks 'hidden_size'")
    return width


def _kind(config: dict[str, Any], path: Path) -> str:
    """Of ``1_Pooling/config.json``: flags in older files, a name or a list of them in newer ones."""
    mode = config.get("pooling_mode")
    if mode is not None:
        kinds = [NAMED_KINDS.get(name, "") for name in (mode if isinstance(mode, list) else [mode])]
    else:
        kinds = [
            KINDS.get(key.removeprefix("pooling_mode_"), "")
            for key, on in config.items()
            if on is True and key.startswith("pooling_mode_")
        ]
    if len(kinds) != 1 or not kinds[0]:
        raise ConfigError(
            f"{path / 'config.json'}: this pooling is not supported; {', '.join(KINDS.values())} are"
        )
    return kinds[0]


def _dense(config: dict[str, Any], path: Path) -> Dense:
    activation = ACTIVATIONS.get(str(config.get("activation_function", "Tanh")).rpartition(".")[2])
    if activation is None:
        raise ConfigError(
            f"{path / 'config.json'}: activation {config['activation_function']!r} is not supported"
        )
    whole = config.get("module_input_name", "sentence_embedding") == "sentence_embedding"
    if config.get("use_residual") or not whole:
        raise ConfigError(f"{path / 'config.json'}: only a plain layer behind the pooling is supported")
    return Dense(
        folder=str(path),
        inputs=int(config["in_features"]),
        outputs=int(config["out_features"]),
        bias=bool(config.get("bias", True)),
        activation=activation,
    )


def _activation(config: dict[str, Any], count: int) -> str:
    """What makes scores of the logits: what the file names for cross-encoders, else by the kind of problem."""
    named = (config.get("sentence_transformers") or {}).get("activation_fn")
    named = named or config.get("sbert_ce_default_activation_function")
    if named:
        return {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}.get(
            str(named).rpartition(".")[2], "identity"
        )
    problem = config.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if count == 1 or problem == "multi_label_classification" else "softmax"


def _dimensions(architecture: str, config: dict[str, Any], folder: Path, modules: bool) -> list[int] | None:
    """Lengths that embeddings may be cut to (Matryoshka, arXiv 2205.13147). Qwen3-Embedding is trained for any, which its
    files do not say."""
    allowed = config.get("matryoshka_dimensions")
    if allowed:
        return sorted(int(length) for length in allowed)
    truncated = (_json(folder / "config_sentence_transformers.json") or {}).get("truncate_dim")
    qwen = modules and architecture.startswith("Qwen3For")
    return [] if config.get("is_matryoshka") or truncated or qwen else None


def _max_length(folder: Path) -> int | None:
    length = (_json(folder / "sentence_bert_config.json") or {}).get("max_seq_length")
    return None if length is None else int(length)


def _json(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error

"""Whether a model answers with vectors instead of text, and how:
from its config.json and the sentence-transformers files.

Loads no torch. The files: ``modules.json`` lists the modules behind the transformer;
``1_Pooling/config.json`` says how hidden states become one, ``2_Dense/config.json`` describes a linear layer,
``2_Normalize`` has none; ``sentence_bert_config.json`` has the longest input (``max_seq_length``). A GGUF
file has a key that says how it pools.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sgla.errors import ConfigError
from sgla.hub.reader import Reader, shown
from sgla.hub.source import ModelSource, read_json
from sgla.messages import Dense, Pooling
from sgla.model.dual import dual_pooling
from sgla.model.read import read_spec
from sgla.model.registry import architecture_of, body_of, family_of, is_dual, is_encoder

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
SCORES = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}
MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
MAX_MODULES = 16
MAX_LABELS = 1 << 16
WIDTH = 1 << 17  # of a dense layer, at most
ACTIVATIONS = {"Tanh": "tanh", "Identity": "identity", "ReLU": "relu", "GELU": "gelu", "Sigmoid": "sigmoid"}


def read_pooling(source: ModelSource, task: str = "auto") -> Pooling | None:
    """How the model pools; None if it generates. ``task``: as in the settings.

    Raises ConfigError for a task that the model cannot do, and for modules that are not supported.
    """
    config = source.config
    architecture = architecture_of(config)
    if is_dual(config):
        if task not in ("auto", "embed"):
            raise ConfigError(f"--task {task} does not fit {architecture}", param="task")
        return dual_pooling(architecture, config)
    stated = source.gguf().pooled if source.gguf_path is not None else ""
    if source.gguf_path is not None and source.gguf().judges and task not in ("rerank", "generate"):
        raise judge(source.gguf_path)
    found = "embed" if stated else _task(architecture, source.folder)
    if task == "auto":
        task = found
    if task in ("generate", "rerank"):
        if found == "classify" or is_encoder(architecture):
            raise ConfigError(f"{architecture} makes no text; leave --task out", param="task")
        return None
    if (task == "classify") != (found == "classify"):
        raise ConfigError(f"--task {task} does not fit {architecture}", param="task")
    if task == "classify":
        return _classifier(architecture, config, source.folder)
    pooling = _embedder(architecture, config, source.folder, stated)
    for outputs, inputs in source.gguf().dense if stated else ():
        pooling.dense.append(Dense(folder="", inputs=inputs, outputs=outputs, bias=False))
        pooling.size = outputs
    return pooling


def judge(path: Path) -> ConfigError:
    return ConfigError(f"{path} holds a reranker that makes text; add --task rerank", param="task")


def _task(architecture: str, folder: Path) -> str:
    if architecture.endswith(CLASSIFIER):
        return "classify"
    if architecture.endswith(GENERATES) and not (folder / "modules.json").is_file():
        return "generate"
    return "embed" if body_of(architecture) is not None else "generate"


def _embedder(architecture: str, config: dict[str, Any], folder: Path, stated: str = "") -> Pooling:
    """Without a list of modules: the mean as sentence-transformers takes it, or a decoder's last token, of
    length 1 as OpenAI's embeddings are; so are those of a GGUF file, pooled as it says (``stated``), whatever
    lies beside it."""
    encoder = is_encoder(architecture)
    modules = [] if stated else _modules(folder)
    kind = stated or ("mean" if encoder else "last")
    width = read_spec(config).hidden
    size, normalize, dense = width, not modules, []
    for name, path in modules:
        if name == "Pooling":
            kind = _kind(_object(path / "config.json"), path, width)
        elif name == "Dense":
            layer = _dense(_object(path / "config.json"), path, size)
            dense.append(layer)
            size = layer.outputs
        elif name == "Normalize":
            normalize = True
    if modules:
        _check_text(folder)
    return Pooling(
        task="embed",
        kind=kind,
        size=size,
        normalize=normalize,
        dense=dense,
        dimensions=_dimensions(architecture, config, folder, bool(modules or stated), size),
        encoder=encoder,
        max_length=_max_length(folder),
    )


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Name and folder of each entry of modules.json, which must be Transformer, Pooling, Dense (any number),
    Normalize in this order; empty if there is no such file. Raises ConfigError."""
    path = folder / "modules.json"
    entries = read_json(path) if path.is_file() else []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path} does not hold a list of modules", param="model")
    found = []
    for entry in entries[:MAX_MODULES]:
        name, place = str(entry.get("type", "")).rpartition(".")[2], str(entry.get("path", ""))
        if name == "LogitScore":
            raise judge(folder)
        if name not in MODULES:
            raise ConfigError(f"{path}: module {name[:60]!r} is not supported", param="model")
        if Path(place).name != place or place == ".." or (name == "Transformer" and place):
            raise ConfigError(f"{path}: path {place[:60]!r} of {name} is not supported", param="model")
        found.append((name, folder / place))
    names = [name for name, _ in found]
    plain = ["Transformer", "Pooling", *["Dense"] * names.count("Dense")]
    if len(entries) > MAX_MODULES or names not in ([], plain, [*plain, "Normalize"]):
        raise ConfigError(
            f"{path}: modules must be Transformer, Pooling, Dense (up to "
            f"{MAX_MODULES - 3}), Normalize, in this order",
            param="model",
        )
    return found


def _check_text(folder: Path) -> None:
    """Raise ConfigError for what sentence-transformers does to a text and we do not."""
    settings = _object(folder / "sentence_bert_config.json")
    lower = _object(folder / "tokenizer_config.json").get("do_lower_case")
    if settings.get("do_lower_case") and not lower:
        raise ConfigError(
            f"{folder / 'sentence_bert_config.json'}: do_lower_case is not "
            "supported; a tokenizer that does it is",
            param="model",
        )
    model = _object(folder / "config_sentence_transformers.json")
    name, prompts = model.get("default_prompt_name"), model.get("prompts")
    if name is not None and not (isinstance(prompts, dict) and prompts.get(name) == ""):
        raise ConfigError(
            f"{folder / 'config_sentence_transformers.json'}: default_prompt_name {shown(name)} is not "
            "supported; set it to null and let clients send the prompt",
            param="model",
        )


def _classifier(architecture: str, config: dict[str, Any], folder: Path) -> Pooling:
    reader = Reader(architecture, {"num_labels": 2, **config})
    names = reader.table("id2label")
    count = len(names) or reader.integer("num_labels", MAX_LABELS)
    if count > MAX_LABELS or set(names) - {str(i) for i in range(count)}:
        raise reader.error("id2label", f"labels by the numbers from 0 on, at most {MAX_LABELS}")
    encoder = is_encoder(architecture)
    return Pooling(
        task="classify",
        kind=_classified(reader, architecture) if encoder else "last",
        size=count,
        labels=[str(names.get(str(i), f"LABEL_{i}")) for i in range(count)],
        activation=_activation(config, count),
        encoder=encoder,
        max_length=_max_length(folder),
    )


def _classified(reader: Reader, architecture: str) -> str:
    """The vector that an encoder's classifier is given."""
    key = "classifier_pooling"
    if key not in family_of(architecture).defaults:
        return "cls"
    kind = reader.values.get(key, "cls")
    if kind not in ("cls", "mean"):
        raise reader.error(key, "cls or mean")
    return str(kind)


def _kind(config: dict[str, Any], path: Path, width: int) -> str:
    """Of ``1_Pooling/config.json``: flags in older files, a name or a list of them in newer ones.
    ``width``: of the model."""
    for key, fits in (
        ("word_embedding_dimension", width),
        ("embedding_dimension", width),
        ("include_prompt", True),
    ):
        if (value := config.get(key)) is not None and value != fits:
            raise ConfigError(
                f"{path / 'config.json'}: {key} {shown(value)} is not supported; {fits} is", param="model"
            )
    mode = config.get("pooling_mode")
    if mode is not None:
        kinds = [NAMED_KINDS.get(str(name), "") for name in (mode if isinstance(mode, list) else [mode])]
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


def _dense(config: dict[str, Any], path: Path, width: int) -> Dense:
    """``width``: of what comes in."""
    name = config.get("activation_function", "Tanh")
    activation = ACTIVATIONS.get(str(name).rpartition(".")[2])
    if activation is None:
        raise ConfigError(f"{path / 'config.json'}: activation {shown(name)} is not supported", param="model")
    whole = config.get("module_input_name", "sentence_embedding") == "sentence_embedding"
    if config.get("use_residual") or not whole:
        raise ConfigError(f"{path / 'config.json'}: only a plain layer behind the pooling is supported")
    reader = Reader("Dense", {"bias": True, **config})
    if reader.integer("in_features", WIDTH) != width:
        raise reader.error("in_features", str(width))
    return Dense(
        folder=str(path),
        inputs=width,
        outputs=reader.integer("out_features", WIDTH),
        bias=reader.flag("bias"),
        activation=activation,
    )


def _activation(config: dict[str, Any], count: int) -> str:
    """What makes scores of the logits:
    what the file names for cross-encoders, else by the kind of problem."""
    settings = config.get("sentence_transformers")
    named = settings.get("activation_fn") if isinstance(settings, dict) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if named:
        score = SCORES.get(str(named).rpartition(".")[2])
        if score is None:
            raise ConfigError(
                f"config.json: activation {shown(named)} of the scores is "
                f"not supported; {', '.join(SCORES)} are",
                param="model",
            )
        return score
    problem = config.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if count == 1 or problem == "multi_label_classification" else "softmax"


def _dimensions(
    architecture: str, config: dict[str, Any], folder: Path, modules: bool, size: int
) -> list[int] | None:
    """Lengths that embeddings may be cut to (Matryoshka, arXiv 2205.13147). Qwen3-Embedding is trained for
    any, and so is Qwen3-VL-Embedding, which their files do not say. ``size``: the whole length."""
    if config.get("matryoshka_dimensions"):
        allowed = Reader(architecture, config).integers("matryoshka_dimensions", MAX_LABELS)
        return sorted(length for length in allowed if 0 < length <= size)
    truncated = _object(folder / "config_sentence_transformers.json").get("truncate_dim")
    qwen = (modules and architecture.startswith("Qwen3For")) or architecture.startswith("Qwen3VLFor")
    return [] if config.get("is_matryoshka") or truncated or qwen else None


def _max_length(folder: Path) -> int | None:
    reader = Reader("sentence_bert_config.json", _object(folder / "sentence_bert_config.json"))
    return reader.integer("max_seq_length", 1 << 31) if reader.given("max_seq_length") else None


def _object(path: Path) -> dict[str, Any]:
    """The content of a file; empty if there is none."""
    value = read_json(path) if path.is_file() else {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object", param="model")
    return value

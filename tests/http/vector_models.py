"""Tiny random models that answer with vectors, as folders, and the server in front of one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from http_site import Site
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from sgla.actors.system import System
from sgla.config import Config
from sgla.http.app import make_app
from sgla.http.connections import Runner

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "no", "yes", *(f"w{i}" for i in range(40))]
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
}


def tokenizer() -> Tokenizer:
    """Words are tokens; [CLS] and [SEP] around them, and the second text of a pair has a type of its own."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return made


def write_model(folder: Path, model_type: str, auto: str, pooling: str = "", **settings: Any) -> Any:
    """The model in ``folder``. ``pooling``: the sentence-transformers files say so, with normalization."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SIZES | settings)
    model = getattr(transformers, auto).from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    names = {"eos_token": "[SEP]", "unk_token": "[UNK]", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    if pooling:
        rows = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
            for i, (path, name) in enumerate(
                [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
            )
        ]
        (folder / "modules.json").write_text(json.dumps(rows))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling/config.json").write_text(
            json.dumps({"word_embedding_dimension": 32, f"pooling_mode_{pooling}": True})
        )
    return model


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[tuple[Site, System]]:
    """The whole server but the worker's process, which is a thread."""
    fixed: dict[str, Any] = {
        "model": str(folder),
        "served_model_name": ["tiny"],
        "executor": "inline",
        "device": "cpu",
        "dtype": "float32",
        "native_kernels": False,
        "threads": 1,
        "kv_cache_bytes": 1 << 20,
    }
    config = Config(**fixed | settings)
    system = System(config)
    await system.start()
    app = make_app(system.ingress, config, system.metrics)
    runner = Runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    site = Site(system.ingress, app, system.metrics, runner.addresses[0][1], "none", runner.cleanup)  # type: ignore[arg-type]
    try:
        yield site, system
        assert system.ingress.open_requests == 0
    finally:
        await site.close()
        await runner.cleanup()
        await system.close()

"""Language models of families that take sounds (``model/hearing``)."""

from __future__ import annotations

from dataclasses import replace

from sgla.model.families.dense import FAMILIES as DENSE
from sgla.model.family import Family

_TOWER = {"tie_word_embeddings": False, "text_config": None, "audio_config": None}

HEARD = {
    "Qwen2AudioForConditionalGeneration": replace(
        DENSE["Qwen2ForCausalLM"],
        fixed={**DENSE["Qwen2ForCausalLM"].fixed, "use_mrope": False},
        outer=Family(("qwen2_audio",), _TOWER | {"audio_token_index": 151646, "ignore_index": -100}),
        pooled=False,
        gguf=(),
    ),
}

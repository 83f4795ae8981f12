"""What a package outside registers for the family of ``toy_family.py``. Loads no torch."""

from __future__ import annotations

from sgla.model.families import FAMILIES
from sgla.model.family import Family

_LLAMA = FAMILIES["LlamaForCausalLM"]
FAMILY = Family(("toy",), {**_LLAMA.defaults, "hidden_act": "silu"}, _LLAMA.fixed, model="toy_family:Toy")

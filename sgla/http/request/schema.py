"""Request bodies: typed structs, what of the known fields is not honoured yet,
and the decoder that names errors.

A field is in one of four classes: declared in a struct below (honoured); in ``UNSUPPORTED`` (refused by name
unless its value asks for nothing); in ``IGNORED`` (accepted, without effect on the output); or unknown
(ignored, but told).
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from functools import cache, partial
from typing import Annotated, Any, Generic, Literal, TypeVar, get_type_hints

import msgspec

from sgla.actors.resting import GROUP
from sgla.defaults import SAMPLING, TOKENS
from sgla.errors import BadRequest, InvalidField, UnsupportedField
from sgla.http.request import numbers
from sgla.messages import MOST_PROFILED, Repetition
from sgla.text.beams import MAX_WIDTH
from sgla.validation import Range, fault, root

log = logging.getLogger(__name__)

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOPS_CHARS = 8192  # of all stops together
MAX_CHOICES = 4096  # prompts x n in one request
MAX_LOGPROBS = 8 << 20  # that one request may be answered with, alternatives included
MAX_REPEATED = 1 << 17  # of them where an answer shows each more than once
MAX_FIELDS = 256  # of a body
MAX_MESSAGES = 4096  # of one conversation
MAX_PARTS = 8192  # parts of contents and calls, in all messages together
MAX_TOOLS = 1024
MAX_TOOL_NAME = 256  # characters of a tool's name, together with that of its namespace or MCP server
MAX_ALLOWED = 1 << 17  # allowed_token_ids
MAX_NAME = 1024  # characters of what stands for a request or a part of the prefix cache
# Bytes of fields in which any floats that are whole are taken for integers;
# in longer ones those of lists of numbers are.
MAX_REWRITTEN = 16 << 10
REWRITTEN = 64 << 10  # bytes of such a list that are rewritten at once, which takes 2 ms

CHECKED = 256  # objects whose numbers are checked at once
LOOKED = 32  # objects that are looked through for unknown fields at once

MAX_WHOLE = 2**63  # of the floats that are taken for integers

_OFF = (None, False)
_EMPTY: tuple[Any, ...] = (None, "", [], {})

# Known fields that are not honoured yet,
# each with the values that ask for nothing and are therefore accepted.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tool_choice": (None, "none"),
    "functions": _EMPTY,
    "function_call": (None, "none"),
    "suffix": (None, ""),
    "input_ids": (None, []),
    "echo": _OFF,
    "watermark": _OFF,
    "watermarking": _OFF,
    "dry_multiplier": (None, 0),
    "use_beam_search": _OFF,
    "beam_width": (None, 1),
    "length_penalty": (None, 1.0),
    "token_ids_logprob": (None,),
    "logprob_token_ids": (None,),
    "prompt_logprobs": (None,),
    "truncate_prompt_tokens": (None,),
    "truncation_side": (None,),
    "chat_template": (None,),
    "include_reasoning": (None, True),
    "stream_reasoning": (None, True),
    "repetition_ngram": (None,),
    "custom_logit_processor": (None,),
    "logits_processors": _EMPTY,
    "vllm_xargs": _EMPTY,
    "custom_params": _EMPTY,
    "lora_path": _EMPTY,
    "session_id": (None,),
    "session_params": _EMPTY,
    "input_embeds": (None,),
    "prompt_embeds": (None,),
    "image_data": _EMPTY,
    "audio_data": _EMPTY,
    "mm_processor_kwargs": _EMPTY,
    "media_io_kwargs": _EMPTY,
    "images_config": _EMPTY,
    "modalities": (None, [], ["text"]),
    "audio": (None,),
    "return_hidden_states": _OFF,
    "return_routed_experts": _OFF,
    "kv_transfer_params": (None,),
    "bootstrap_host": (None,),
    "bootstrap_port": (None,),
    "bootstrap_room": (None,),
    "mcp_servers": _EMPTY,
    "web_search_options": (None,),
    "moderation": _EMPTY,
}

# What to do instead of some of them.
INSTEAD = {
    "moderation": " beside an answer; /v1/moderations of one that serves a classifier looks at texts",
    "return_hidden_states": " on this route; /generate, chats and completions of a server with "
    "--enable-return-hidden-states answer with them, and /v1/embeddings of one with --task embed with a "
    "prompt's last one",
    "return_routed_experts": " on this route; /generate of a server with --enable-return-routed-experts "
    "answers with them",
}

# Fields of the APIs that cannot change the output here.
IGNORED = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "prediction",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "verbosity",
        "parallel_tool_calls",
        "separate_reasoning",
        "stream_interval",
        "guided_decoding_backend",
        "log_metrics",
        "background",
        "container",
        "context_management",
        "diagnostics",
        "cache_control",
        "inference_geo",
        "speed",
        "max_tool_calls",
        "access_programs",
        "background_options",
        "user_profile_id",
    ]
)


LONGEST_TTL = 7 * 86400  # seconds
FIVE_MINUTES = 300  # of cache_control without a ttl
_SPAN = re.compile(r"(\d{1,9})([smh]?)", re.ASCII)
INT64 = Range(-(2**63), 2**63 - 1)

RANGES: dict[str, Range] = SAMPLING | {
    "seed": INT64,
    "sampling_seed": INT64,
    "n": Range(1, 128),
    "best_of": Range(1, 128),
    "max_completion_tokens": TOKENS,
    "max_output_tokens": TOKENS,
    "max_tool_calls": Range(0, 2**31 - 1),
    "max_new_tokens": Range(0, 2**31 - 1),
    "min_tokens": Range(0, 2**31 - 1),
    "min_new_tokens": Range(0, 2**31 - 1),
    "top_logprobs": Range(0, 20),
    "prompt_logprobs": Range(-1, 20),
    "top_logprobs_num": Range(0, 20),
    "logprob_start_len": Range(-1, 2**31 - 1),
    "thinking_token_budget": Range(-1, 2**31 - 1),
    "thinking_budget": Range(-1, 2**31 - 1),
    "max_thinking_tokens": Range(-1, 2**31 - 1),
    "priority": Range(-(2**31), 2**31 - 1),
    "timeout": Range(0, open_low=True),
    "cache_ttl": Range(0, LONGEST_TTL),
    "capacity_of_str_len": TOKENS,
    "dimensions": TOKENS,
    "top_n": TOKENS,
    "truncate_prompt_tokens": Range(-1, 2**31 - 1),
    "beam_width": Range(1, MAX_WIDTH),
    "length_penalty": Range(-16, 16),
    "repeat_penalty": SAMPLING["repetition_penalty"],  # Ollama's name
}
# Of a text the prompt itself may be the answer.
OWN_RANGES = {
    ("CompletionRequest", "max_tokens"): Range(0, 2**31 - 1),
    ("CacheControl", "ttl"): Range(0, LONGEST_TTL),
}


def range_of(owner: str, name: str) -> Range | None:
    """What the field ``name`` of the struct ``owner`` may be, if it is a number with limits."""
    return OWN_RANGES.get((owner, name)) or RANGES.get(name)


class SamplingFields(msgspec.Struct, kw_only=True):
    """Sampling fields that all routes share, under OpenAI's, vLLM's and SGLang's names. None: the default."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    sampling_seed: int | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    thinking_token_budget: int | None = None
    thinking_budget: int | None = None
    max_thinking_tokens: int | None = None
    min_tokens: int | None = None
    min_new_tokens: int | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    repetition_detection: Repetition | None = None
    logits_processors: list[str | dict[str, Any]] | None = None
    vllm_xargs: dict[str, Any] | None = None


class CacheControl(msgspec.Struct, kw_only=True):
    """Anthropic's, and Dynamo's in ``nvext``: the prefix will be wanted again within ``ttl`` seconds of its
    last use, or minutes or hours (``5m``, ``1h``)."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: int | str | None = None

    @property
    def seconds(self) -> float:
        """Raises InvalidField."""
        found = _SPAN.fullmatch(str(FIVE_MINUTES if self.ttl is None else self.ttl))
        seconds = int(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]] if found else -1
        if not 0 <= seconds <= LONGEST_TTL:
            raise InvalidField(
                f"cache_control.ttl must be seconds, or a number with s, m or h, of at most {LONGEST_TTL} "
                f"seconds, got {str(self.ttl)[:99]!r}",
                param="cache_control.ttl",
            )
        return float(seconds)


class AgentHints(msgspec.Struct, kw_only=True):
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] | None = None


class Extension(msgspec.Struct, kw_only=True):
    """What of Dynamo's ``nvext`` speaks of the scheduler and the cache; the rest is for its router."""

    cache_control: CacheControl | None = None
    agent_hints: AgentHints | None = None


class RequestFields(msgspec.Struct, kw_only=True):
    """Fields about the request rather than its text.
    ``OpenAIFields`` repeats them: structs inherit from one base."""

    model: str | None = None
    stream: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    timeout: float | None = None  # seconds after which the request ends with 408
    cache_ttl: float | None = None  # seconds for which its prefix is kept in preference to others'
    cache_control: CacheControl | None = None
    nvext: Extension | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIFields(SamplingFields, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    timeout: float | None = None
    cache_ttl: float | None = None
    cache_control: CacheControl | None = None
    nvext: Extension | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    max_tokens: int | None = None
    stream_options: StreamOptions | None = None
    rid: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    lora_path: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    return_hidden_states: bool | None = None


class ThinkingSwitch(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] | None = None


class ChatRequest(OpenAIFields, kw_only=True):
    """``enable_thinking`` (LMDeploy, DashScope) and ``thinking`` (SGLang; with
    a type: DeepSeek, GLM) tell the template."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    documents: list[dict[str, Any]] | None = None
    echo: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingSwitch | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class CompletionRequest(OpenAIFields, kw_only=True):
    prompt: str | list[int | str | list[int]]
    suffix: str | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class NativeSampling(SamplingFields, kw_only=True):
    max_new_tokens: int | None = None


class SessionParams(msgspec.Struct, kw_only=True):
    """Which session (``id``), and from which of its turns to go on (``rid``; None: from none).

    ``replace``: what followed that turn is forgotten. ``offset``: only so many of its tokens are kept.
    """

    id: str
    rid: str | None = None
    offset: int | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


class GenerateRequest(RequestFields, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool | None = None
    return_hidden_states: bool | list[bool] | None = None
    return_routed_experts: bool | list[bool] | None = None
    session_params: SessionParams | None = None
    lora_path: str | list[str | None] | None = None
    image_data: str | list[str | list[str] | None] | None = None
    audio_data: str | list[str | list[str] | None] | None = None
    video_data: str | list[str | list[str] | None] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool | None = None


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    lora_name: str
    lora_path: str
    pinned: bool | None = None
    load_inplace: bool | None = None


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    lora_name: str
    lora_int_id: int | None = None  # vLLM's number, which its clients may leave out


class AbortRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    rid: str | None = None
    abort_all: bool | None = None
    abort_message: str | None = None


class PauseRequest(msgspec.Struct, kw_only=True):
    """``mode``: what becomes of running requests: abort, or in_place (vLLM: keep)."""

    model: str | None = None
    mode: str | None = None


class MemoryRequest(msgspec.Struct, kw_only=True):
    """``tags``: whose memory is given back; None: all."""

    model: str | None = None
    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None


class WeightChange(msgspec.Struct, kw_only=True):
    """What SGLang's requests that bring weights have in common. The prefix cache is emptied, whatever
    ``flush_cache`` says: KV of old weights is of no use."""

    model: str | None = None
    weight_version: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] | None = None
    abort_all_requests: bool | None = None
    flush_cache: bool | None = None


class UpdateWeightsRequest(WeightChange, kw_only=True):
    model_path: str
    load_format: str | None = None
    is_async: bool | None = None
    keep_pause: bool | None = None
    recapture_cuda_graph: bool | None = None
    torch_empty_cache: bool | None = None


class UpdateTensorsRequest(WeightChange, kw_only=True):
    """``serialized_named_tensors``: in base64, safetensors files or pickles of names and tensors."""

    serialized_named_tensors: Annotated[list[str], msgspec.Meta(min_length=1, max_length=64)]
    load_format: Literal["direct", "flattened_bucket"] | None = None


class JoinTrainerRequest(msgspec.Struct, kw_only=True):
    """``rank_offset``: of our first rank; the trainer has 0."""

    model: str | None = None
    master_address: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    master_port: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    rank_offset: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    world_size: Annotated[int, msgspec.Meta(ge=2, lt=1 << 16)]
    group_name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = GROUP
    backend: Literal["nccl", "gloo"] = "nccl"


class NameWeightsRequest(msgspec.Struct, kw_only=True):
    new_version: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    model: str | None = None
    abort_all_requests: bool | None = None


class PrepareWeightsRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    restore_weights_before_load: bool | None = None
    post_process_quantization: bool | None = None


class CheckWeightsRequest(msgspec.Struct, kw_only=True):
    action: Literal["snapshot", "reset_tensors", "compare", "checksum"]
    model: str | None = None


class LeaveTrainerRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    group_name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = GROUP


class UpdateFromTrainerRequest(WeightChange, kw_only=True):
    names: Annotated[list[str], msgspec.Meta(min_length=1)]
    dtypes: list[str]
    shapes: list[list[Annotated[int, msgspec.Meta(ge=1, lt=2**31)]]]
    group_name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = GROUP
    load_format: None = None


Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class UpdateFromServersRequest(WeightChange, kw_only=True):
    """``zmq_handles``: of each rank the address of its parameter server, by the name of its device:
    ``GPU-<uuid>``, ``CPU-<rank>``."""

    zmq_handles: Annotated[dict[Name, Name], msgspec.Meta(min_length=1, max_length=1024)]
    torch_empty_cache: bool | None = None


class CallRequest(msgspec.Struct, kw_only=True):
    """vLLM's; ``timeout`` is not needed."""

    model: str | None = None
    method: Name
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


class TransferEngineRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    init_info: dict[str, Any] = {}


class TransferRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    is_checkpoint_format: bool | None = None


class Handles(msgspec.Struct, kw_only=True):
    """``ipc_handles_pickled``: in base64, the pickle of a list with, of each name, a handle by device."""

    names: Annotated[list[str], msgspec.Meta(min_length=1)]
    dtype_names: list[str]
    shapes: list[list[int]]
    ipc_handles_pickled: str
    packed: bool | None = None


class TransferPartRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    update_info: Handles


class ShowWeightsRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    name: str
    truncate_size: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] = 100


class ProfileRequest(msgspec.Struct, kw_only=True):
    """``output_dir``: a folder inside of ``--profile-folder``. SGLang's other fields are ignored."""

    model: str | None = None
    num_steps: Annotated[int, msgspec.Meta(ge=1, le=MOST_PROFILED)] | None = None
    output_dir: Annotated[str, msgspec.Meta(max_length=MAX_NAME, pattern=r"^[^\x00]*$")] | None = None


R = TypeVar("R", bound=msgspec.Struct)
T = TypeVar("T")

_RAW = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NESTED = msgspec.json.Decoder(dict[str, msgspec.Raw] | list[dict[str, msgspec.Raw]] | None)
_FRACTION = re.compile(rb"\.0+(?=[],\s]|$)")  # of zeros, at a number's end
_PLAIN_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_told: set[str] = set()


class Schema(Generic[R]):
    """Decoder of one kind of body.
    ``nested``: names of declared fields whose objects are checked in the same way."""

    def __init__(self, kind: type[R], nested: Mapping[str, type[msgspec.Struct]] | None = None) -> None:
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)
        self._fields = frozenset(kind.__struct_fields__)
        self._nested = {name: frozenset(sub.__struct_fields__) for name, sub in (nested or {}).items()}

    def typed(self, body: bytes) -> R:
        """The request. Raises BadRequest subclasses that name the field. Where an integer is wanted, 3.0 is
        one too: JSON knows no difference, and some clients write them so."""
        return finished(self.steps(body))[0]

    def ignored(self, body: bytes) -> list[str]:
        """The names of unknown fields. Raises UnsupportedField for a known one that cannot be honoured."""
        return finished(self.steps(body))[1]

    def steps(self, body: bytes) -> Generator[None, None, tuple[R, list[str]]]:
        """``typed`` and ``ignored``, with a pause wherever a large body has taken some milliseconds."""
        raw = fields_of(body)
        if len(body) > numbers.PIECE:
            yield
        request = yield from self._strict(body, raw)
        if request is None:
            pieces = []
            for piece in self.rewritten(body):
                pieces.append(piece)
                yield
            body = b"".join(pieces)
            request = yield from self._strict(body, _read(_RAW.decode, body), last=True)
        assert request is not None
        if len(body) > numbers.PIECE:
            yield
        return request, (yield from self._unknown(raw))

    def _strict(
        self, body: bytes, raw: Mapping[str, msgspec.Raw], last: bool = False
    ) -> Generator[None, None, R | None]:
        """The request, but None for a float where an integer is wanted, unless this is the ``last`` try."""
        try:
            request = yield from self._decoded(body, raw)
        except BadRequest as error:
            if "got float" not in error.message:
                raise
            if not last:
                return None
            if len(body) > MAX_REWRITTEN:
                error.message += "; a body of this size must have integers without a fraction"
            raise
        check_ranges(request)
        for name in self._nested:
            items = as_list(getattr(request, name))
            check_count(name, items, MAX_CHOICES)
            for i, item in enumerate(items):
                if i % CHECKED == CHECKED - 1:
                    yield
                check_ranges(item, place_of(name, i, items))
        return request

    def _decoded(self, body: bytes, raw: Mapping[str, msgspec.Raw]) -> Generator[None, None, R]:
        """Long lists of numbers begin with their first pieces, and get the others one by one."""
        long = [name for name, value in raw.items() if name in self._fields and numbers.is_long(value)]
        lists = {name: numbers.pieces(bytes(raw[name])) for name in long}
        if len(body) > numbers.PIECE:
            yield
        if long:
            firsts = {name: msgspec.Raw(next(pieces)[0]) for name, pieces in lists.items()}
            body = msgspec.json.encode({**raw, **firsts})
        request = _read(self._decoder.decode, body, self._kind)
        for name, pieces in lists.items():
            decode = msgspec.json.Decoder(get_type_hints(self._kind)[name]).decode
            items = getattr(request, name)
            for piece, inside in pieces:
                yield
                _read(partial(numbers.read, decode, name, items, inside), piece, self._kind)
        return request

    def _unknown(self, raw: Mapping[str, msgspec.Raw]) -> Generator[None, None, list[str]]:
        names = unknown(raw, self._fields)
        for name, fields in self._nested.items():
            items = as_list(_read(_NESTED.decode, bytes(raw[name]))) if name in raw else []
            for i, item in enumerate(items):
                if i % LOOKED == LOOKED - 1:
                    yield
                names += unknown(item, fields, place_of(name, i, items))
        return names

    def rewritten(self, body: bytes) -> Iterator[bytes]:
        """The body with integers in place of floats that are whole, in its short fields and lists of numbers;
        in pieces, each made in a few milliseconds."""
        short, long = _read(lambda body: by_length(_RAW.decode(body)), body)
        yield short[:-1]
        comma = b"," if len(short) > len(b"{}") else b""
        for name, value in long.items():
            yield b"%b%b:" % (comma, msgspec.json.encode(name))
            yield from numbers_with_integers(bytes(value))
            comma = b","
        yield b"}"


def finished(steps: Generator[None, None, T]) -> T:
    """What ``steps`` return, without pauses."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def fields_of(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a body, unread. Raises BadRequest."""
    if not body or body.isspace():
        raise BadRequest("the request body is empty; a JSON object is expected")
    return _read(_RAW.decode, body)


def _read(read: Callable[[bytes], T], body: bytes, kind: Any = Any) -> T:
    """``read(body)``, its errors typed; ``kind``: of what it reads."""
    try:
        return read(body)
    except msgspec.ValidationError as error:
        raise invalid(error, kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the request body is not valid {_fault(body, error)}") from error
    except RecursionError as error:
        raise BadRequest("the request body is nested too deeply") from error


def _fault(body: bytes, error: Exception) -> str:
    """msgspec says what is no UTF-8 by either kind of error, depending on its version."""
    try:
        bytes(body).decode()
    except UnicodeDecodeError as found:
        return f"UTF-8: {found.reason}"
    return f"JSON: {error}"


def by_length(raw: dict[str, msgspec.Raw]) -> tuple[bytes, dict[str, msgspec.Raw]]:
    """An object of the shortest fields ``with_integers``,
    as long as they are short together, since that is slow; and the others."""
    names = sorted(raw, key=lambda name: memoryview(raw[name]).nbytes)
    sizes = itertools.accumulate(memoryview(raw[name]).nbytes for name in names)
    short = [name for name, size in zip(names, sizes) if size <= MAX_REWRITTEN]
    found = {name: with_integers(msgspec.json.decode(raw.pop(name))) for name in short}
    return msgspec.json.encode(found), raw


def numbers_with_integers(value: bytes) -> Iterator[bytes]:
    """A JSON text in pieces, its floats without their fractions where these are zeros;
    as it is if it has strings."""
    if b'"' in value:
        yield value
        return
    start = 0
    while start < len(value):
        end = value.find(b",", start + REWRITTEN) + 1 or len(value)
        yield _FRACTION.sub(b"", value[start:end])
        start = end


def with_integers(value: Any) -> Any:
    """``value`` with integers in place of floats that are whole."""
    if isinstance(value, dict):
        return {name: with_integers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [with_integers(item) for item in value]
    whole = isinstance(value, float) and value.is_integer() and abs(value) < MAX_WHOLE
    return int(value) if whole else value


def as_list(value: Any) -> list[Any]:
    """``value`` as a list: itself, empty for None, or of one."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def place_of(name: str, i: int, items: Sized) -> str:
    """What a field's name begins with in item ``i`` of ``name``."""
    return f"{name}[{i}]." if len(items) > 1 else f"{name}."


def unknown(raw: Mapping[str, msgspec.Raw], fields: Iterable[str], place: str = "") -> list[str]:
    """Names of ``raw``, which stands at ``place``, that nobody knows.
    Raises UnsupportedField for a known one whose value cannot be honoured."""
    if len(raw) > MAX_FIELDS:
        raise BadRequest(f"the request body has {len(raw)} fields; {MAX_FIELDS} is the limit")
    names = []
    for name, value in raw.items():
        if name in fields or name in IGNORED:
            continue
        harmless = UNSUPPORTED.get(name)
        if harmless is None:
            names.append(name)
        elif msgspec.json.decode(value) not in harmless:
            raise unsupported(place + name, INSTEAD.get(name, ""))
    _tell(names)
    return names


def unsupported(name: str, detail: str = "") -> UnsupportedField:
    """``name``: of a field, or the path of an item of a list."""
    message = f"{name} is not supported by this server{detail}; leave it out"
    return UnsupportedField(message, param=name.partition("[")[0])


def invalid(error: msgspec.ValidationError, kind: Any) -> BadRequest:
    """What msgspec refuses of a body of type ``kind``; an InvalidField if it says where."""
    path, text = fault(error, kind)
    if not path:
        return BadRequest(f"the request body does not fit: {text}")
    return InvalidField(text, param=root(path))


def shown(value: Any, most: int = 40) -> str:
    """A value in an error: its first ``most`` characters; a list, which may be long, is only named."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    return "null" if value is None else repr(str(value)[:most])


def check_count(name: str, items: Sized, most: int) -> None:
    """Raise InvalidField for a field with too many items."""
    if len(items) > most:
        raise InvalidField(f"{name} has {len(items)} items; {most} is the limit", param=name)


@cache
def ranges(kind: type[msgspec.Struct]) -> list[tuple[str, Range]]:
    """Of the fields that have one."""
    found = ((name, range_of(kind.__name__, name)) for name in kind.__struct_fields__)
    return [(name, allowed) for name, allowed in found if allowed is not None]


def check_ranges(request: msgspec.Struct, place: str = "") -> None:
    """Raise InvalidField for the first number outside its range; ``place``: what the request stands in."""
    for name, allowed in ranges(type(request)):
        value = getattr(request, name)
        if value is None:
            continue
        numbers = as_list(value)
        check_count(name, numbers, MAX_CHOICES)
        for number in numbers:
            if not isinstance(number, str) and number not in allowed:
                raise InvalidField(f"{place}{name} must be {allowed}, got {number}", param=name)


def _tell(names: list[str]) -> None:
    """Log each unknown name once; the memory of what was logged is bounded."""
    for name in names:
        if name not in _told and len(_told) < 1000 and _PLAIN_NAME.fullmatch(name):
            _told.add(name)
            log.info("ignoring unknown request field %s", name)


def header_value(names: list[str]) -> str:
    """``x-ignored-fields``: at most 32 names, those that are safe in a header."""
    return ", ".join([name for name in dict.fromkeys(names) if _PLAIN_NAME.fullmatch(name)][:32])

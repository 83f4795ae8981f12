"""Every message that crosses an actor or process boundary, and the public sampling parameters.

Messages carry data only: no queue, future or transport is ever a field. Integer columns are little-endian
``int32`` byte strings, so a 256-row plan encodes in half a microsecond and the worker reads it with
``numpy.frombuffer``. The table of senders and receivers stands in ``docs/design.md``.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from sgla.media.picture import Picture
from sgla.media.sound import Sound
from sgla.media.video import Video

LONGEST = 1 << 20  # tokens of a request, its answer included


def int32(values: Sequence[int]) -> bytes:
    """A column of integers: six times as fast as an ``array`` made of a list.
    Raises struct.error for what is no int32."""
    return struct.pack(f"<{len(values)}i", *values) if values else b""


class Grammar(msgspec.Struct, kw_only=True, frozen=True):
    """What an output must look like. ``kind`` says what ``text`` is:

    ``json_schema`` a JSON Schema; ``json_object`` nothing; ``regex`` a regular expression for the whole
    output; ``choice`` a JSON list of strings; ``ebnf`` GBNF (``root ::= ...``) or Lark (``start: ...``);
    ``structural_tag`` the JSON object of that ``type``. ``after``: the output is free until one of these
    texts has been generated; with ``opener``, only if the prompt ends with that, or the output begins with
    it. ``whitespace``: a regular expression for the space between JSON tokens ("" for none), ``compact`` or
    ``free``; ``additional``: objects may have properties that their schema does not declare, and keywords do
    not imply a type; None: as the server is set. ``param`` is the request field that errors name.
    """

    kind: str
    text: str = ""
    after: tuple[str, ...] = ()
    opener: str = ""
    whitespace: str | None = None
    additional: bool | None = None
    param: str = "response_format"


# Fields of vLLM's structured_outputs that each ask for a grammar -> its kind.
STRUCTURED_OUTPUTS = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}


def whitespace_of(disabled: bool | None, pattern: str | None) -> str | None:
    """``Grammar.whitespace`` from ``disable_any_whitespace`` and
    ``whitespace_pattern`` of structured_outputs."""
    return "" if disabled else pattern or (None if disabled is None else "free")


class Thinking(msgspec.Struct, kw_only=True, frozen=True):
    """At most ``tokens`` of an output are reasoning: what stands between the tags ``open`` and ``close``,
    each one token of the model. With ``open`` "" the output begins inside of it. ``wish``: a model whose tags
    are no tokens is not limited, instead of refused. ``param`` is the request field that errors name.
    """

    tokens: int
    open: str
    close: str
    wish: bool = False
    param: str = "thinking_token_budget"


class Repetition(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """An output ends, with finish ``repetition``, when its last tokens are ``min_count`` copies of a pattern
    of ``min_pattern_size`` to ``max_pattern_size`` tokens; ``max_pattern_size`` 0: never. Names and meaning
    are vLLM's.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class Processor(msgspec.Struct, array_like=True, frozen=True):
    """A logit processor that the server has (``sampling/processors.py``),
    and the keyword arguments to make it with. In ``SamplingParams`` the name "" stands for all that declare
    the arguments."""

    name: str
    arguments: dict[str, Any] = {}


class Transcript(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What a model that transcribes may write. ``suppressed``: tokens that never come, ``first_suppressed``:
    that an output does not begin with. ``untimed``: the token that asks for no timestamps, behind which those
    of times stand in the vocabulary. With ``timed`` they come in pairs and never fall, and an output begins
    with one that is at most the ``latest``-th (-1: with any). ``end``: of a text; words stand before it."""

    suppressed: list[int]
    first_suppressed: list[int]
    untimed: int
    end: int
    latest: int = -1
    timed: bool = False

    @property
    def first_time(self) -> int:
        """The token of 0 s."""
        return self.untimed + 1


class SamplingParams(msgspec.Struct, kw_only=True, frozen=True, weakref=True):
    """How to choose the tokens of one request. The defaults are OpenAI's.

    ``temperature == 0`` is greedy. ``top_k <= 0`` and ``min_p == 0`` are off. ``seed`` makes a request
    repeatable whatever else is in the batch; choice ``i`` of ``n`` uses a seed derived from ``(seed, i)``.
    ``logprobs`` is the number of top alternatives per output token (0: only the chosen one; ``None``: off);
    ``prompt_logprobs`` the same for prompt tokens (-1: the whole vocabulary), from the one at
    ``logprob_start`` on, in front of which a cached prefix is read; ``logprob_token_ids``: tokens
    whose logprobs come in addition, wherever there are any. ``max_tokens=None`` means: up to the context
    length. ``stop_regex``: regular expressions that end an output like the strings of ``stop``; see
    ``text.regex``. ``bad_words``: texts whose tokens, at the beginning of a word or not, are never completed.
    ``allowed_token_ids``: the only tokens an output may have, those that end it included.
    ``no_repeat_ngram_size``: no output has so many tokens in a row twice (0: off). ``hidden_states``: the
    answer has the model's last hidden state of every token that was computed; ``routed_experts``: the
    experts of each layer that it went to.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    logit_bias: dict[int, float] = {}
    bad_words: list[str] = []
    allowed_token_ids: list[int] | None = None
    thinking: Thinking | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: list[str] = []
    stop_regex: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_start: int = 0
    logprob_token_ids: list[int] = []
    n: int = 1
    grammar: Grammar | None = None
    processors: list[Processor] = []
    repetition_detection: Repetition | None = None
    hidden_states: bool = False
    routed_experts: bool = False
    transcript: Transcript | None = None  # of a model that transcribes


class Job(msgspec.Struct, kw_only=True):
    """Ingress -> tokenize. Exactly one of ``text``, ``messages``, ``token_ids`` is set.

    ``pool``: the request is for a vector instead of tokens, see ``RowSampling.pool``; then ``pair`` is the
    second text of a pair, and a longer input is cut to its first ``truncate`` tokens, special tokens included
    (-1: to the model's limit).
    """

    rid: str
    sampling: SamplingParams
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = True
    stream: bool = False
    client: str = ""  # who asks, for what is shared out fairly (http.clients)
    size: int = 0  # bytes of the body that it came in, and of the conversation that it goes on from
    priority: int = 0
    yields: bool = False  # to every request that does not: it is part of a batch
    deadline: float | None = None  # absolute, on clock.now()
    namespace: str = ""  # prefix-cache isolation (cache_salt, the adapter)
    adapter: int = 0  # its number; 0: none
    cache_ttl: float = 0.0  # seconds for which its prefix goes after those that nobody wants to be kept
    suffix: str | None = None  # what comes after the answer: the model fills in the middle
    keep_last: int | None = None  # a longer prompt loses its beginning (-1: what the context has no room for)
    drop_turns: bool = False  # a chat that is too long loses its oldest turns
    index_base: int = 0  # choice index of this job's first child
    clip: bool = False  # max_tokens beyond the context's end means: up to there
    arrival: float = 0.0
    pool: list[int] | None = None
    pair: str | None = None
    truncate: int | None = None
    prompt_logprobs: int | None = None  # most that the prompt may have, alternatives included
    hidden_states: int | None = None  # most numbers that hidden states or experts of its choices may have
    # In the order of their places in the prompt: parts {"type": "image"}, {"type": "audio"} or
    # {"type": "video"} of messages, or the model's own token for one in a text or in ids.
    pictures: list[Picture | Sound | Video | Prepared] = []
    media_kwargs: dict[str, Any] = {}  # of what prepares them
    prepared: list[Prepared] = []  # of these
    window: Window | None = None  # a transcription: the part that it hears of its one sound


class Window(msgspec.Struct, array_like=True, frozen=True):
    """Frames of a sound's spectrogram from ``first`` to ``end``, which is the first one behind."""

    first: int
    end: int


class Array(msgspec.Struct, array_like=True, frozen=True):
    """``values``: all of them, of few whole numbers, or else []."""

    name: str
    dtype: str  # numpy's name
    shape: list[int]
    first: int  # byte in the file
    values: list[int] = []


class Prepared(msgspec.Struct, array_like=True, frozen=True, weakref=True):
    """What a model's tower reads of a picture, a sound or a video (``kind``: "image", "audio", "video"):
    ``arrays`` that lie in a ``file``, which is there as long as the main process has this."""

    digest: bytes
    file: str
    arrays: list[Array]
    kind: str = "image"


class Placed(msgspec.Struct, array_like=True, frozen=True):
    """A picture or a sound, and the tokens of a prompt that stand for it or around its parts: from ``first``
    to ``end``, which is the first one behind."""

    first: int
    end: int
    picture: Prepared
    whole: bool = False  # the tokens see each other, so one step computes all that are not there yet


class Submit(msgspec.Struct, kw_only=True):
    """Tokenize -> schedule: one child of one request (``n`` children make ``n`` of these)."""

    rid: str  # unique per child
    parent: str
    index: int
    tokens: list[int]
    max_new: int
    stop_ids: frozenset[int]  # EOS ids (unless ignore_eos) and stop_token_ids
    sampling: RowSampling
    client: str = ""  # Job.client
    priority: int = 0
    yields: bool = False  # Job.yields
    deadline: float | None = None
    namespace: str = ""
    arrival: float = 0.0
    segment: int = 0  # NewRow.segment
    sampling_bytes: int = 0  # most bytes that ``sampling`` takes in a plan; counted once for all choices
    repetition: Repetition | None = None
    # Where the prompt has tokens that stand for something else, such as an image:
    # the first of them, and a digest of what it is.
    media: list[tuple[int, bytes]] = []
    holds: frozenset[str] = frozenset()  # what must be there before it may run; ``Ready`` tells of each
    adapter: int = 0  # Job.adapter
    cache_ttl: float = 0.0  # Job.cache_ttl
    pictures: list[Placed] = []  # by their places in the prompt


# What requests are held for: the compiled grammar, which comes with the Ready; pages or an adapter that a
# copy brings.
GRAMMAR, PAGES, ADAPTER = "grammar", "pages", "adapter"


class Ready(msgspec.Struct, kw_only=True):
    """Tokenize -> schedule: one of a child's ``holds`` is there.
    ``sampling`` and ``sampling_bytes``: those of its Submit, if this has changed them."""

    rid: str
    reason: str
    sampling: RowSampling | None = None
    sampling_bytes: int = 0


class Keep(msgspec.Struct, array_like=True, frozen=True):
    """Ingress -> schedule. An adapter keeps its place on the device (``pinned``), or is gone: then no open
    request has it."""

    adapter: int
    pinned: bool


class Opened(msgspec.Struct):
    """Tokenize -> detokenize, before the child's ``Submit`` reaches the scheduler: its text state begins."""

    submit: Submit
    sampling: SamplingParams


class Cancel(msgspec.Struct):
    """Ingress or detokenize -> schedule. ``reason``: client | stop | slow | drain | shutdown."""

    rid: str  # of one child
    reason: str


class ThinkLimit(msgspec.Struct, array_like=True, frozen=True):
    """``Thinking`` in token ids.
    ``opened``: the output begins inside of reasoning; ``open`` -1: nothing opens it."""

    tokens: int
    open: int
    close: int
    opened: bool


# Most of what one request may ask of the sampler,
# whose tables on a GPU have a place for so much of every slot.
MAX_GRAMMAR = 1 << 18  # characters of a grammar, as given and as compiled: a plan to the workers carries it
MAX_BIASES = 4096  # tokens of logit_bias
MAX_WORD_TOKENS = 2048  # of bad_words together, each word with and without a space before it
MAX_STOP_IDS = 256  # that min_tokens holds back
MAX_NGRAM = 64  # no_repeat_ngram_size: each step compares so many tokens at every place of the output


class RowSampling(msgspec.Struct, array_like=True, kw_only=True):
    """The part of SamplingParams that the worker needs; sent once, when a request gets its slot."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0  # uint63, always set: the worker draws no randomness of its own
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    ngram: int = 0  # SamplingParams.no_repeat_ngram_size
    min_tokens: int = 0
    stop_ids: list[int] = []  # suppressed until min_tokens outputs exist
    logit_bias: list[tuple[int, float]] = []
    bad_words: list[list[int]] = []  # sequences of which no output completes one
    allowed: list[int] = []  # the only tokens; []: all
    thinking: ThinkLimit | None = None
    logprobs: int = -1  # -1 off, 0 chosen only, k top alternatives
    prompt_logprobs: int = -1
    logprob_start: int = 0
    logprob_ids: list[int] = []  # SamplingParams.logprob_token_ids
    grammar: str = ""  # compiled source (grammar/source.py), which the worker makes a matcher of
    grammar_after: tuple[str, ...] = ()  # Grammar.after
    grammar_opener: str = ""  # Grammar.opener; "" also where the prompt ends with it
    # None: the row produces tokens. Else it produces one vector when its prompt is computed: [] what the
    # model's head makes of the hidden states; ids: log-probabilities of these tokens as the next one (of a
    # model that generates).
    pool: list[int] | None = None
    processors: list[Processor] = []
    # Every row of the request brings its tokens' hidden states, or the experts that these went to; it reads
    # no cached prefix.
    hidden: bool = False
    experts: bool = False
    transcript: Transcript | None = None

    @property
    def states(self) -> bool:
        """Its rows bring something of each token."""
        return self.hidden or self.experts


class NewRow(msgspec.Struct, array_like=True, kw_only=True):
    """A request takes (or, after preemption, takes again) a slot. Resets every per-slot state.

    ``tokens`` int32[known]: the prompt, then the outputs committed before a preemption. ``pages`` int32[*],
    one for each cache group: pages it holds now, in order, the shared prefix first; 0 where it holds none. Of
    a group of states its one unit.
    """

    slot: int
    tokens: bytes
    prompt_len: int
    pages: list[bytes]
    sampling: RowSampling
    segment: int = 0  # where the second text of a pair begins, for models that tell the two apart; 0: nowhere
    limit: int = 0  # tokens it may have, outputs included; only where rows have drafts
    place: int = 0  # of its adapter on the device; 0: it has none
    pictures: list[Placed] = []  # Submit.pictures
    apart: bool = False  # its text is not for the guesses of others, nor theirs for it


VERIFIED = 64  # tokens of decode rows with drafts in a step: few rows may guess much, many little
LEAVED = 4  # rows of a step, at most, whose guesses may have second ones beside them
SAMPLE = 1  # StepPlan.flags: the row's last token is the last known one, so sample its successor
PROMPT_LOGPROBS = 2  # StepPlan.flags: return logprobs of the prompt tokens this row's span predicts
DENOISE = 8  # StepPlan.flags: the row is a block that comes out of noise
POOL = 4  # StepPlan.flags: the row is for a vector, due when its span reaches the prompt's end


KEY = 16  # bytes of a key (cache/tier.py)


def keys_in(column: bytes) -> list[bytes]:
    return [column[at : at + KEY] for at in range(0, len(column), KEY)]


class Copy(msgspec.Struct, array_like=True, frozen=True):
    """Copy units of cache groups between the ``device`` and a ``Tier``, by its name. It begins when the steps
    before this plan's are done, and runs beside later ones: nobody writes to ``sources`` nor reads
    ``targets`` before a ``Moved`` tells that it has ended. Without a ``source``: forget what the ``targets``
    hold. Without a ``target``: tell which of the ``keys`` the source has. Or copy adapters: from
    ``adapters``, by their numbers, to ``places`` on the device."""

    transfer: int
    source: str
    target: str
    sources: list[bytes]  # int32[*], of each cache group
    targets: list[bytes]  # int32[*], of each cache group
    keys: list[bytes] = []  # KEY bytes a unit, of each cache group: what they hold
    # Of a question to a ``Tier`` that computes: the text, int32[*], and the namespace that its keys have.
    tokens: bytes = b""
    namespace: str = ""
    # Seconds of the step that first reads what comes to the device: workers may tell of it so much before it
    # has ended that each layer is there when that step comes to it, and have steps wait for what is not.
    slack: float = 0.0


class Moved(msgspec.Struct, array_like=True, frozen=True):
    """Workers -> schedule, at any time: a ``Copy`` has ended. Every rank tells; the executor hands on that
    all have. If one has failed, what the targets hold means nothing. ``there``: uint8[*] of each cache group,
    which keys of a Copy without target were found; where a tier has computed them, ``cached`` tokens of
    the text had been there before. ``full``: int32[*] of each cache group, or nothing: targets for which a
    tier has no room, and never had."""

    transfer: int
    ok: bool
    there: list[bytes] = []
    cached: int = 0
    full: list[bytes] = []


class StepPlan(msgspec.Struct, array_like=True, kw_only=True):
    """Schedule -> workers: one forward step, or no rows and only ``copies``. Row order is the batch order.

    Row ``r`` computes tokens ``[starts[r], starts[r] + q_lens[r])`` of slot ``slots[r]``; input ids come from
    the worker's slot-indexed token table, where the sampler has put the successor of the previous step, so a
    decode row needs no token from the host, unless another stage samples (``tokens``). Page-table changes are
    appends: ``page_counts[i]`` pages of every cache group for ``page_slots[i]``.

    A row goes on with the state in its slot's unit, with that of ``state_reads`` if it is named there, or
    without any from token 0 on, and leaves its last one in the slot's unit. On the way it leaves
    ``checkpoints``. All rows read before any writes.

    A row with ``drafts[r] >= 0`` begins where its slot has got to, which is at most ``starts[r]``, and
    computes its pending token and at most so many more, which the worker guesses. It samples a successor of
    each and keeps those up to the first wrong guess. With several stages it begins at ``starts[r]`` and
    computes ``q_lens[r]`` tokens, of which ``tokens`` has the guesses, too, and ``drafts[r]`` is how many the
    last stage may guess behind it for a later step (``StepResult.proposed``).

    A row with the flag DENOISE has the next block of its slot, of which the worker predicts all tokens once
    more. It brings none of them, or all; their KV is there once a later row has read them.
    """

    step: int
    slots: bytes  # int32[R]
    starts: bytes  # int32[R]
    q_lens: bytes  # int32[R]
    flags: bytes  # uint8[R]
    drafts: bytes = b""  # int32[R], -1: the row is as it stands here; b"": all are
    page_slots: bytes = b""  # int32[P]
    page_counts: bytes = b""  # int32[P]
    page_ids: list[bytes] = []  # int32[sum(page_counts)], one for each cache group of pages
    new: list[NewRow] = []
    copies: list[Copy] = []
    state_reads: bytes = b""  # int32[*, 2]: a slot, and the unit that its row begins with instead of its own
    # int32[*, 3]: a slot, and a unit for the state behind so many tokens, which its row computes.
    checkpoints: bytes = b""
    # int32[*], none or one for each cache group of pages: pages to zero before the step.
    # They may hold NaN, which masks do not hide everywhere.
    zeroed: list[bytes] = []
    tokens: bytes = b""  # int32[*], with several stages: all those of the first rows
    dropped: list[int] = []  # copies that nobody wants any more: they end soon, and have failed
    # With attention by data: the step of each rank, None where it has nothing to do. Nothing else is there.
    parts: list[StepPlan | None] = []


class LogprobBlock(msgspec.Struct, array_like=True, kw_only=True):
    """Logprobs of ``n`` consecutive tokens of row ``row``; ``prompt`` tells which kind.

    ``top``: the k - asked most probable alternatives, then RowSampling.logprob_ids, as many as ``asked``. For
    prompt blocks, entry ``i`` is the logprob of prompt token ``start + i`` (token 0 has none, so start >= 1).
    """

    row: int
    prompt: bool
    start: int
    values: bytes  # float32[n]: logprob of the actual token
    ranks: bytes  # int32[n]: 1 + number of tokens with a larger logprob
    top_ids: bytes  # int32[n, k]
    top_values: bytes  # float32[n, k]
    k: int
    asked: int = 0


class Failed(msgspec.Struct, array_like=True, frozen=True):
    """A row of a step that cannot go on; its token, block or vector means nothing. ``fault``: the model is to
    blame, whose logits or vectors are no numbers, and not what the request asks for."""

    row: int
    why: str
    fault: bool = False


class StepResult(msgspec.Struct, array_like=True, kw_only=True):
    """The worker that answers -> schedule. ``tokens`` int32[*]: of the S SAMPLE rows in row order,
    ``counts[i]`` new ones of the i-th: those that it guessed right and the next one, or the next one and
    those that a grammar forces behind it; none if the token it was planned to sample has come already. KV is
    there of all but the last one, or the forced ones and the one before these. The token table has all. Those
    of a DENOISE row count among the S; of what it brings no KV is there."""

    step: int
    tokens: bytes
    counts: bytes = b""  # int32[S], or b"": one each
    logprobs: list[LogprobBlock] = []
    seconds: float = 0.0  # duration of the step on the device
    gap: float = 0.0  # idle time of the worker before this step, waiting for a plan
    error: str | None = None  # the step failed; the worker ends, and the executor tells of its death
    failed: list[Failed] = []
    vectors: list[bytes] = []  # float32[*]: one for each POOL row whose prompt is complete, in row order
    # float32[q_len, width]:
    # the hidden states behind the last norm, of each row of a request with ``hidden``, in row order; of one
    # with ``experts`` these, int32[q_len, layers, experts of a token], zeros of layers without any
    hidden: list[bytes] = []
    guessed: bytes = b""  # int32[S]: how many tokens each row guessed; b"": none guessed any
    # With several stages: int32[*] of each of the S, what it guesses behind its tokens. []: none guess.
    proposed: list[bytes] = []
    parts: list[StepResult] = []  # of each rank, as in StepPlan


class Pairs(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A sequence of tokens and their logprobs, in a tenth of the memory of tuples.
    ``columns``: int32[k], then float32[k]."""

    columns: bytes

    def __len__(self) -> int:
        return len(self.columns) // 8

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(*self.arrays())

    def arrays(self) -> tuple[array[int], array[float]]:
        half = len(self.columns) // 2
        return array("i", self.columns[:half]), array("f", self.columns[half:])

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pairs | list | tuple) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))


class TokenLogprob(msgspec.Struct, array_like=True, gc=False):
    """Without lists: an answer may have millions of these, and the collector would look at each."""

    token: int
    logprob: float
    rank: int
    top: Pairs | Sequence[tuple[int, float]] = ()
    asked: Pairs | Sequence[tuple[int, float]] = ()  # of SamplingParams.logprob_token_ids


class Delta(msgspec.Struct, gc=False):
    """What one step (or a refusal) brought for one child.
    ``finish``: None | stop | length | repetition | abort | error."""

    rid: str
    tokens: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # with the first output token
    finish: str | None = None
    matched: int | None = None  # the stop token id that ended it (it is the last of ``tokens``)
    cached_tokens: int = 0
    error: Rejected | None = None  # with finish == "error"
    vector: bytes | None = None  # float32[*], with finish == "stop": the answer to a request with ``pool``
    # float32[*, width]: hidden states of the tokens before the last one of ``tokens``, or their experts.
    hidden: list[bytes] | None = None
    # Steps so far that brought tokens where it may guess, the tokens guessed in these, and the right ones.
    guesses: tuple[int, int, int] = (0, 0, 0)

    @property
    def bare(self) -> bool:
        """It has tokens, and maybe how they end, but nothing that belongs to one of them."""
        return self.logprobs is None and self.hidden is None and self.vector is None and self.error is None

    def merge(self, later: Delta) -> None:
        """Append a later one of the same child, which is ``bare``."""
        self.tokens += later.tokens
        self.finish, self.matched = later.finish, later.matched
        self.cached_tokens = max(self.cached_tokens, later.cached_tokens)
        self.guesses = max(self.guesses, later.guesses)


class Deltas(msgspec.Struct):
    """Schedule -> detokenize, one a step."""

    items: list[Delta]


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    verifies: int = 0  # see Delta.guesses
    guessed: int = 0
    right: int = 0


class Event(msgspec.Struct, kw_only=True, gc=False):
    """Detokenize -> the request's sink. ``text`` and ``tokens`` are increments; ``usage`` is cumulative.

    A sink that is busy may merge consecutive events of one choice (``merge``).
    ``finish``: stop | length | repetition | abort.
    """

    rid: str  # the parent's
    index: int
    text: str = ""
    tokens: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_tokens: list[int] | None = None  # with the first event of a choice
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish: str | None = None
    matched: str | int | None = None
    usage: Usage
    vector: bytes | None = None  # float32[*], see Delta
    hidden: list[bytes] | None = None  # float32[*, width], see Delta; an increment

    def merge(self, later: Event) -> None:
        """Append a later event of the same choice."""
        self.text += later.text
        self.tokens = self.tokens + later.tokens
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        if self.prompt_tokens is None:
            self.prompt_tokens = later.prompt_tokens
        if self.prompt_logprobs is None:
            self.prompt_logprobs = later.prompt_logprobs
        if later.hidden is not None:
            self.hidden = (self.hidden or []) + later.hidden
        self.finish, self.matched, self.usage = later.finish, later.matched, later.usage


class Rejected(msgspec.Struct, kw_only=True):
    """Anyone -> the request's sink:
    the whole request ends with a typed error (see errors.py for the codes)."""

    rid: str
    status: int
    code: str
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    retry_after: float | None = None


class Control(msgspec.Struct, kw_only=True):
    """Executor control command, out of the step path; answered. Verbs: ``worker/runner.py: Runner._commands``
    has those of all runners, ``worker/weights.py`` those of memory and weights."""

    verb: str
    args: dict[str, Any] = {}


MOST_PROFILED = 1000  # steps of one profile


class Dense(msgspec.Struct, kw_only=True):
    """A linear layer behind the pooling: ``activation(x @ w.T + b)``. ``folder``: where its weights are;
    empty: in the model's own files."""

    folder: str
    inputs: int
    outputs: int
    bias: bool = True
    activation: str = "identity"  # identity | tanh | relu | gelu


class Pooling(msgspec.Struct, kw_only=True):
    """How a model that answers with vectors makes them
    (``model/pooling.py`` reads it from the model's files).

    The worker pools the hidden states by ``kind``, applies ``dense`` and, with task ``classify``, the
    classification head, and returns float32[size]; ``normalize`` and ``activation`` are applied to that in
    the main process, because a request may ask for another treatment.
    """

    task: str  # embed | classify
    kind: str  # cls | mean | last | max | mean_sqrt_len
    size: int
    normalize: bool = False
    dense: list[Dense] = []
    labels: list[str] = []
    # sigmoid | softmax | identity: what makes probabilities or scores of the logits.
    activation: str = "identity"
    # Lengths an embedding may be cut to ([]: any); None: it was not trained for that.
    dimensions: list[int] | None = None
    encoder: bool = False  # bidirectional: a prompt is computed in one step, and nothing of it is kept
    max_length: int | None = None  # the longest input the files recommend


class Speech(msgspec.Struct, kw_only=True):
    """How a model that transcribes is told what to write (``model/whisper_spec.py`` reads it from its files):
    the tokens that ``begin`` a text, name ``languages`` and ``tasks`` ("transcribe", "translate"), and stand
    before a text that came before (``previous``). It hears ``frames`` at a time, of ``hop`` samples each, and
    has a token for every second one."""

    begin: int
    languages: dict[str, int]  # by code; {}: it knows one
    tasks: dict[str, int]  # {}: it transcribes alone
    previous: int | None
    transcript: Transcript
    frames: int
    hop: int
    aligned: list[list[int]] = []  # layer and head of those that tell when a token was said; []: none does


class Dictation(msgspec.Struct, kw_only=True, frozen=True):
    """How a model for chats is asked to write down a sound: its prompt's ``text``, with ``{said}`` for what
    was said before, if it wants to know, and ``{language}``, for which ``named`` stands, with a ``{code}`` or
    a ``{name}``, where somebody says it. What it writes begins behind the ``mark``, if there is one."""

    text: str
    named: str
    mark: str = ""
    languages: dict[str, str] = {}  # names by code; {}: any code


class CacheGroup(msgspec.Struct, frozen=True):
    """Pages of layers that keep the same tokens: all, or of each request the last ``window``. Pages wholly
    behind a window go back to the pool while the request runs. Or, with ``every``, states: layers that make
    one value of all tokens. With a ``slab`` groups of pages share one memory: then ``pages`` are what this
    one has if it has all of that, which is so many pages a slab, behind the dummy page."""

    pages: int  # including the dummy page 0; or states, including the dummy state 0
    window: int = 0  # tokens that a token reads, itself included; 0: all
    page_bytes: int = 0  # of all its layers, on one rank
    # A text leaves a copy of its state in the prefix tree every so many tokens, whole pages; 0: no states.
    every: int = 0
    slab: int = 0  # 0: it has a memory of its own


class Tier(msgspec.Struct, frozen=True):
    """A place beside the device that keeps copies of what the prefix tree has: ``units`` of each cache group,
    whose numbers begin with 1. ``lasting``: it outlives the server. ``shared``: others write to it, too; its
    units have keys and no numbers, and what it has is asked for (``Copy``), if it may be ``least`` pages.
    ``computes``: such a one reads prompts when asked to; nothing is saved to it, and it has each unit once.
    ``early``: prompts are saved to it while they are read, for others wait for them."""

    name: str  # host | disk | store | prefill | peers
    units: list[int]
    lasting: bool = False
    shared: bool = False
    least: int = 0
    computes: bool = False
    early: bool = False


class StepCost(msgspec.Struct, kw_only=True, frozen=True):
    """A row of the table of what steps with decode rows cost: a prompt's token costs less in a step of at
    most ``tokens`` tokens and ``prompts`` prompts, which have at most ``longest`` tokens, than in one of the
    next row."""

    tokens: int
    prompts: int = LONGEST
    longest: int = LONGEST
    tile: int = 1  # tokens that such a step computes together: the last tile costs as much as if it were full


class Facts(msgspec.Struct, kw_only=True):
    """Executor -> main process once the model is loaded: what the scheduler's limits are made from.

    The first of ``groups`` keeps all tokens, even where no layer needs that:
    the prefix tree is made of its pages. One with states is the last.
    """

    groups: list[CacheGroup]
    page_size: int
    slots: int  # rows that may be resident; slot ids are 0 .. slots-1
    context_len: int
    vocab_size: int
    step_tokens: int  # largest number of tokens in one step, but for an encoder's prompt that is longer
    dtype: str
    device: str
    # The cheapest first; the last one is of all steps. []: a token costs the same in any step.
    costs: list[StepCost] = []
    ledger: dict[str, int] = {}  # bytes by purpose: weights, kv, workspace, ...
    timings: dict[str, float] = {}  # seconds by phase: import, weights, warmup, ...
    notes: list[str] = []  # decisions worth telling: kernels used, fallbacks and why
    grammars: bool = False  # the sampler honours RowSampling.grammar
    # By the names that RowSampling.processors may have: the arguments that each declares.
    processors: dict[str, list[str]] = {}
    pooling: Pooling | None = None  # the model answers with vectors alone
    drafts: int = 0  # most tokens that a decode row may guess and verify; 0: none
    leaves: int = 0  # of these the second guesses, which LEAVED rows may have
    padded_drafts: bool = False  # a step computes all drafts that its rows may have, guessed or not
    searched_drafts: bool = False  # they are looked for in what has come
    guided_drafts: bool = False  # rows with a grammar guess, too
    canvas: int = 0  # tokens of a block, which come together out of noise; 0: tokens come one by one
    scores: bool = False  # of a model that generates: RowSampling.pool is honoured
    hidden: int = 0  # values of a hidden state; 0: RowSampling.hidden is not honoured
    # Layers, and experts of a token in each; []: RowSampling.experts is not honoured.
    experts: list[int] = []
    encodes: bool = False  # it makes features of pictures for other servers, and takes no request
    # Kinds of media that the model takes ("image"): what stands for one in a prompt's text, where the chat
    # template does not write it. {}: none.
    media: dict[str, str] = {}
    untaken: dict[str, str] = {}  # kinds that models of its family take and this server does not: why
    speech: Speech | None = None  # the model writes what it hears, and nothing else
    dictation: Dictation | None = None  # it may be asked for that
    tiers: list[Tier] = []  # the nearest first
    # Of each tier and cache group, the keys of what its units hold at the start, KEY bytes each in the order
    # of their numbers, zeros for none; or b"".
    found: list[list[bytes]] = []
    adapters: int = 0  # places for adapters on the device; 0: NewRow.place is not honoured
    peer_ports: list[int] = []  # where each rank of a prefill server hands out units
    identity: dict[str, str] = {}  # peers.Identity of a server that has a role


class Progress(msgspec.Struct, kw_only=True):
    """Executor -> main process during start-up. ``done``/``total`` are bytes (download), files (compile) or
    values (load); total 0 = unknown."""

    phase: str  # download | spawn | compile | load | warmup
    message: str = ""
    done: int = 0
    total: int = 0

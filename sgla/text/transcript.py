"""What becomes of a sound that is longer than a model hears at once: window after window, each of which
begins where the last timestamp of the one before is, as in transformers (``WhisperGenerationMixin``)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sgla.media.sound import RATE
from sgla.messages import Speech, Window


class Segment(msgspec.Struct, frozen=True):
    """``start`` and ``end`` in seconds; ``tokens`` with timestamps; ``seek``: the window's first frame."""

    start: float
    end: float
    tokens: list[int]
    seek: int


class Windows:
    """Of a sound of so many ``samples``. ``long``: more than a window, so that timestamps are needed."""

    def __init__(self, speech: Speech, samples: int) -> None:
        self._speech = speech
        self.long = samples > speech.frames * speech.hop
        self._frames = samples // speech.hop if self.long else speech.frames
        self._at = 0

    def next(self) -> Window | None:
        """The window that comes now; None: there is no sound left."""
        if self._at >= self._frames:
            return None
        return Window(self._at, min(self._at + self._speech.frames, self._frames))

    def took(self, tokens: Sequence[int]) -> list[Segment]:
        """The segments of what was written of it, without the token that ended it. What comes behind the last
        two timestamps is not kept, for the next window begins there."""
        window, first = self.next(), self._speech.transcript.first_time
        assert window is not None
        ends = pairs(tokens, first)
        single = len(tokens) > 1 and tokens[-2] < first <= tokens[-1]
        if not ends:
            last = next((token for token in reversed(tokens) if token >= first), first) - first
            self._at = window.end
            length = last or (window.end - window.first) // 2
            return [self._segment(window.first, 0, length, tokens)]
        if single:
            ends.append(len(tokens))
            self._at = window.end
        else:
            heard = 2 * (tokens[ends[-1] - 1] - first)
            self._at = self._at + heard if heard else window.end  # or it would never end
            ends[-1] += 1
        found, begin = [], 0
        for end in ends:
            part = tokens[begin:end]
            closing = part[-1] if single or end != ends[-1] else part[-2]
            found.append(self._segment(window.first, part[0] - first, closing - first, part))
            begin = end
        return found

    def _segment(self, seek: int, start: float, end: float, tokens: Sequence[int]) -> Segment:
        """``start`` and ``end``: by how many timestamps behind the window's first frame."""
        frame = self._speech.hop / RATE
        return Segment((seek + 2 * start) * frame, (seek + 2 * end) * frame, list(tokens), seek)


def pairs(tokens: Sequence[int], first: int) -> list[int]:
    """Between which tokens one segment ends and another begins: the numbers of the second of two timestamps.
    ``first``: the one of 0 s."""
    return [i for i in range(1, len(tokens)) if tokens[i - 1] >= first and tokens[i] >= first]


def clock_time(seconds: float, point: str) -> str:
    """As subtitles have it: ``00:01:02,500``."""
    whole = round(seconds * 1000)
    minutes, rest = divmod(whole, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"

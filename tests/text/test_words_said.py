"""Words of a transcription, made of tokens with times."""

from __future__ import annotations

from sgla.messages import Transcript
from sgla.text.words_said import words_of

END = 1000
TRANSCRIPT = Transcript(suppressed=[], first_suppressed=[], untimed=END + 1, end=END, latest=-1)


def said(pieces: list[str], language: str = "en") -> list[tuple[str, float, float]]:
    """Of tokens that are said a second after each other; "|" stands for a timestamp."""
    tokens = [END + 5 if piece == "|" else i for i, piece in enumerate(pieces)]
    times = [float(i) for i in range(len(pieces) + 1)]
    found = words_of(tokens, times, TRANSCRIPT, lambda part: "".join(pieces[i] for i in part), language)
    return [(word.text, word.start, word.end) for word in found]


def test_words_begin_with_spaces_and_take_their_marks() -> None:
    pieces = ["|", " Hel", "lo", ",", " (", "dear", ")", " you", "!", "|", "Bye", "|"]
    assert said(pieces) == [
        ("Hello,", 1, 4),
        ("(dear)", 4, 7),
        ("you!", 7, 9),
        ("Bye", 10, 11),
    ]


def test_signs_are_words_where_there_are_no_spaces() -> None:
    assert said(["你", "好", "。"], "zh") == [("你", 0, 1), ("好。", 1, 3)]


def test_bytes_of_a_sign_belong_together() -> None:
    data = " é".encode()

    def decode(part: list[int]) -> str:
        return bytes(data[i] for i in part).decode("utf-8", "replace")

    found = words_of([0, 1, 2], [0.0, 0.5, 1.0, 2.0], TRANSCRIPT, decode, "en")
    assert [(word.text, word.start, word.end) for word in found] == [("é", 0.0, 2.0)]

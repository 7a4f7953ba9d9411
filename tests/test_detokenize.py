"""Text from tokens: the same text however the tokens are split over steps."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import PIECES, VOCAB, ToyTokenizer, text_of
from outrider.detokenize import Detokenizer

TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=14)
STOPS = st.lists(
    st.sampled_from(["a", "stop", "st", "op", "ab", "bab", " the", "\n\n", "é", "€ a", "😀"]),
    max_size=3,
)


def ids(text: str) -> list[int]:
    """Tokens of a text, the shortest ones that make it."""

    def split(data: bytes) -> list[int] | None:
        if not data:
            return []
        for piece in sorted((p for p in PIECES if p and data.startswith(p)), key=len):
            rest = split(data[len(piece) :])
            if rest is not None:
                return [PIECES.index(piece), *rest]
        return None

    tokens = split(text.encode())
    assert tokens is not None, f"no tokens make {text!r}"
    return tokens


def stream(tokens: list[int], sizes: list[int], stop: list[str]) -> tuple[list[str], str, bool]:
    """Push ``tokens`` in steps of ``sizes``; the pieces taken, the text, whether it stopped."""
    detokenizer = Detokenizer(ToyTokenizer(), stop)
    pieces: list[str] = []
    left = list(tokens)
    for size in sizes:
        for _ in range(min(size, len(left))):
            if detokenizer.push(left.pop(0)):
                detokenizer.finish()
                pieces.append(detokenizer.take(final=True))
                return pieces, detokenizer.text, True
        pieces.append(detokenizer.take())
    assert not left
    detokenizer.finish()
    pieces.append(detokenizer.take(final=True))
    return pieces, detokenizer.text, False


def splits(num_tokens: int) -> list[list[int]]:
    """All ways to split a run of tokens into steps."""
    return [
        [len(part) for part in "".join(marks).split("|")]
        for marks in product(["x", "x|"], repeat=num_tokens)
    ]


@pytest.mark.parametrize("text", ["é€😀", " aé\n\nstop", "€€", " thekedge😀"])
@pytest.mark.parametrize("stop", [[], ["zz"], ["😀"], ["\n\nst"]])
def test_every_split_streams_the_same_text(text: str, stop: list[str]) -> None:
    tokens = ids(text)
    for sizes in splits(len(tokens)):
        pieces, final, stopped = stream(tokens, sizes, stop)
        cut = min((text.find(s) for s in stop if s in text), default=len(text))
        assert "".join(pieces) == final == text[:cut]
        assert stopped == any(s in text for s in stop)
        assert not any("\ufffd" in piece for piece in pieces)


@given(TOKENS, STOPS, st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_any_tokens_stream_to_their_decoded_text(
    tokens: list[int], stop: list[str], sizes: list[int]
) -> None:
    sizes = [*sizes, len(tokens)]
    pieces, text, stopped = stream(tokens, sizes, stop)
    one_by_one = stream(tokens, [1] * len(tokens), stop)
    assert "".join(pieces) == text
    assert (text, stopped) == one_by_one[1:]
    whole = text_of(tokens)
    assert whole.startswith(text)
    if not any(s in whole for s in stop):
        assert text == whole
        assert not stopped
    else:
        assert stopped
        # The text ends before the first stop string of the first tokens that complete one.
        complete = next(
            decoded
            for n in range(1, len(tokens) + 1)
            if any(s in (decoded := text_of(tokens[:n])) for s in stop)
        )
        assert text == complete[: min(complete.find(s) for s in stop if s in complete)]


@given(TOKENS, STOPS)
def test_what_was_handed_out_is_never_taken_back(tokens: list[int], stop: list[str]) -> None:
    detokenizer = Detokenizer(ToyTokenizer(), stop)
    handed_out = ""
    for token in tokens:
        stopped = detokenizer.push(token)
        assert detokenizer.text.startswith(handed_out)
        if stopped:
            break
        handed_out += detokenizer.take()
        assert not any(s in handed_out for s in stop)


def test_a_tail_that_may_become_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(ToyTokenizer(), ["babe", "abk"])
    taken = []
    for token in ids("cbabak"):
        detokenizer.push(token)
        taken.append(detokenizer.take())
    assert taken == ["c", "", "", "", "ba", "bak"]  # "bab" may become "babe", then "ab", "abk"


def test_the_earliest_stop_string_wins() -> None:
    for stop in (["b", "ab"], ["ab", "b"]):
        assert stream(ids("cab"), [3], stop)[1:] == ("c", True)
    assert stream([15], [1], ["op", "to", "st"])[1:] == ("", True)  # one token holds them all


def test_an_unfinished_character_is_flushed_at_the_end() -> None:
    e_acute, euro = 2, 4
    for tokens, text in (([22, e_acute], "b\ufffd"), ([euro], "\ufffd"), ([0, euro, 1], "\ufffd")):
        assert stream(tokens, [1] * len(tokens), [])[:2][1] == text
        detokenizer = Detokenizer(ToyTokenizer())
        for token in tokens:
            detokenizer.push(token)
        assert "\ufffd" not in detokenizer.take()


def test_an_answer_shorter_than_the_hold_back_is_flushed() -> None:
    pieces, text, stopped = stream(ids("abc"), [1, 1, 1], ["abcdefgh"])
    assert pieces == ["", "", "", "abc"]
    assert (text, stopped) == ("abc", False)


def test_a_stop_string_before_min_tokens_is_text() -> None:
    detokenizer = Detokenizer(ToyTokenizer(), ["b"])
    assert [detokenizer.push(t, may_stop=False) for t in ids("ab")] == [False, False]
    assert detokenizer.take() == "ab"
    assert not detokenizer.push(ids("c")[0])
    assert detokenizer.push(ids("b")[0])
    assert detokenizer.text == "abc"


def test_special_tokens_are_no_text_and_do_not_break_a_stop_string() -> None:
    st_, op = 13, 14
    assert stream([21, st_, 1, op, 22], [1] * 5, ["stop"])[1:] == ("a", True)


def test_no_tokenizer_no_text() -> None:
    detokenizer = Detokenizer(None)
    assert not detokenizer.push(3)
    detokenizer.finish()
    assert detokenizer.text == detokenizer.take(final=True) == ""


def test_random_bytes_in_long_runs() -> None:
    seed = 3
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 11, 400).tolist()  # nothing but pieces of characters
    pieces, text, _ = stream(tokens, [3] * 134, [])
    assert "".join(pieces) == text == text_of(tokens), f"seed {seed}"


def test_tokens_without_text_are_not_decoded_again() -> None:
    detokenizer = Detokenizer(ToyTokenizer())
    tokens = [21, *[0] * 200, 2, *[1] * 200, 3, 22]  # also inside a character
    for token in tokens:
        detokenizer.push(token)
        assert len(detokenizer._ids) <= 4
    assert detokenizer.text == text_of(tokens)

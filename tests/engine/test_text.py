"""Events as text: stop strings wherever they fall, stop tokens, counts, and streaming that equals not streaming."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from servekit.core.request import FinishReason, RequestEvent, RequestId, TokenLogprobs
from servekit.engine.text import TextDelta, TextStream
from servekit.model.tokenizer import Tokenizer, build_dummy_tokenizer

TOKENIZER = build_dummy_tokenizer(300)
TURN = 257
WORD = 280
"""A token with the text ` w280`."""


def tokenizer_with_eos() -> Tokenizer:
    backend = Backend.from_str(TOKENIZER._backend.to_str())
    return Tokenizer(backend, bos="<|bos|>", eos="<|turn|>", pad=None)


def event(token_ids: Sequence[int], finish: FinishReason | None = None, stop_token_id: int | None = None,
          with_logprobs: bool = False) -> RequestEvent:
    logprobs = tuple(TokenLogprobs(index, -0.5, 1, ()) for index in token_ids) if with_logprobs else ()
    return RequestEvent(RequestId("r"), tuple(token_ids), logprobs, finish, stop_token_id)


def deltas_of(stream: TextStream, tokens: Sequence[int], sizes: Sequence[int] = (1,),
              finish: FinishReason = FinishReason.length) -> list[TextDelta]:
    """All deltas of an output that comes in events of the given sizes, over and over, until it has ended."""
    deltas, at, turn = [], 0, 0
    while True:
        size = sizes[turn % len(sizes)]
        is_last = at + size >= len(tokens)
        deltas.append(stream.push(event(tokens[at:at + size], finish if is_last else None)))
        if is_last or stream.is_finished:
            return deltas
        at, turn = at + size, turn + 1


def text_of(deltas: Sequence[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def cut(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """Reference: read character by character until the text ends with a stop string, the longest of several."""
    for end in range(1, len(text) + 1):
        found = max((stop for stop in stops if text[:end].endswith(stop)), key=len, default=None)
        if found is not None:
            return text[:end] if include else text[:end - len(found)], found
    return text, None


OUTPUTS = st.one_of(
    st.lists(st.sampled_from([*b"ab"]), min_size=1, max_size=30),
    st.lists(st.one_of(st.sampled_from([*b"abab \xc3\xa9", WORD, TURN]), st.integers(0, 299)), min_size=1, max_size=30))
STOPS = st.one_of(st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
                  st.lists(st.text("ab éw2\N{REPLACEMENT CHARACTER}", min_size=1, max_size=5), max_size=4))


@settings(max_examples=1000, deadline=None)
@given(tokens=OUTPUTS, stops=STOPS, include=st.booleans(), skip=st.booleans(),
       sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_streamed_text_is_the_whole_text_cut_at_the_first_stop(tokens: list[int], stops: list[str], include: bool,
                                                                skip: bool, sizes: list[int]) -> None:
    stream = TextStream(TOKENIZER, stop=stops, include_stop=include, skip_special_tokens=skip)
    deltas = deltas_of(stream, tokens, sizes)
    expected, stop = cut(TOKENIZER.decode(tokens, skip), stops, include)
    assert text_of(deltas) == expected
    assert deltas[-1].stop_reason == stop
    assert [delta.finish for delta in deltas] == [None] * (len(deltas) - 1) + [
        FinishReason.length if stop is None else FinishReason.stop]
    covered = [index for delta in deltas for index in delta.token_ids]
    assert covered == tokens[:stream.num_output_tokens]
    if stop is None:
        assert stream.num_output_tokens == len(tokens)


@settings(max_examples=300, deadline=None)
@given(tokens=OUTPUTS, stops=STOPS)
def test_tokens_come_with_their_text(tokens: list[int], stops: list[str]) -> None:
    """A delta that is not the last covers only tokens whose text has been given, and has logprobs for each."""
    stream = TextStream(TOKENIZER, stop=stops)
    text, covered = "", []
    for index in tokens:
        delta = stream.push(event([index], with_logprobs=True))
        text += delta.text
        covered += delta.token_ids
        assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)
        assert delta.text or delta.finish or not delta.token_ids
        if delta.finish is not None:
            break
        assert text.startswith(TOKENIZER.decode(covered).rstrip("\N{REPLACEMENT CHARACTER}"))


@settings(max_examples=300, deadline=None)
@given(tokens=OUTPUTS, stops=STOPS, min_tokens=st.integers(0, 10))
def test_the_first_tokens_complete_no_stop_string(tokens: list[int], stops: list[str], min_tokens: int) -> None:
    stream = TextStream(TOKENIZER, stop=stops, min_tokens=min_tokens)
    deltas = deltas_of(stream, tokens)
    if deltas[-1].finish is FinishReason.stop:
        assert stream.num_output_tokens > min_tokens
    else:
        assert text_of(deltas) == TOKENIZER.decode(tokens)


def test_a_stop_string_that_begins_in_the_first_tokens_counts() -> None:
    stream = TextStream(TOKENIZER, stop=["END"], min_tokens=4)
    assert text_of(deltas_of(stream, [*b"xENDyEND!"])) == "xENDy"
    straddling = TextStream(TOKENIZER, stop=["END"], min_tokens=3)
    assert text_of(deltas_of(straddling, [*b"xEND!"])) == "x"


def test_a_stop_string_within_the_first_tokens_is_text() -> None:
    stream = TextStream(TOKENIZER, stop=["END"], min_tokens=3)
    assert [delta.text for delta in deltas_of(stream, [*b"END!"])] == ["", "", "END", "!"]
    open_still = TextStream(TOKENIZER, stop=["ab", "abc"], min_tokens=2)
    assert text_of(deltas_of(open_still, [*b"abx"])) == "abx"


def test_a_token_with_half_a_character_waits_for_the_rest() -> None:
    stream = TextStream(TOKENIZER)
    assert stream.push(event([97, 0xC3])) == TextDelta("a", (97,))
    assert stream.push(event([0xA9, 98])) == TextDelta("éb", (0xC3, 0xA9, 98))


def test_text_is_held_only_while_it_may_be_a_stop_string() -> None:
    stream = TextStream(TOKENIZER, stop=["\n\nQ:"])
    assert [delta.text for delta in deltas_of(stream, [*b"A\n\nB\nQ\n\nQ:C"])] == [
        "A", "", "", "\n\nB", "", "\nQ", "", "", "", ""]
    assert stream.num_output_tokens == 10


def test_an_included_stop_string_is_never_held() -> None:
    stream = TextStream(TOKENIZER, stop=["END"], include_stop=True)
    assert [delta.text for delta in deltas_of(stream, [*b"xENEND!"])] == ["x", "E", "N", "E", "N", "D"]


def test_a_stop_string_inside_a_token_cuts_it() -> None:
    stream = TextStream(TOKENIZER, stop=["w2"])
    delta = stream.push(event([97, WORD, 98]))
    assert delta == TextDelta("a ", (97, WORD), (), FinishReason.stop, "w2")
    assert stream.num_output_tokens == 2
    included = TextStream(TOKENIZER, stop=["w2"], include_stop=True)
    assert included.push(event([97, WORD, 98])).text == "a w2"


@pytest.mark.parametrize(("tokens", "stops", "text"), [
    ([*b"aabab"], ["abab"], "a"), ([*b"ababaa"], ["abaa"], "ab"), ([*b"aaab"], ["b", "ab", "aab"], "a"),
    ([97, WORD], ["80", "28"], "a w"), ([97, WORD], ["28", "80"], "a w"), ([97, WORD], ["w280", " w"], "a")])
def test_the_first_stop_string_to_be_completed_counts(tokens: list[int], stops: list[str], text: str) -> None:
    assert text_of(deltas_of(TextStream(TOKENIZER, stop=stops), tokens)) == text


def test_held_text_is_given_at_the_end() -> None:
    stream = TextStream(TOKENIZER, stop=["END"])
    assert stream.push(event([*b"xEN"])) == TextDelta("x", (120,))
    assert stream.push(event([], FinishReason.abort)) == TextDelta("EN", (69, 78), (), FinishReason.abort)


def test_half_a_character_at_the_end_is_replaced_and_may_complete_a_stop_string() -> None:
    half = TextStream(TOKENIZER)
    assert half.push(event([97, 0xC3], FinishReason.length)).text == "a\N{REPLACEMENT CHARACTER}"
    stopped = TextStream(TOKENIZER, stop=["\N{REPLACEMENT CHARACTER}"])
    assert stopped.push(event([97, 0xC3], FinishReason.length)) == TextDelta(
        "a", (97, 0xC3), (), FinishReason.stop, "\N{REPLACEMENT CHARACTER}")


def test_events_after_the_end_say_nothing() -> None:
    stream = TextStream(TOKENIZER, stop=["b"])
    assert stream.push(event([*b"ab"])).finish is FinishReason.stop
    assert stream.push(event([*b"c"])).is_empty
    assert stream.push(event([], FinishReason.abort)) == TextDelta()
    assert stream.num_output_tokens == 2


@pytest.mark.parametrize(("include", "skip", "text"), [
    (False, True, "a"), (False, False, "a"), (True, True, "a"), (True, False, "a<|turn|>")])
def test_an_end_of_sequence_token_is_not_part_of_the_text(include: bool, skip: bool, text: str) -> None:
    stream = TextStream(tokenizer_with_eos(), include_stop=include, skip_special_tokens=skip)
    delta = stream.push(event([97, TURN], FinishReason.stop, stop_token_id=TURN))
    assert delta == TextDelta(text, (97, TURN), (), FinishReason.stop, None)
    assert stream.num_output_tokens == 2


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "a w280")])
def test_a_clients_stop_token_is_named_and_shown_on_request(include: bool, text: str) -> None:
    stream = TextStream(tokenizer_with_eos(), include_stop=include)
    delta = stream.push(event([97, WORD], FinishReason.stop, stop_token_id=WORD))
    assert delta == TextDelta(text, (97, WORD), (), FinishReason.stop, WORD)


def test_a_stop_tokens_text_completes_no_stop_string_unless_shown() -> None:
    hidden = TextStream(TOKENIZER, stop=["a w"])
    assert hidden.push(event([97, WORD], FinishReason.stop, stop_token_id=WORD)).stop_reason == WORD
    shown = TextStream(TOKENIZER, stop=["a w"], include_stop=True)
    assert shown.push(event([97, WORD], FinishReason.stop, stop_token_id=WORD)).stop_reason == "a w"


def test_special_tokens_alone_give_nothing_to_send() -> None:
    stream = TextStream(TOKENIZER)
    assert stream.push(event([TURN])).is_empty
    assert stream.push(event([97])) == TextDelta("a", (TURN, 97))


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="a stop string is empty"):
        TextStream(TOKENIZER, stop=["x", ""])

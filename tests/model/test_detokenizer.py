"""Incremental text: nothing split, nothing taken back, nothing sent twice, and in the end the whole text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from servekit.model.detokenizer import IncrementalDetokenizer
from servekit.model.local import LocalModel, SourceKind
from servekit.model.tokenizer import Tokenizer, build_dummy_tokenizer, load_tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTES_AND_WORDS = build_dummy_tokenizer(300)
LIKELY_BYTES = st.sampled_from([*"aé你🌶".encode(), 0xE4, 0xF0, 0x9F, 0xC0, 0xED, 0xA0, 0x80, 0xFF, 0xF4, 0x90])
TOKEN_IDS = st.lists(st.one_of(LIKELY_BYTES, st.integers(0, 299)), max_size=40)


def sentencepiece_tokenizer() -> Tokenizer:
    vocabulary = {text: index for index, text in enumerate(
        [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hi", "▁there", "é", "<s>"])}
    backend = Backend(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return Tokenizer(backend, bos="<s>", eos=None, pad=None)


def pieces_of(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@settings(max_examples=500, deadline=None)
@given(ids=TOKEN_IDS, skip=st.booleans())
def test_pieces_join_to_the_full_decode(ids: list[int], skip: bool) -> None:
    assert "".join(pieces_of(BYTES_AND_WORDS, ids, skip)) == BYTES_AND_WORDS.decode(ids, skip)


@settings(max_examples=300, deadline=None)
@given(ids=TOKEN_IDS)
def test_what_was_said_is_the_beginning_of_every_later_text(ids: list[int]) -> None:
    """Text once given stays right however the output goes on."""
    said = ""
    for end, piece in enumerate(pieces_of(BYTES_AND_WORDS, ids)[:-1], start=1):
        said += piece
        for more in ([], [0x80], [0x9F, 0x8C, 0xB6], [0x41]):
            assert BYTES_AND_WORDS.decode([*ids[:end], *more]).startswith(said)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=20))
def test_a_character_comes_with_its_last_byte(text: str) -> None:
    pieces = pieces_of(BYTES_AND_WORDS, list(text.encode()))
    expected = [part for character in text for part in [""] * (len(character.encode()) - 1) + [character]]
    assert pieces == [*expected, ""]


def test_an_incomplete_character_at_the_end_is_replaced() -> None:
    assert pieces_of(BYTES_AND_WORDS, [97, 0xF0, 0x9F]) == ["a", "", "", REPLACEMENT]


def test_whether_a_character_is_incomplete_shows() -> None:
    detokenizer = IncrementalDetokenizer(BYTES_AND_WORDS)
    states = []
    for byte in "a🌶b".encode():
        detokenizer.push(byte)
        states.append(detokenizer.is_inside_character)
    assert states == [False, True, True, True, False, False]


def test_output_after_half_a_character_shows_nothing_of_the_prompt() -> None:
    """The prompt is `abc 🌶` without its last byte; the output brings that byte."""
    *_, last = "abc 🌶".encode()
    assert "".join(pieces_of(BYTES_AND_WORDS, [last, *b" ok"])) == f"{REPLACEMENT} ok"


def test_special_tokens_are_shown_on_request_only() -> None:
    assert "".join(pieces_of(BYTES_AND_WORDS, [97, 257, 98])) == "ab"
    assert "".join(pieces_of(BYTES_AND_WORDS, [97, 257, 98], skip_special_tokens=False)) == "a<|turn|>b"


def test_a_special_token_inside_a_character_leaves_it_whole() -> None:
    assert "".join(pieces_of(BYTES_AND_WORDS, [0xC3, 257, 0xA9])) == "é" == BYTES_AND_WORDS.decode([0xC3, 257, 0xA9])


class TestSentencePiece:
    TOKENIZER = sentencepiece_tokenizer()

    @settings(max_examples=300, deadline=None)
    @given(words=st.lists(st.one_of(st.sampled_from(["▁", "▁Hi", "▁there", "é", "<s>"]), st.text(max_size=3)),
                          max_size=8))
    def test_pieces_continue_the_prompts_text(self, words: list[str]) -> None:
        """Joined, they are what output adds to the text of a prompt: its spaces, too."""
        names = {"▁": 256, "▁Hi": 257, "▁there": 258, "é": 259, "<s>": 260}
        ids = [index for word in words for index in ([names[word]] if word in names else [*word.encode()])]
        prompt = [*b"Q:"]
        assert "Q:" + "".join(pieces_of(self.TOKENIZER, ids)) == self.TOKENIZER.decode([*prompt, *ids])

    def test_the_first_words_space_is_kept(self) -> None:
        assert pieces_of(self.TOKENIZER, [257, 258]) == [" Hi", " there", ""]

    def test_bytes_make_characters(self) -> None:
        assert pieces_of(self.TOKENIZER, [257, *"🌶".encode(), 258]) == [" Hi", "", "", "", "🌶", " there", ""]


def test_default_model(default_model_path: Path) -> None:
    tokenizer = load_tokenizer(LocalModel(SourceKind.gguf, "m", default_model_path))
    text = "Grüße 你好 🌶👩‍👩‍👧 <|im_end|> and 3.14\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids, skip_special_tokens=False)) == text
    assert REPLACEMENT not in "".join(pieces_of(tokenizer, ids))
    with pytest.raises(AssertionError):  # the text does hold characters that need several tokens
        assert all(REPLACEMENT not in tokenizer.token_text(index) for index in ids)

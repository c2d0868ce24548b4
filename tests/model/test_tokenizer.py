"""Text to ids and back: against transformers, published ids, and reference implementations of BPE."""

from __future__ import annotations

import json
import sys
import threading
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import gguf
import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from servekit.config.errors import ConfigError
from servekit.model.gguf_header import read_gguf_header
from servekit.model.gguf_tokenizer import TokenType
from servekit.model.local import LocalModel, ModelFileError, SourceKind
from servekit.model.tokenizer import Tokenizer, build_dummy_tokenizer, load_tokenizer

CORPUS = ["The quick brown fox doesn't jump over 12345 lazy dogs.\n\n  Indented,\tline; and so on!",
          "Größe übertrifft Güte — naïve café, 你好世界, こんにちは, 🌶🌶 and 👩‍👩‍👧.",
          "def f(x):\n    return x ** 2  # 3.14159\n\n\nprint(f(10))\r\n"] * 4
FREQUENT = st.sampled_from(" \n\t'sdtlm0123456789aAéß你🌶▁Ġ")
TEXTS = st.text(st.one_of(st.characters(codec="utf-8"), FREQUENT), max_size=40)
SPECIAL_TEXTS = st.lists(st.one_of(TEXTS, st.sampled_from(["<s>", "</s>", "<|turn|>", " <s> "])),
                         max_size=4).map("".join)


def saved_folder(folder: Path, backend: tokenizers.Tokenizer, **settings_: object) -> Path:
    """A model folder with `backend` and a tokenizer_config.json."""
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings_}))
    return folder


def folder_model(folder: Path) -> LocalModel:
    return LocalModel(SourceKind.folder, "m", folder)


def gguf_model(path: Path) -> LocalModel:
    return LocalModel(SourceKind.gguf, "m", path)


def byte_level_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                     pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=["<s>", "</s>", "<|turn|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def llama2_backend() -> tokenizers.Tokenizer:
    """A small tokenizer of the form that Llama 2's tokenizer.json has."""
    vocabulary = {text: index for index, text in enumerate(
        ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "▁a", "ab", "▁ab",
         "abc", "é", "▁▁"])}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("ab", "c"), ("▁", "▁")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True,
                                              unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B",
                                                           special_tokens=[("<s>", 1)])
    return backend


def assert_like_transformers(folder: Path, ours: Tokenizer, text: str) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for add_special_tokens in (False, True):
        ids = ours.encode(text, add_special_tokens)
        assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
        for skip in (False, True):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip,
                                                           clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_folder(tmp_path_factory.mktemp("tokenizers") / "bytes", byte_level_backend(), bos_token="<s>",
                        eos_token={"content": "</s>", "__type": "AddedToken"}, pad_token=None)


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_folder(tmp_path_factory.mktemp("tokenizers") / "llama2", llama2_backend(), bos_token="<s>",
                        eos_token="</s>", unk_token="<unk>")


class TestTokenizerJson:
    @settings(max_examples=40, deadline=None)
    @given(text=SPECIAL_TEXTS)
    def test_byte_level_equals_transformers(self, byte_level: Path, text: str) -> None:
        assert_like_transformers(byte_level, load_tokenizer(folder_model(byte_level)), text)

    @settings(max_examples=40, deadline=None)
    @given(text=TEXTS)
    def test_sentencepiece_equals_transformers(self, llama2: Path, text: str) -> None:
        assert_like_transformers(llama2, load_tokenizer(folder_model(llama2)), text)

    def test_special_tokens(self, byte_level: Path) -> None:
        tokenizer = load_tokenizer(folder_model(byte_level))
        assert tokenizer.bos is not None and (tokenizer.bos.id, tokenizer.bos.text) == (0, "<s>")
        assert tokenizer.eos is not None and (tokenizer.eos.id, tokenizer.eos.text) == (1, "</s>")
        assert tokenizer.pad is None
        assert tokenizer.special_ids == {0, 1, 2}
        assert tokenizer.eos_token_ids == (1,)
        assert tokenizer.vocab_size == 380
        assert not tokenizer.adds_bos

    def test_text_of_a_special_token_becomes_that_token(self, byte_level: Path) -> None:
        tokenizer = load_tokenizer(folder_model(byte_level))
        assert tokenizer.encode("<|turn|>", add_special_tokens=False) == [2]

    def test_bos_is_never_doubled(self, llama2: Path) -> None:
        tokenizer = load_tokenizer(folder_model(llama2))
        assert tokenizer.adds_bos
        once = tokenizer.encode("ab", add_special_tokens=True)
        assert once[0] == 1 and 1 not in once[1:]
        assert tokenizer.encode("<s>ab", add_special_tokens=True) == tokenizer.encode("<s>ab", add_special_tokens=False)

    def test_a_bos_that_the_text_repeats_is_the_texts_own(self, byte_level: Path) -> None:
        tokenizer = load_tokenizer(folder_model(byte_level))
        assert tokenizer.encode("<s><s>", add_special_tokens=True) == [0, 0]

    @pytest.mark.parametrize(("files", "expected"), [
        ({"generation_config.json": {"eos_token_id": [5, 1]}, "config.json": {"eos_token_id": 7}}, (1, 5)),
        ({"config.json": {"eos_token_id": 7}}, (1, 7)),
        ({"generation_config.json": {"temperature": 1.0}, "config.json": {"eos_token_id": [8]}}, (1, 8)),
    ])
    def test_every_eos_of_the_model_counts(self, tmp_path: Path, files: dict[str, object],
                                           expected: tuple[int, ...]) -> None:
        folder = saved_folder(tmp_path / "m", byte_level_backend(), eos_token="</s>")
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        assert load_tokenizer(folder_model(folder)).eos_token_ids == expected

    def test_tokens_of_the_config_are_added(self, tmp_path: Path) -> None:
        backend = byte_level_backend()
        folder = saved_folder(tmp_path / "m", backend, bos_token="<new>", added_tokens_decoder={
            "380": {"content": "<tool>", "special": False, "lstrip": False, "normalized": False, "rstrip": False,
                    "single_word": False}})
        tokenizer = load_tokenizer(folder_model(folder))
        assert tokenizer.encode("<tool><new>", add_special_tokens=False) == [380, 381]
        assert tokenizer.special_ids == {0, 1, 2, 381}
        assert_like_transformers(folder, tokenizer, "a<tool>b<new>")

    def test_truncation_and_padding_of_the_file_do_not_apply(self, tmp_path: Path) -> None:
        backend = byte_level_backend()
        backend.enable_truncation(3)
        backend.enable_padding(length=8)
        tokenizer = load_tokenizer(folder_model(saved_folder(tmp_path / "m", backend)))
        assert tokenizer.decode(tokenizer.encode("a long enough text", add_special_tokens=True)) == "a long enough text"

    def test_an_override_replaces_the_models_own(self, byte_level: Path, llama2: Path) -> None:
        for override in (byte_level, byte_level / "tokenizer.json"):
            tokenizer = load_tokenizer(folder_model(llama2), str(override))
            assert tokenizer.vocab_size == 380 and tokenizer.eos_token_ids == (1,)

    def test_a_missing_override_is_a_configuration_error(self, byte_level: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"^model\.tokenizer=.*no tokenizer\.json; name a folder"):
            load_tokenizer(folder_model(byte_level), str(tmp_path))

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFileError, match=r"tokenizer\.json is missing; .*model\.tokenizer"):
            load_tokenizer(folder_model(tmp_path))

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
    def test_a_truncated_file_is_named(self, tmp_path: Path, name: str) -> None:
        folder = saved_folder(tmp_path / "m", byte_level_backend())
        (folder / name).write_text('{"bos_tok')
        with pytest.raises(ModelFileError, match=name):
            load_tokenizer(folder_model(folder))

    def test_a_decoder_whose_bytes_are_unknown_is_refused(self, tmp_path: Path) -> None:
        backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
        backend.decoder = decoders.WordPiece()
        with pytest.raises(ModelFileError, match="decoder WordPiece is not supported"):
            load_tokenizer(folder_model(saved_folder(tmp_path / "m", backend)))

    def test_a_lone_surrogate_is_refused(self, byte_level: Path) -> None:
        with pytest.raises(ValueError, match="lone surrogate"):
            load_tokenizer(folder_model(byte_level)).encode("a\ud83c", add_special_tokens=False)

    @settings(max_examples=60, deadline=None)
    @given(text=TEXTS)
    def test_token_bytes_join_to_the_text(self, byte_level: Path, llama2: Path, text: str) -> None:
        tokenizer = load_tokenizer(folder_model(byte_level))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        pieces = load_tokenizer(folder_model(llama2))
        ids = pieces.encode(text, add_special_tokens=False)
        if text:  # SentencePiece puts a space before a text, and has a mark of its own for spaces
            assert b"".join(map(pieces.token_bytes, ids)) == f" {text}".replace("▁", " ").encode()

    def test_an_id_that_is_no_token_has_no_bytes(self, byte_level: Path) -> None:
        tokenizer = load_tokenizer(folder_model(byte_level))
        assert tokenizer.token_bytes(380) == b"" and tokenizer.decode([380]) == ""

    def test_a_part_of_a_character_keeps_its_bytes(self, byte_level: Path) -> None:
        tokenizer = load_tokenizer(folder_model(byte_level))
        ids = tokenizer.encode("🫠", add_special_tokens=False)
        assert len(ids) > 1
        assert tokenizer.token_bytes(ids[0]) == "🫠".encode()[:len(tokenizer.token_bytes(ids[0]))]
        assert tokenizer.token_text(ids[0]) == "\N{REPLACEMENT CHARACTER}"


def write_gguf(path: Path, tokens: Sequence[str], types: Sequence[int], *, model: str = "gpt2", pre: str | None = None,
               merges: Sequence[str] | None = None, scores: Sequence[float] | None = None, **ids: int | bool) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    if merges is not None:
        writer.add_token_merges(list(merges))
    if scores is not None:
        writer.add_token_scores(list(scores))
    for key, value in ids.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_gguf(path: Path, pre: str | None, **ids: int | bool) -> Path:
    """The vocabulary of `byte_level_backend` as a GGUF file."""
    content = json.loads(byte_level_backend().to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].__getitem__)
    types = [TokenType.control if text in ("<s>", "</s>", "<|turn|>") else TokenType.normal for text in tokens]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["merges"]]
    return write_gguf(path, tokens, types, pre=pre, merges=merges,
                      **{"bos_token_id": 0, "eos_token_id": 1, **ids})


GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                r"\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2_WORDS = LLAMA3_WORDS.replace("{1,3}", "")
TEKKEN_WORDS = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
                r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
"""The patterns of the models' tokenizer.json files."""


def words_of(text: str, patterns: Sequence[str]) -> list[str]:
    """Reference: each pattern cuts the pieces of the ones before into matches and what lies between them."""
    pieces = [text]
    for pattern in patterns:
        pieces = [part for piece in pieces for part in regex.split(f"({pattern})", piece) if part]
    return pieces


def bpe(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Reference: merge the neighbours of the lowest rank until none are left."""
    parts = list(word)
    while len(parts) > 1:
        rank, at = min((ranks.get((parts[index], parts[index + 1]), len(ranks)), index)
                       for index in range(len(parts) - 1))
        if rank == len(ranks):
            break
        parts[at:at + 2] = [parts[at] + parts[at + 1]]
    return parts


def nfc_backend() -> tokenizers.Tokenizer:
    backend = byte_level_backend()
    backend.normalizer = normalizers.NFC()
    return backend


def backend_without_letter_e() -> tokenizers.Tokenizer:
    """Byte-level, with no token for the byte of the letter e."""
    content = json.loads(byte_level_backend().to_str())
    content["model"]["merges"] = []
    content["model"]["vocab"] = {piece: index for piece, index in content["model"]["vocab"].items() if "e" not in piece}
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def backend_that_strips() -> tokenizers.Tokenizer:
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken("<mask>", special=True, lstrip=True)])
    return backend


def backend_with(normalizer: normalizers.Normalizer) -> tokenizers.Tokenizer:
    backend = byte_level_backend()
    backend.normalizer = normalizer
    return backend


class TestMinTokens:
    @settings(max_examples=60, deadline=None)
    @given(text=st.one_of(SPECIAL_TEXTS, st.text("▁ aé\u0301\u212a\u1100\u1161\u11a8e", max_size=60)))
    @pytest.mark.parametrize("make", [byte_level_backend, llama2_backend, nfc_backend, backend_without_letter_e])
    def test_no_text_has_fewer(self, make: Callable[[], tokenizers.Tokenizer], text: str) -> None:
        tokenizer = made(make)
        assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))

    @pytest.mark.parametrize(("make", "text"), [
        (byte_level_backend, "<|turn|>"), (llama2_backend, "abc▁▁"), (nfc_backend, "\u1100\u1161\u11a8")])
    def test_a_long_text_has_many(self, make: Callable[[], tokenizers.Tokenizer], text: str) -> None:
        tokenizer = made(make)
        assert 0 < tokenizer.min_tokens(text * 1000) >= len(text.encode()) * 1000 / 60

    def test_the_longest_token_attains_it(self) -> None:
        assert build_dummy_tokenizer(300).min_tokens("<|turn|>" * 50) == 50
        assert made(backend_without_letter_e).min_tokens("e" * 1000) == 0

    @pytest.mark.parametrize("make", [
        backend_that_strips, lambda: backend_with(normalizers.Strip()), lambda: backend_with(normalizers.NFKC()),
        lambda: backend_with(normalizers.Replace(Regex(" +"), " "))])
    def test_nothing_is_said_where_text_may_vanish(self, make: Callable[[], tokenizers.Tokenizer]) -> None:
        assert made(make).min_tokens("word " * 1000) == 0

    def test_composition_makes_at_most_three_bytes_one(self) -> None:
        for code in (*range(0xD800), *range(0xE000, 0x110000)):
            composed = unicodedata.normalize("NFC", chr(code))
            for form in (chr(code), unicodedata.normalize("NFD", chr(code))):
                assert len(form.encode()) <= 3 * len(composed.encode()), hex(code)


@cache
def made(make: Callable[[], tokenizers.Tokenizer]) -> Tokenizer:
    return Tokenizer(make(), bos=None, eos=None, pad=None)


def test_other_threads_run_while_a_text_is_encoded() -> None:
    """With such an interval a thread gives way only where it gives the interpreter's lock back by itself."""
    tokenizer, ended = build_dummy_tokenizer(300), threading.Event()
    encoding = threading.Thread(target=lambda: (tokenizer.encode("x" * 2_000_000, False), ended.set()))
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        encoding.start()
        assert not ended.is_set()
    finally:
        sys.setswitchinterval(interval_s)
        encoding.join()


class TestGguf:
    @pytest.mark.parametrize(("pre", "patterns"), [
        ("gpt-2", [GPT2_WORDS]), ("smollm", [r"\p{N}", GPT2_WORDS]), ("starcoder", [r"\p{N}", GPT2_WORDS]),
        ("llama-bpe", [LLAMA3_WORDS]), ("qwen2", [QWEN2_WORDS]), ("tekken", [TEKKEN_WORDS]),
        ("default", [r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"]),
    ])
    def test_words_are_cut_by_the_rule_that_the_file_names(self, tmp_path: Path, pre: str,
                                                           patterns: list[str]) -> None:
        path = byte_level_gguf(tmp_path / "m.gguf", pre)
        tokenizer = load_tokenizer(gguf_model(path))
        metadata = read_gguf_header(path).metadata
        ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        characters = {bytes([byte]): piece for piece in metadata["tokenizer.ggml.tokens"]
                      for byte in range(256) if len(piece) == 1 and tokenizer.token_bytes(
                          metadata["tokenizer.ggml.tokens"].index(piece)) == bytes([byte])}
        whole = set(metadata["tokenizer.ggml.tokens"]) if pre in ("llama-bpe", "tekken") else set()
        for text in [*CORPUS[:3], "I'LL we'Ll it's 3.14 1234567  x\n\n y\r\nAb ABc aB $5!? //\n/ ٣٤٥ ½x — a\u00a0b  "]:
            expected = []
            for word in words_of(text, patterns):
                symbols = "".join(characters[bytes([byte])] for byte in word.encode())
                expected += [symbols] if symbols in whole else bpe(symbols, ranks)
            assert [metadata["tokenizer.ggml.tokens"][index]
                    for index in tokenizer.encode(text, add_special_tokens=False)] == expected

    def test_qwen2_normalizes_to_nfc(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(gguf_model(byte_level_gguf(tmp_path / "m.gguf", "qwen2")))
        assert tokenizer.decode(tokenizer.encode("e\u0301", add_special_tokens=False)) == "é"

    @pytest.mark.parametrize(("pre", "expected"), [
        ("llama-bpe", ["abc"]), ("tekken", ["abc"]), ("qwen2", ["a", "bc"]), ("smollm", ["a", "bc"])])
    def test_some_rules_take_a_word_that_is_a_token_whole(self, tmp_path: Path, pre: str, expected: list[str]) -> None:
        path = write_gguf(tmp_path / "m.gguf", ["a", "b", "c", "bc", "abc"], [1] * 5, pre=pre, merges=["b c"],
                          add_bos_token=False)
        tokenizer = load_tokenizer(gguf_model(path))
        assert [tokenizer.token_text(index) for index in tokenizer.encode("abc", True)] == expected

    @pytest.mark.parametrize(("pre", "flags", "expected"), [
        ("smollm", {}, False), ("smollm", {"add_bos_token": True}, True), ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
    ])
    def test_bos_is_added_as_the_file_says(self, tmp_path: Path, pre: str, flags: dict[str, bool],
                                           expected: bool) -> None:
        tokenizer = load_tokenizer(gguf_model(byte_level_gguf(tmp_path / "m.gguf", pre, **flags)))
        assert tokenizer.adds_bos is expected
        assert (tokenizer.encode("fox", add_special_tokens=True)[0] == 0) is expected

    def test_eos_is_added_as_the_file_says(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(gguf_model(byte_level_gguf(tmp_path / "m.gguf", "smollm", add_eos_token=True)))
        assert tokenizer.encode("fox", add_special_tokens=True)[-1] == 1

    def test_end_of_turn_tokens_end_a_sequence(self, tmp_path: Path) -> None:
        assert load_tokenizer(gguf_model(byte_level_gguf(tmp_path / "a.gguf", "smollm"))).eos_token_ids == (1,)
        tokenizer = load_tokenizer(gguf_model(byte_level_gguf(tmp_path / "b.gguf", "smollm", eot_token_id=2)))
        assert tokenizer.eos_token_ids == (1, 2)
        path = write_gguf(tmp_path / "c.gguf", ["<|im_end|>", "<|end|>", "a", "aa"], [3, 1, 1, 1], pre="gpt-2",
                          merges=["a a"], eos_token_id=2)
        assert load_tokenizer(gguf_model(path)).eos_token_ids == (0, 2)

    def test_an_unknown_rule_is_refused_by_name(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFileError, match=r"ggml\.pre=chameleon; known are .*smollm.*tokenizer\.json"):
            load_tokenizer(gguf_model(byte_level_gguf(tmp_path / "m.gguf", "chameleon")))

    def test_a_file_without_a_rule_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFileError, match=r"has no tokenizer\.ggml\.pre; set model\.tokenizer"):
            load_tokenizer(gguf_model(byte_level_gguf(tmp_path / "m.gguf", None)))

    def test_an_unknown_kind_is_refused_by_name(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFileError, match="of the kind t5; known are gpt2 and llama"):
            load_tokenizer(gguf_model(write_gguf(tmp_path / "m.gguf", ["a"], [1], model="t5")))

    @pytest.mark.parametrize(("tokens", "merges"), [(["a", "a"], ["a a"]), (["a", "b"], ["a b"]), (["a"], ["a"])])
    def test_an_inconsistent_vocabulary_is_refused(self, tmp_path: Path, tokens: list[str], merges: list[str]) -> None:
        with pytest.raises(ModelFileError, match=r"a token twice|has the merge 'a"):
            load_tokenizer(gguf_model(write_gguf(tmp_path / "m.gguf", tokens, [1] * len(tokens), pre="gpt-2",
                                                 merges=merges)))

    def test_a_special_token_outside_the_vocabulary_is_refused(self, tmp_path: Path) -> None:
        path = byte_level_gguf(tmp_path / "m.gguf", "smollm", add_bos_token=True, bos_token_id=999)
        with pytest.raises(ModelFileError, match="names token 999 as bos, but has 380 tokens"):
            load_tokenizer(gguf_model(path))

    def test_user_defined_tokens_are_found_whole_and_shown(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", ["<", "t", ">", "<t>", "<s>", "tt"], [1, 1, 1, 4, 3, 1], pre="gpt-2",
                          merges=["t t"])
        tokenizer = load_tokenizer(gguf_model(path))
        assert tokenizer.encode("<t><s>t", add_special_tokens=False) == [3, 4, 1]
        assert tokenizer.decode([3, 4, 1]) == "<t>t"

    @pytest.mark.parametrize("keep_bytes", [4, 30, 400, 4000])
    def test_a_truncated_file_is_refused(self, tmp_path: Path, keep_bytes: int) -> None:
        path = byte_level_gguf(tmp_path / "m.gguf", "smollm")
        path.write_bytes(path.read_bytes()[:keep_bytes])
        with pytest.raises(ModelFileError, match=r"m\.gguf: not a complete GGUF file"):
            load_tokenizer(gguf_model(path))

    @pytest.mark.parametrize("content", [b"", b"PK\3\4" + bytes(100), b"GGUF" + bytes([1, 0, 0, 0]) + bytes(100)])
    def test_another_kind_of_file_is_refused(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "m.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelFileError, match=r"m\.gguf: not a complete GGUF file"):
            read_gguf_header(path)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFileError, match=r"none\.gguf: cannot be read"):
            read_gguf_header(tmp_path / "none.gguf")

    def test_header_equals_the_gguf_packages_reading(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint64("a", 2**40)
        writer.add_float32("b", 0.5)
        writer.add_int8("c", -3)
        writer.add_bool("d", True)
        writer.add_array("e", [1, -2, 3])
        writer.add_array("f", ["x", "", "é"])
        import numpy as np

        writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
        writer.add_tensor("u", np.arange(4, dtype=np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        header, reader = read_gguf_header(path), gguf.GGUFReader(path)
        assert header.metadata == {key: field.contents() for key, field in reader.fields.items()
                                   if not key.startswith("GGUF.")}
        assert [(tensor.name, list(tensor.shape), tensor.ggml_type, tensor.offset_bytes)
                for tensor in header.tensors.values()] == [
            (tensor.name, tensor.shape.tolist(), tensor.tensor_type, tensor.data_offset) for tensor in reader.tensors]


def best_scored_merges(text: str, scores: dict[str, float]) -> list[str]:
    """Reference: SentencePiece BPE merges the neighbours whose union scores best, the leftmost of equals."""
    parts = list(text)
    while True:
        found = [(-scores[parts[at] + parts[at + 1]], at) for at in range(len(parts) - 1)
                 if parts[at] + parts[at + 1] in scores]
        if not found:
            return parts
        _, at = min(found)
        parts[at:at + 2] = [parts[at] + parts[at + 1]]


class TestSentencePieceGguf:
    PIECES = ("▁", "a", "b", "c", "▁a", "ab", "▁ab", "abc", "bc", "▁▁", "é", "ca", "cab", "▁abc")

    def path(self, folder: Path, **ids: int | bool) -> Path:
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *self.PIECES]
        types = [TokenType.unknown, TokenType.control, TokenType.control, *[TokenType.byte] * 256,
                 *[TokenType.normal] * len(self.PIECES)]
        scores = [0.0] * 259 + [-float(rank) for rank in range(len(self.PIECES))]
        return write_gguf(folder / "m.gguf", tokens, types, model="llama", scores=scores, bos_token_id=1,
                          eos_token_id=2, unknown_token_id=0, **ids)

    @settings(max_examples=200, deadline=None)
    @given(text=st.text("abcé x▁", max_size=12))
    def test_merges_follow_the_scores(self, tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
        tokenizer = load_tokenizer(gguf_model(self.path(tmp_path_factory.mktemp("spm"))))
        scores = {piece: -float(rank) for rank, piece in enumerate(self.PIECES)}
        marked = ("▁" + text).replace(" ", "▁") if text else ""
        expected = [part.replace("▁", " ") for part in best_scored_merges(marked, scores)]
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert [tokenizer.token_text(index) for index in ids] == expected

    def test_other_characters_become_bytes(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(gguf_model(self.path(tmp_path)))
        ids = tokenizer.encode("a🌶", add_special_tokens=False)
        assert ids[1:] == [3 + byte for byte in "🌶".encode()]
        assert tokenizer.decode(ids) == "a🌶"

    def test_bos_and_space_are_added_unless_the_file_says_otherwise(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(gguf_model(self.path(tmp_path)))
        assert [tokenizer.token_text(index) for index in tokenizer.encode("ab", True)] == ["<s>", " ab"]
        assert tokenizer.decode(tokenizer.encode("ab", True)) == "ab"
        bare = load_tokenizer(gguf_model(self.path(tmp_path, add_bos_token=False, add_space_prefix=False)))
        assert [bare.token_text(index) for index in bare.encode(" ab", True)] == [" ab"]
        assert bare.decode(bare.encode(" ab", True)) == " ab"

    def test_what_is_not_known_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFileError, match="remove_extra_whitespaces"):
            load_tokenizer(gguf_model(self.path(tmp_path, remove_extra_whitespaces=True)))


class TestDummy:
    @settings(max_examples=100, deadline=None)
    @given(text=TEXTS)
    def test_any_text_round_trips(self, text: str) -> None:
        tokenizer = build_dummy_tokenizer(300)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text

    def test_every_token_has_a_text(self) -> None:
        tokenizer = build_dummy_tokenizer(300)
        assert tokenizer.vocab_size == 300
        assert all(tokenizer.token_bytes(index) for index in range(300))
        assert len({tokenizer.token_bytes(index) for index in range(300)}) == 300

    def test_the_shape_gives_the_vocabulary(self) -> None:
        tokenizer = load_tokenizer(LocalModel(SourceKind.dummy, "dummy:tiny", None, "tiny"))
        assert tokenizer.vocab_size == 512
        assert tokenizer.adds_bos and tokenizer.encode("a", add_special_tokens=True) == [256, 97]
        assert tokenizer.eos_token_ids == ()

    def test_a_vocabulary_without_room_for_bytes_is_refused(self) -> None:
        with pytest.raises(ModelFileError, match="at least 258"):
            build_dummy_tokenizer(257)


@pytest.fixture(scope="module")
def default_tokenizer(default_model_path: Path) -> Tokenizer:
    return load_tokenizer(gguf_model(default_model_path))


class TestDefaultModel:
    def test_published_ids(self, default_tokenizer: Tokenizer) -> None:
        """Printed by transformers for SmolLM2, in a published notebook of Hugging Face's agents course."""
        assert default_tokenizer.encode("The Capital of France is", True) == [504, 14937, 282, 4649, 314]
        chat = ("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
                "<|im_start|>user\nThe Capital of France is<|im_end|>\n<|im_start|>assistant\n")
        assert default_tokenizer.encode(chat, add_special_tokens=True) == [
            1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2,
            198, 1, 4093, 198, 504, 14937, 282, 4649, 314, 2, 198, 1, 520, 9531, 198]

    def test_special_tokens(self, default_tokenizer: Tokenizer) -> None:
        assert default_tokenizer.bos is not None and default_tokenizer.bos.text == "<|im_start|>"
        assert default_tokenizer.eos is not None and default_tokenizer.eos.text == "<|im_end|>"
        assert default_tokenizer.eos_token_ids == (0, 2)
        assert default_tokenizer.special_ids == set(range(17))
        assert default_tokenizer.vocab_size == 49152

    def test_digits_stand_alone(self, default_tokenizer: Tokenizer) -> None:
        ids = default_tokenizer.encode("in 2024, 3.14", add_special_tokens=False)
        assert "|".join(map(default_tokenizer.token_text, ids)) == "in| |2|0|2|4|,| |3|.|1|4"

    @settings(max_examples=200, deadline=None)
    @given(text=TEXTS)
    def test_text_round_trips(self, default_tokenizer: Tokenizer, text: str) -> None:
        """Six control characters and the planes without characters have no tokens and are lost, as in transformers."""
        bytes_with_token = {default_tokenizer.token_bytes(index) for index in range(17, 300)}
        text = "".join(c for c in text if all(bytes([byte]) in bytes_with_token for byte in c.encode()))
        assert default_tokenizer.decode(default_tokenizer.encode(text, add_special_tokens=False)) == text

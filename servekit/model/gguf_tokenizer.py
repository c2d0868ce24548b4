"""A tokenizer built from the vocabulary that a GGUF file carries.

Two kinds are known: `gpt2`, byte-level BPE with the file's merges, and `llama`, SentencePiece BPE whose merge order
follows from the tokens' scores. A file names the rule that cuts text into words before BPE (`tokenizer.ggml.pre`)
but does not contain it, so the rules stand here, as the models' own tokenizer.json files define them; a rule that is
not known is refused, because a wrong one gives plausible but wrong tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from servekit.model.gguf_header import GgufHeader
from servekit.model.local import ModelFileError


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type` of one token."""

    normal = 1
    unknown = 2
    control = 3
    user_defined = 4
    unused = 5
    byte = 6


@dataclass(frozen=True)
class _WordRule:
    """How text is cut into words before BPE."""

    patterns: tuple[str, ...]
    """Each pattern isolates its matches within the pieces that the ones before have left."""
    normalizes_to_nfc: bool = False
    ignores_merges: bool = False
    """A word that is a token as a whole is taken as it is."""
    adds_bos: bool = False
    """Where the file does not say."""


_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_ONE_DIGIT_THEN_GPT2 = _WordRule((r"\p{N}", _GPT2_WORDS))
_LLAMA3 = _WordRule((rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}",),
                    ignores_merges=True, adds_bos=True)
_QWEN2 = _WordRule((rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION_AND_SPACE}",),
                   normalizes_to_nfc=True)
_TEKKEN = _WordRule((rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
                     r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",), ignores_merges=True, adds_bos=True)

_WORD_RULES = {
    "gpt-2": _WordRule((_GPT2_WORDS,)),
    "default": _WordRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "smollm": _ONE_DIGIT_THEN_GPT2,
    "starcoder": _ONE_DIGIT_THEN_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}

_TURN_ENDS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
                        "<|end_of_text|>", "<｜end▁of▁sentence｜>"})
"""Control tokens with these texts end a turn. GGUF has one field where Hugging Face models have a list of
end-of-sequence ids, so the others can be known by their text only."""


def build_gguf_tokenizer(path: Path, header: GgufHeader) -> Tokenizer:
    """The tokenizer of the GGUF file `path`. Raises ModelFileError for a kind or word rule that is not known."""
    return _Builder(path, header).build()


def gguf_eos_token_ids(header: GgufHeader) -> frozenset[int]:
    """Every token that ends a sequence or a turn."""
    named = {header.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")}
    texts = cast("list[str]", header.metadata.get("tokenizer.ggml.tokens", []))
    types = cast("list[int]", header.metadata.get("tokenizer.ggml.token_type", []))
    by_text = {index for index, (text, kind) in enumerate(zip(texts, types, strict=False))
               if kind == TokenType.control and text in _TURN_ENDS}
    return frozenset(cast("set[int]", named - {None}) | by_text)


class _Builder:
    """The parts of one file's tokenizer."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self._path = path
        self._metadata = header.metadata
        self._tokens = cast("list[str]", self._required("tokens"))
        types = cast("list[int]", self._optional("token_type", [TokenType.normal] * len(self._tokens)))
        if len(types) != len(self._tokens):
            raise self._error(f"has {len(self._tokens)} tokens but {len(types)} token types", "fetch the file again")
        self._types = types

    def build(self) -> Tokenizer:
        kind = self._required("model")
        if kind == "gpt2":
            tokenizer, adds_bos = self._byte_level()
        elif kind == "llama":
            tokenizer, adds_bos = self._sentencepiece()
        else:
            raise self._error(f"has a tokenizer of the kind {kind}; known are gpt2 and llama", _USE_TOKENIZER_JSON)
        tokenizer.add_tokens(self._added_tokens())
        tokenizer.post_processor = self._post_processor(adds_bos)
        return tokenizer

    def _byte_level(self) -> tuple[Tokenizer, bool]:
        name = self._required("pre")
        rule = _WORD_RULES.get(cast("str", name))
        if rule is None:
            raise self._error(f"cuts words by the rule tokenizer.ggml.pre={name}; known are {', '.join(_WORD_RULES)}",
                              _USE_TOKENIZER_JSON)
        tokenizer = Tokenizer(self._bpe(list(self._merges()), ignore_merges=rule.ignores_merges))
        if rule.normalizes_to_nfc:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer, rule.adds_bos

    def _sentencepiece(self) -> tuple[Tokenizer, bool]:
        """As Hugging Face converts SentencePiece BPE: spaces become ▁, bytes without a token become <0x..>."""
        if self._optional("remove_extra_whitespaces", False):
            raise self._error("asks for tokenizer.ggml.remove_extra_whitespaces, which is not known",
                              _USE_TOKENIZER_JSON)
        adds_space = bool(self._optional("add_space_prefix", True))
        unknown = self._token_id("unknown") if "tokenizer.ggml.unknown_token_id" in self._metadata else 0
        tokenizer = Tokenizer(self._bpe(list(self._merges_by_score()), byte_fallback=True, fuse_unk=True,
                                        unk_token=self._tokens[unknown]))
        prepend = [normalizers.Prepend("▁")] if adds_space else []
        tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
        strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                               *strip])
        return tokenizer, True

    def _merges(self) -> Iterator[tuple[str, str]]:
        known = frozenset(self._tokens)
        for merge in cast("list[str]", self._required("merges")):
            left, _, right = merge.partition(" ")
            if not {left, right, left + right} <= known:
                raise self._error(f"has the merge {merge!r} of what are no tokens", "fetch the file again")
            yield left, right

    def _merges_by_score(self) -> Iterator[tuple[str, str]]:
        """SentencePiece merges the neighbours whose union scores best, so the score is the merge's rank."""
        scores = cast("list[float]", self._required("scores"))
        normal = {text: index for index, (text, kind) in enumerate(zip(self._tokens, self._types, strict=True))
                  if kind == TokenType.normal}
        for token in sorted(normal, key=lambda text: -scores[normal[text]]):
            splits = [(token[:at], token[at:]) for at in range(1, len(token))]
            yield from sorted((pair for pair in splits if pair[0] in normal and pair[1] in normal),
                              key=lambda pair: (normal[pair[0]], normal[pair[1]]))

    def _bpe(self, merges: list[tuple[str, str]], **options: object) -> models.BPE:
        vocabulary = {text: index for index, text in enumerate(self._tokens)}
        if len(vocabulary) != len(self._tokens):
            raise self._error("has a token twice in its vocabulary", "fetch the file again")
        return models.BPE(vocab=vocabulary, merges=merges, **options)

    def _added_tokens(self) -> list[AddedToken]:
        """Tokens found in text as a whole: control tokens and the like, in the order of their ids."""
        special = {TokenType.control, TokenType.unknown}
        return [AddedToken(text, special=kind in special, normalized=False)
                for text, kind in zip(self._tokens, self._types, strict=True)
                if kind in special or kind == TokenType.user_defined]

    def _post_processor(self, adds_bos: bool) -> processors.TemplateProcessing:
        before = ["bos"] if self._optional("add_bos_token", adds_bos) else []
        after = ["eos"] if self._optional("add_eos_token", False) else []
        ids = {role: self._token_id(role) for role in before + after}
        return processors.TemplateProcessing(
            single=[*before, "$A", *after], pair=[*before, "$A", "$B", *after],
            special_tokens=[{"id": role, "ids": [index], "tokens": [self._tokens[index]]}
                            for role, index in ids.items()])

    def _token_id(self, role: str) -> int:
        index = cast("int", self._required(f"{role}_token_id"))
        if index >= len(self._tokens):
            raise self._error(f"names token {index} as {role}, but has {len(self._tokens)} tokens",
                              "fetch the file again")
        return index

    def _required(self, key: str) -> object:
        if f"tokenizer.ggml.{key}" not in self._metadata:
            raise self._error(f"has no tokenizer.ggml.{key}", _USE_TOKENIZER_JSON)
        return self._metadata[f"tokenizer.ggml.{key}"]

    def _optional(self, key: str, default: object) -> object:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _error(self, what: str, remedy: str) -> ModelFileError:
        return ModelFileError(f"{self._path} {what}; {remedy}")


_USE_TOKENIZER_JSON = "set model.tokenizer to the model's tokenizer.json"

"""Text to token ids and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from servekit.config.errors import ConfigError
from servekit.model.gguf_header import read_gguf_header
from servekit.model.gguf_tokenizer import build_gguf_tokenizer, gguf_eos_token_ids
from servekit.model.local import LocalModel, ModelFileError, SourceKind
from servekit.model.spec_dummy import read_dummy_spec


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that marks structure rather than text."""

    id: int
    text: str


class Tokenizer:
    """A model's tokenizer: the `tokenizers` package's, with its special tokens and the exact bytes of every token."""

    def __init__(self, backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None, pad: str | None,
                 eos_token_ids: Iterable[int] = ()) -> None:
        """Take over `backend`.

        `eos_token_ids` end a sequence beside `eos`. Raises ModelFileError if the tokens' bytes cannot be known.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._piece_bytes = _piece_bytes(backend.decoder)
        self._bytes_of_id: dict[int, bytes] = {}
        self.bos = self._special(bos)
        self.eos = self._special(eos)
        self.pad = self._special(pad)
        self.eos_token_ids = tuple(sorted({*eos_token_ids, *([self.eos.id] if self.eos else [])}))
        """Every token that ends a sequence, `eos` among them."""
        self.special_ids = frozenset(index for index, token in backend.get_added_tokens_decoder().items()
                                     if token.special)
        """Tokens that `skip_special_tokens` leaves out of the text."""
        self.vocab_size = max(backend.get_vocab().values(), default=-1) + 1
        """One more than the largest token id; the model's embedding may have more rows."""
        self.adds_bos = self.bos is not None and backend.encode("").ids[:1] == [self.bos.id]
        """Whether `encode` puts BOS before the text when asked to add special tokens."""
        self._density = _density(backend, self._piece_bytes)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`.

        The text of a special token inside `text` becomes that token, as in transformers and vLLM: chat templates
        rely on it. A text that begins with BOS (a rendered chat template) does not get another one.
        Other threads run meanwhile. Raises ValueError for a lone surrogate, which has no UTF-8 form.
        """
        try:
            # `encode` would hold the interpreter's lock; a batch of one gives it back.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise ValueError("the text has a lone surrogate, which is not valid Unicode") from error
        ids: list[int] = encoding.ids
        if add_special_tokens and self.adds_bos and self.bos and ids[:2] == [self.bos.id] * 2:
            return ids[1:]
        return ids

    def min_tokens(self, text: str) -> int:
        """A number of tokens that `text` surely has, known without encoding it; 0 where nothing is known."""
        return 0 if self._density is None else self._density.min_tokens(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids` taken by themselves; invalid UTF-8 becomes U+FFFD, ids that are no tokens become nothing."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token adds to a text, b"" for an id that is no token."""
        known = self._bytes_of_id.get(token_id)
        if known is None:
            piece = self._backend.id_to_token(token_id)
            known = self._bytes_of_id[token_id] = b"" if piece is None else self._piece_bytes(piece)
        return known

    def token_text(self, token_id: int) -> str:
        """A token's bytes as text; a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _special(self, text: str | None) -> SpecialToken | None:
        index = None if text is None else self._backend.token_to_id(text)
        return None if text is None or index is None else SpecialToken(index, text)


def load_tokenizer(local: LocalModel, override: str | None = None) -> Tokenizer:
    """The tokenizer of a model, or the one that `model.tokenizer` names: a folder or a tokenizer.json.

    Raises ModelFileError for a file that is missing or cannot be used, ConfigError for a wrong `override`.
    """
    if override is not None:
        return _load_override(Path(override).expanduser(), _model_eos_token_ids(local))
    match local.kind:
        case SourceKind.folder:
            return _load_files(local.files / "tokenizer.json", _model_eos_token_ids(local))
        case SourceKind.gguf:
            return _load_gguf(local.files)
        case SourceKind.dummy:
            return build_dummy_tokenizer(read_dummy_spec(local.shape).vocab_size)


def _load_override(path: Path, eos_token_ids: frozenset[int]) -> Tokenizer:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError("model.tokenizer", path, "there is no tokenizer.json",
                          "name a folder that holds one, or the file itself, or set model.tokenizer=null")
    return _load_files(file, eos_token_ids)


def _load_files(file: Path, eos_token_ids: Iterable[int]) -> Tokenizer:
    """From tokenizer.json and what its folder says about special tokens, as transformers reads them."""
    if not file.is_file():
        raise ModelFileError(f"{file} is missing; save the model's fast tokenizer there (transformers' "
                             "save_pretrained writes it) or set model.tokenizer")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelFileError(f"{file} is not a tokenizer ({error}); fetch it again") from error
    settings = {**read_json(file.with_name("special_tokens_map.json")),
                **read_json(file.with_name("tokenizer_config.json"))}
    _add_missing_tokens(backend, settings)
    return Tokenizer(backend, bos=_text(settings.get("bos_token")), eos=_text(settings.get("eos_token")),
                     pad=_text(settings.get("pad_token")), eos_token_ids=eos_token_ids)


def _add_missing_tokens(backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
    """Register the special tokens that tokenizer_config.json names and tokenizer.json does not."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = sorted(settings.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    backend.add_tokens([AddedToken(**{key: value for key, value in token.items() if key != "__type"})
                        for _, token in declared if token["content"] not in known])
    named = [settings.get(f"{role}_token") for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
    extra = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    texts = [_text(token) for token in [*named, *(extra.values() if isinstance(extra, dict) else extra)]]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False)
                                for text in dict.fromkeys(texts) if text is not None and text not in known])


def _text(token: str | dict[str, Any] | None) -> str | None:
    """A token in tokenizer_config.json: its text, or an object with its text."""
    return token["content"] if isinstance(token, dict) else token


def _load_gguf(path: Path) -> Tokenizer:
    header = read_gguf_header(path)
    backend = build_gguf_tokenizer(path, header)

    def text_of(role: str) -> str | None:
        index = header.metadata.get(f"tokenizer.ggml.{role}_token_id")
        return backend.id_to_token(index) if isinstance(index, int) else None

    return Tokenizer(backend, bos=text_of("bos"), eos=text_of("eos"), pad=text_of("padding"),
                     eos_token_ids=gguf_eos_token_ids(header))


def _model_eos_token_ids(local: LocalModel) -> frozenset[int]:
    """End-of-sequence ids that the model's files name outside its tokenizer."""
    match local.kind:
        case SourceKind.folder:
            for name in ("generation_config.json", "config.json"):
                ids = read_json(local.files / name).get("eos_token_id")
                if ids is not None:
                    return frozenset([ids] if isinstance(ids, int) else ids)
            return frozenset()
        case SourceKind.gguf:
            return gguf_eos_token_ids(read_gguf_header(local.files))
        case SourceKind.dummy:
            return frozenset()


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file. Raises ModelFileError if it is malformed."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{file} cannot be read ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise ModelFileError(f"{file} holds no JSON object; fetch it again")
    return content


_DUMMY_BOS, DUMMY_TURN = "<|bos|>", "<|turn|>"
_DUMMY_SPECIAL = (_DUMMY_BOS, DUMMY_TURN)


def build_dummy_tokenizer(vocab_size: int) -> Tokenizer:
    """One token a byte (ids 0 to 255), then BOS and a turn marker, then made-up words; nothing ends a sequence.

    The words are never the result of encoding, but a model with random weights may produce them, and then every
    token of its output has a text. Raises ModelFileError if `vocab_size` has no room for bytes and special tokens.
    """
    smallest = 256 + len(_DUMMY_SPECIAL)
    if vocab_size < smallest:
        raise ModelFileError(f"a vocabulary of {vocab_size} is too small for a byte-level tokenizer; choose a dummy "
                             f"shape with a vocabulary of at least {smallest}")
    pieces = [*_BYTE_CHARACTERS, *_DUMMY_SPECIAL, *(f"Ġw{index}" for index in range(smallest, vocab_size))]
    backend = tokenizers.Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*_DUMMY_SPECIAL])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{_DUMMY_BOS} $A", pair=f"{_DUMMY_BOS} $A $B", special_tokens=[(_DUMMY_BOS, 256)])
    return Tokenizer(backend, bos=_DUMMY_BOS, eos=None, pad=None)


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level BPE (GPT-2).

    Printable Latin-1 stands for itself; the other 68 bytes take the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]


_BYTE_CHARACTERS = _byte_characters()
_BYTE_OF_CHARACTER = {character: byte for byte, character in enumerate(_BYTE_CHARACTERS)}


def _byte_level_bytes(piece: str) -> bytes:
    """Bytes of a piece of byte-level BPE; a piece with any other character (an added token) is plain text."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    """Bytes of a SentencePiece piece without byte fallback."""
    return piece.replace("▁", " ").encode()


def _byte_fallback_bytes(piece: str) -> bytes:
    """Bytes of a SentencePiece piece where <0x..> stands for one byte."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return _sentencepiece_bytes(piece)


def _piece_bytes(decoder: decoders.Decoder | None) -> Callable[[str], bytes]:
    """The function from a vocabulary entry to its bytes under `decoder`."""
    steps = [] if decoder is None else _steps(json.loads(decoder.__getstate__()))
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level_bytes
    spaces_are_marked = all(_is_sentencepiece(step) for step in steps) and kinds & {"Replace", "Metaspace"}
    if spaces_are_marked:
        return _byte_fallback_bytes if "ByteFallback" in kinds else _sentencepiece_bytes
    raise ModelFileError(f"a tokenizer with the decoder {', '.join(sorted(kinds)) or 'none'} is not supported; "
                         "byte-level BPE and SentencePiece are: set model.tokenizer to such a tokenizer.json")


def _steps(component: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a normalizer, a pre-tokenizer or a decoder, which may be a sequence."""
    if component["type"] != "Sequence":
        return [component]
    return next(steps for name, steps in component.items() if name != "type")


def _is_sentencepiece(step: dict[str, Any]) -> bool:
    """Whether a decoding step only turns ▁ into spaces, joins, or strips the first space of a whole text."""
    match step:
        case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
            return True
        case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
            return True
        case {"type": "Metaspace", "replacement": "▁"}:
            return True
        case {"type": "ByteFallback" | "Fuse"}:
            return True
    return False


_MOST_SHRINKAGE = 3
"""Bytes of a text that a normalizer below makes one byte of: canonical composition (NFC) of three, as of U+212A to
K, and SentencePiece reads ▁, which takes three, like a space."""


@dataclass(frozen=True)
class _Density:
    """How much text a token can stand for."""

    max_token_bytes: int
    lost_bytes: bytes
    """Bytes that have no token, and so are dropped from a text."""

    def min_tokens(self, text: str) -> int:
        num_bytes = len(text.encode().translate(None, delete=self.lost_bytes))
        return -(-num_bytes // self.max_token_bytes)


def _density(backend: tokenizers.Tokenizer, piece_bytes: Callable[[str], bytes]) -> _Density | None:
    """The density of a tokenizer; None if a token may stand for any amount of text.

    That is so where parts of a text are dropped, or where unknown characters share a token.
    """
    changes = [step for component in (backend.normalizer, backend.pre_tokenizer) if component is not None
               for step in _steps(json.loads(component.__getstate__()))]
    takes_spaces = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    if takes_spaces or not all(map(_keeps_text, changes)):
        return None
    tokens = {piece_bytes(piece) for piece in backend.get_vocab()}
    lost_bytes = bytes([byte for byte in range(256) if bytes([byte]) not in tokens])
    is_exact = backend.normalizer is None and piece_bytes is _byte_level_bytes
    if lost_bytes and not is_exact:
        return None
    return _Density(max(map(len, tokens), default=1) * (1 if is_exact else _MOST_SHRINKAGE), lost_bytes)


def _keeps_text(step: dict[str, Any]) -> bool:
    """Whether a normalizer or a pre-tokenizer drops no part of a text."""
    match step:
        case {"type": "NFC" | "Prepend" | "ByteLevel" | "Digits" | "Metaspace"}:
            return True
        case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
            return True
        case {"type": "Split", "behavior": behavior}:
            return bool(behavior != "Removed")
    return False

"""Text from tokens as they come, one at a time."""

from __future__ import annotations

import codecs

from servekit.model.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns one request's output tokens into text that is never taken back.

    Every token adds bytes (`Tokenizer.token_bytes`) and the bytes are decoded as UTF-8 as far as they are certain: a
    character is held until it is complete, a byte that cannot begin or continue one becomes U+FFFD at once (one per
    maximal invalid sequence, as the Unicode standard recommends). The text follows from the output tokens alone, so
    a prompt that ends inside a character lends nothing to it. A first word keeps the space before it: output
    continues a prompt, and what SentencePiece strips from the start of a whole text is not there.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        """With `skip_special_tokens`, special tokens have no text."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` makes certain; empty while a character is incomplete."""
        if token_id in self._hidden:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    @property
    def is_inside_character(self) -> bool:
        """Whether the last tokens' bytes are the beginning of a character that is still to come."""
        return self._decoder.getstate()[0] != b""

    def flush(self) -> str:
        """The end of the text: U+FFFD if a character stayed incomplete."""
        return self._decoder.decode(b"", final=True)

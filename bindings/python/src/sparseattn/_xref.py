# SPDX-License-Identifier: MIT
"""Cross-references of code and structured text: the constructor, and the identifiers of a tokenized text."""

from __future__ import annotations

import re
from typing import Any, Sequence

import numpy as np

from ._arrays import integers, tensor_in
from ._core import ArgumentError, ffi, integer, lib, sized
from ._patterns import Pattern, as_pattern, make_pattern

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LONGEST = 100  # characters of an identifier: what is longer is encoded data
_SHORTEST_OPEN, _SHORTEST_COMPLETED = 2, 3


def xref(
    ids: Any,
    symbols: Any = None,
    *,
    sinks: int = 32,
    window: int = 64,
    budget: int = 224,
    links: int | None = None,
    ngram_keys: int = 7,
    symbol_before: int = 3,
    symbol_after: int = 10,
    look_back: int = 32,
    stop_ratio: int = 48,
) -> Pattern:
    """Causal: sinks, a window, and spans around earlier places where the last tokens, the identifier being typed or
    those just typed already occurred. For code and structured text; made from a text's tokens alone.

        pattern = sa.xref(ids, sa.symbols_of(tokenizer, ids))

    ids            token ids of the text [tokens], int32 or int64: an extent has at most so many keys. A row depends on
                   no later token, so that one pattern serves every beginning of the text
    symbols        [tokens, 2], int32 or int64: the identifier open at the end of each token, and the one that the token
                   completed; -1 for none. None: a text without identifiers
    sinks          first tokens that all see
    window         nearest tokens, the query itself among them; it widens while the budget lasts
    budget         most keys of a row, at least sinks + window
    links          most linked keys of a row; None: half of the budget, or what sinks and window leave of it
    ngram_keys     keys linked from the last token of an earlier n-gram on (4, 3 and 2 tokens, the 3 latest of each)
    symbol_before  keys linked before an identifier's token
    symbol_after   keys linked after it
    look_back      tokens whose completed identifiers are linked
    stop_ratio     at token p, only identifiers that occurred up to max(p / stop_ratio, 4) times are; 0: all

    sparseattn.h has the definition word by word. Raises ArgumentError for numbers that break the rules, ShapeError for
    symbols of another length, DTypeError.
    """
    numbers = {
        "sinks": sinks,
        "window": window,
        "budget": budget,
        "ngram_keys": ngram_keys,
        "symbol_before": symbol_before,
        "symbol_after": symbol_after,
        "look_back": look_back,
        "stop_ratio": stop_ratio,
    }
    numbers |= {} if links is None else {"links": links}
    params = sized("spattn_xref", **{name: _field(name, number) for name, number in numbers.items()})
    pairs = ffi.NULL if symbols is None else tensor_in(symbols, "symbols")
    tokens = integers(ids, "token_ids")
    made = make_pattern(lib.spattn_pattern_xref, tokens, pairs, params)
    made._sizes = {"seq_q": tokens.shape[0]}
    return made


def _field(name: str, number: Any) -> int:
    """The number as a field of spattn_xref, where 0 is the default and -1 a 0. Raises DTypeError and ArgumentError."""
    argument, least = f"params.{name}", 1 if name in ("window", "budget") else 0
    number = integer(number, argument)
    if number < least:
        raise ArgumentError(f"argument {argument} is {number}; accepted: {least} or more", "SPATTN_E_RANGE", argument)
    return number or -1


def xref_extend(pattern: Pattern | str, ids: Any, symbols: Any = None) -> Pattern:
    """The xref pattern of a text that goes on, as when a model writes it: equal to that of the whole text, in the time
    of the new tokens where `pattern` came from this function and is extended for the first time.

        reader = sa.SymbolReader(tokenizer)
        pattern = sa.xref(prompt, reader.read(prompt))
        pattern = sa.xref_extend(pattern, [token], reader.read([token]))

    pattern  xref(...) itself, no composition, or its text
    ids      token ids that follow [more], int32 or int64
    symbols  [more, 2], as of xref; None: these tokens have none

    Raises ArgumentError for another pattern, ShapeError for symbols of another length, DTypeError.
    """
    pairs = ffi.NULL if symbols is None else tensor_in(symbols, "symbols")
    begun, tokens = as_pattern(pattern), integers(ids, "token_ids")
    made = make_pattern(lib.spattn_pattern_xref_extend, begun._handle, tokens, pairs)
    made._sizes = {name: size + tokens.shape[0] for name, size in begun._sizes.items()}
    return made


def symbols_of(tokenizer: Any, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """The identifiers of a text, for xref: int64 [tokens, 2], -1 for none.

    Column 0 numbers the identifier that the text up to the end of each token ends with, if it has 2 characters or more;
    column 1 the last one that the token brought to its end, if it has 3 or more. An identifier is
    [A-Za-z_][A-Za-z0-9_]*, of at most 100 characters. Row i depends on ids[: i + 1] alone.

    tokenizer  what has decode(ids) -> str: of transformers, tokenizers, tiktoken, sentencepiece; or such a function
    ids        token ids of one text
    """
    return SymbolReader(tokenizer).read(ids)


class SymbolReader:
    """symbols_of a text that comes some tokens at a time."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: as of symbols_of."""
        self._decode = getattr(tokenizer, "decode", tokenizer)
        self._pieces: dict[int, str] = {}
        self._last: int | None = None  # the token that was read last
        self._open = ""  # the identifier that the text ends with
        self._numbers: dict[str, int] = {}

    def read(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """int64 [tokens, 2] of the tokens that follow those read before."""
        rows = []
        for token in ids:
            text = self._open + self._piece(int(token))
            found = list(_IDENTIFIER.finditer(text))
            is_open = bool(found) and found[-1].end() == len(text)
            completed = [match.group() for match in found if match.end() < len(text)]
            self._open = found[-1].group()[: _LONGEST + 1] if is_open else ""
            rows.append(
                (
                    self._number(self._open, _SHORTEST_OPEN),
                    self._number(completed[-1] if completed else "", _SHORTEST_COMPLETED),
                )
            )
        return np.array(rows, np.int64).reshape(-1, 2)

    def _number(self, identifier: str, shortest: int) -> int:
        if not shortest <= len(identifier) <= _LONGEST:
            return -1
        return self._numbers.setdefault(identifier, len(self._numbers))

    def _piece(self, token: int) -> str:
        """What the next token adds to the text. It is decoded behind the token before it, since some tokenizers drop
        the space that a text begins with; once for each id."""
        before, self._last = self._last, token
        if before is None:
            return self._text([token])
        if token not in self._pieces:
            alone, both = self._text([before]), self._text([before, token])
            self._pieces[token] = both[len(alone) :] if both.startswith(alone) else self._text([token])
        return self._pieces[token]

    def _text(self, tokens: list[int]) -> str:
        try:
            text: str = self._decode(tokens, skip_special_tokens=False)
        except TypeError:  # a decoder without that word
            text = self._decode(tokens)
        return text

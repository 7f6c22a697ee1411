"""Texts as a column: tokenized by Hugging Face in batches when rows are read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkhvd.data.columns.ragged import Ragged
from sparkhvd.errors import InvalidArgumentError

# A fast tokenizer stores the truncation of the last call, and cannot change it while another thread calls it.
_one_call = threading.Lock()
# Rows per call of the tokenizer; few, because a reader that stops waits for the running call.
_ROWS = 4096
# Tokenizers without a limit have a `model_max_length` above this number.
_NO_LIMIT = 1 << 40


class Arguments(dict[str, Any]):
    """Arguments of `forward` from one column, by name."""


@dataclass(frozen=True, eq=False, repr=False)
class tokenizer:  # noqa: N801 - used as a function: collate_fn={"text": tokenizer(tok)}
    """Collate function for a column of strings, using a tokenizer of `transformers`.

    It returns `input_ids` and `attention_mask`, both int64 (rows, tokens). Both become arguments of `forward` if the
    column is the model's only input, or if `inputs` binds it to one of the two names:
    `inputs={"input_ids": "text", ...}`. An argument with another name receives the dict of both.

    Attributes:
        tok: a tokenizer of `transformers`; it is pickled with the model.
        max_length: maximum of tokens per row, including special tokens; None uses the tokenizer's `model_max_length`.
        padding: "longest" pads rows to the longest of the batch, "max_length" to that length.

    Raises:
        InvalidArgumentError: the tokenizer is not from `transformers`, or has no padding token; or an argument is out
            of range.
    """

    tok: Any = field(repr=False)
    max_length: int | None = None
    padding: str = "longest"

    def __post_init__(self) -> None:
        if not callable(self.tok) or not hasattr(self.tok, "pad_token_id"):
            raise InvalidArgumentError(
                f"tokenizer: {self.tok!r:.100} is not a tokenizer of transformers. Give AutoTokenizer.from_pretrained(...), or "
                "PreTrainedTokenizerFast(tokenizer_object=..., pad_token='[PAD]') for one of the package tokenizers."
            )
        if self.tok.pad_token_id is None:
            raise InvalidArgumentError(
                "tokenizer: it has no padding token. Set one, for example tok.pad_token = tok.eos_token."
            )
        if self.padding not in ("longest", "max_length"):
            raise InvalidArgumentError(
                f"tokenizer: padding is {self.padding!r}; it must be 'longest' or 'max_length'."
            )
        if self.max_length is not None and self.max_length < 1:
            raise InvalidArgumentError(
                f"tokenizer: max_length is {self.max_length}; it must be at least 1."
            )
        if self.padding == "max_length" and self._limit is None:
            raise InvalidArgumentError(
                "tokenizer: padding is 'max_length', but neither max_length nor the tokenizer gives a length. Give max_length."
            )

    def __repr__(self) -> str:
        kind = f"{type(self.tok).__name__} of {len(self.tok)} tokens"
        return f"tokenizer({kind}, max_length={self._limit}, padding={self.padding!r})"

    @property
    def _limit(self) -> int | None:
        if self.max_length is not None:
            return self.max_length
        limit = int(self.tok.model_max_length)
        return limit if limit < _NO_LIMIT else None

    def encode(self, texts: Sequence[str]) -> Ragged:
        """Encode texts to tokens, int64, without padding."""
        options: dict[str, Any] = {"padding": False, "return_attention_mask": False}
        if self._limit is not None:
            options |= {"truncation": True, "max_length": self._limit}
        rows: list[list[int]] = []
        for start in range(0, len(texts), _ROWS):
            with _one_call:
                rows += self.tok(list(texts[start : start + _ROWS]), **options)["input_ids"]
        if not rows:
            return Ragged.empty(np.int64)
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return Ragged.from_lengths(
            np.fromiter((n for row in rows for n in row), np.int64, int(lengths.sum())), lengths
        )

    def __call__(self, rows: Ragged | Sequence[str]) -> Arguments:
        """Pad the rows of a batch, either results of `encode` or texts."""
        tokens = rows if isinstance(rows, Ragged) else self.encode(rows)
        width = int(tokens.lengths.max(initial=0))
        if self.padding == "max_length" and self._limit is not None:
            width = self._limit
        places, kept = np.arange(width), tokens.lengths[:, None]
        is_left = getattr(self.tok, "padding_side", "right") == "left"
        mask: npt.NDArray[np.bool_] = places >= width - kept if is_left else places < kept
        ids = np.full(mask.shape, self.tok.pad_token_id, np.int64)
        ids[mask] = tokens.gathered()
        return Arguments(input_ids=ids, attention_mask=mask.astype(np.int64))

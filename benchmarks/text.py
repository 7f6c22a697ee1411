"""Embeddings of texts: `transform` with `collate_fn={"text": tokenizer(...)}`, beside `predict_batch_udf` with the same model and tokenizer.

    PYTHONPATH=. build/users-env/bin/python benchmarks/text.py [--rows 8000] [--rounds 5] [--json FILE] [--write]

In the environment of `make test-users`. The model is a BERT of 4 layers with 128 states, made from its configuration; texts have 3 to 128
tokens, 26 in the middle, as sentences of reviews have. Both run on `local[2]`, one thread a task, by turns, and give the mean of the last states.
`predict_batch_udf` gets batches of 32, with which it is faster than with 128, and pads each to its longest row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from common import Report, Target, local_session, median_and_quartiles

WORDS, WIDTH, LENGTH, BATCH = 2000, 128, 128, 32
FASTER, CLOSE = 1.5, 1e-4


def made_tokenizer() -> Any:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{n}" for n in range(WORDS))]
    raw = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]"
    )


class Embedding(nn.Module):
    """(rows, tokens) to (rows, WIDTH): the mean of the last states."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=WORDS + 4,
            hidden_size=WIDTH,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=4 * WIDTH,
            max_position_embeddings=LENGTH,
        )
        self.body = BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.body(input_ids, attention_mask).last_hidden_state
        kept = attention_mask.unsqueeze(2)
        return (states * kept).sum(1) / kept.sum(1)


def batch_udf(net: nn.Module, tok: Any) -> Any:
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import ArrayType, FloatType

    def make() -> Callable[[Any], Any]:
        torch.set_num_threads(1)
        net.eval()

        def predict(texts: Any) -> Any:
            made = tok(
                texts.tolist(),
                padding=True,
                truncation=True,
                max_length=LENGTH,
                return_tensors="pt",
                return_token_type_ids=False,
            )
            with torch.inference_mode():
                return net(**made).numpy()

        return predict

    return predict_batch_udf(make, return_type=ArrayType(FloatType()), batch_size=BATCH)


def measure(spark: Any, rows: int, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Measure the seconds by way, and the largest difference of two embeddings."""
    from pyspark.ml.functions import vector_to_array

    from sparkhvd.estimator import TorchModel, tokenizer

    rng = np.random.default_rng(0)
    counts = np.clip(rng.lognormal(3, 0.8, rows), 1, LENGTH - 2).astype(int)
    texts = [(" ".join(f"w{w}" for w in rng.integers(0, WORDS, n)),) for n in counts]
    df = spark.createDataFrame(texts, ["text"]).repartition(2).cache()
    df.count()
    torch.manual_seed(0)
    net, tok = Embedding().eval(), made_tokenizer()
    model = TorchModel.from_module(
        net,
        inputs={"input_ids": "text"},
        collate_fn={"text": tokenizer(tok, max_length=LENGTH)},
        outputCols=["embedding"],
        widths=[WIDTH],
    )
    ways = {
        "sparkhvd": model.transform(df).select(vector_to_array("embedding").alias("e")),
        "predict_batch_udf": df.select(batch_udf(net, tok)("text").alias("e")),
    }
    few = [np.array([row.e for row in way.limit(200).collect()]) for way in ways.values()]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way.write.format("noop").mode("overwrite").save()
            if number:  # the first loads the model
                seconds[name].append(time.perf_counter() - began)
    return seconds, float(np.abs(few[0] - few[1]).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    report = Report(f"Embeddings of {given.rows:,} texts by a small BERT")
    with local_session(2) as spark:
        seconds, difference = measure(spark, given.rows, given.rounds)
    report.raw.update(seconds)
    ours, theirs = seconds["sparkhvd"], seconds["predict_batch_udf"]
    targets = [
        Target("times", float(np.median(theirs) / np.median(ours)), FASTER, at_least=True),
        Target("difference", difference, CLOSE, at_least=False, unit=""),
    ]
    cells = [
        f"{median_and_quartiles(each)}, {given.rows / np.median(each):,.0f} rows/s"
        for each in (ours, theirs)
    ]
    report.table(["transform", "predict_batch_udf", "targets"], [[*cells, targets]])
    report.note(f"{given.rounds} rounds. The difference is the largest difference of any element.")
    report.finish("benchmarks/text.py", write=given.write, json_path=given.json)


if __name__ == "__main__":
    main()

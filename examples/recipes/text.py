"""Classify texts by a transformer of Hugging Face, which gets tokens by its own tokenizer; with --lora by adapters alone.

    python examples/recipes/text.py [--rows 600] [--epochs 3] [--lora 8]

With LoRA ranks exchange, and checkpoints hold, the adapters and the last layer; the frozen rest is written once.

Texts, tokenizer and a small BERT are made here, so that nothing is downloaded. Of yours: `AutoTokenizer.from_pretrained(name)` and
`AutoModel.from_pretrained(name)`.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import torch
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import DataFrame, SparkSession
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import AutoModel, BertConfig, PreTrainedTokenizerFast

from sparkhvd.estimator import TorchEstimator, tokenizer

GOOD = "great lovely superb excellent delightful charming fine splendid"
BAD = "awful boring terrible dull poor dreadful weak tedious"
PLAIN = "the film a plot scene actor was with music and its end we saw it again last year"


def texts(spark: SparkSession, rows: int) -> DataFrame:
    """Make reviews of 5 to 60 words, of which one in six says what they think."""
    rng = random.Random(0)
    made = []
    for number in range(rows):
        said = (GOOD if number % 2 else BAD).split()
        words = [rng.choice(PLAIN.split()) for _ in range(int(5 + 55 * rng.random() ** 2))]
        words[::6] = [rng.choice(said) for _ in words[::6]]
        made.append((" ".join(words), number % 2))
    return spark.createDataFrame(made, "text string, is_good int")


def trained_tokenizer() -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    special = trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"])
    raw.train_from_iterator([GOOD, BAD, PLAIN], special)
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")


class Classifier(nn.Module):
    """A transformer, the mean of its states over a row's tokens, and one layer."""

    def __init__(self, body: nn.Module, classes: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(body.config.hidden_size, classes)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.body(input_ids, attention_mask).last_hidden_state
        kept = attention_mask.unsqueeze(2)
        return self.head((states * kept).sum(1) / kept.sum(1))


def small_bert(vocabulary: int) -> nn.Module:
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    return AutoModel.from_config(config, add_pooling_layer=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lora", type=int, default=0, help="rank of the adapters; 0 trains all")
    given = parser.parse_args()
    spark = SparkSession.builder.master("local[2]").appName("text").getOrCreate()
    seen, held_out = texts(spark, given.rows).randomSplit([0.8, 0.2], seed=1)
    tok = trained_tokenizer()
    torch.manual_seed(0)
    body = small_bert(len(tok))
    if given.lora:
        from peft import LoraConfig, get_peft_model

        body = get_peft_model(body, LoraConfig(r=given.lora, target_modules=["query", "value"]))
    net = Classifier(body, classes=2)
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    print(f"{trained:,} of {sum(p.numel() for p in net.parameters()):,} parameters are trained")
    with tempfile.TemporaryDirectory() as store:
        model = TorchEstimator(
            model=net,
            optimizer=torch.optim.AdamW,
            learning_rate=0.01 if given.lora else 0.001,
            loss=nn.CrossEntropyLoss(),
            inputs={"input_ids": "text"},  # and attention_mask
            label_cols=["is_good"],
            collate_fn={"text": tokenizer(tok, max_length=64)},
            batch_size=16,
            epochs=given.epochs,
            num_proc=2,
            random_seed=1,
            store=store,
            run_id="text",
        ).fit(seen)
        (checkpoint,) = Path(store, "runs/text/checkpoints").glob("epoch-*.pt")
        num_bytes = checkpoint.stat().st_size
        predicted = model.transform(held_out)
        evaluator = MulticlassClassificationEvaluator(labelCol="is_good", metricName="accuracy")
        accuracy = evaluator.evaluate(predicted)
    print(f"accuracy {accuracy:.3f}, a checkpoint of {num_bytes:,} bytes")
    spark.stop()


if __name__ == "__main__":
    main()

"""Tokenizers of Hugging Face as collate functions, and LoRA by PEFT: fits on 2 ranks, transform, saved models."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

transformers = pytest.importorskip("transformers", reason="runs where it is: make test-users")
peft = pytest.importorskip("peft", reason="runs where it is: make test-users")

import torch  # noqa: E402 - after importorskip
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import sparkhvd  # noqa: E402
import sparkhvd.torch as hvd  # noqa: E402
from sparkhvd import TorchEstimator, TorchModel  # noqa: E402
from sparkhvd.data.columns.ragged import Ragged  # noqa: E402
from sparkhvd.errors import InvalidArgumentError  # noqa: E402
from sparkhvd.estimator import Callback, tokenizer  # noqa: E402
from sparkhvd.estimator.transform.worker import groups_by_length  # noqa: E402
from sparkhvd.training.modules.architecture import dump_shell  # noqa: E402
from tests.harness.by_value import by_value  # noqa: E402
from tests.harness.spark import ROOT, run_script  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
travels_by_value = by_value(__name__)
WORDS = [f"w{n}" for n in range(50)]
ROWS = 80


def made_tokenizer(**options: Any) -> Any:
    vocabulary = {word: n for n, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    given = {"pad_token": "[PAD]", "unk_token": "[UNK]", **options}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **given)


def bert(hidden: int = 32, layers: int = 2) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=52,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=4 * hidden,
        max_position_embeddings=32,
    )
    body: nn.Module = transformers.AutoModel.from_config(config, add_pooling_layer=False)
    return body


class Regression(nn.Module):
    def __init__(self, body: nn.Module, hidden: int = 32) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(hidden, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        kept = attention_mask.unsqueeze(2)
        scores: Tensor = self.head((out * kept).sum(1) / kept.sum(1))
        return scores


class Towers(nn.Module):
    """Two texts, each as its tokenizer's dict."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(52, 8, mode="sum", padding_idx=0)

    def forward(self, query: Any, document: Any) -> Tensor:
        left, right = (self.table(each["input_ids"]) for each in (query, document))
        return (left * right).sum(1, keepdim=True)


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 25, ROWS)
    texts = [" ".join(rng.choice(WORDS, n)) for n in lengths]
    rows = [(t, texts[-n], float(t.count("w1")) / 10) for n, t in enumerate(texts)]
    return spark.createDataFrame(rows, ["text", "other", "y"]).cache()


def fitted(df: DataFrame, model: nn.Module, **options: Any) -> Any:
    given: dict[str, Any] = {
        "optimizer": torch.optim.Adam,
        "learning_rate": 0.01,
        "loss": nn.MSELoss(),
        "inputs": {"input_ids": "text"},
        "label_cols": ["y"],
        "collate_fn": {"text": tokenizer(made_tokenizer(), max_length=20)},
        "batch_size": 8,
        "epochs": 3,
        "num_proc": 2,
        "random_seed": 3,
        "verbose": 0,
        **options,
    }
    return TorchEstimator(model=model, **given).fit(df)


def expected_of(model: Any, df: DataFrame) -> Any:
    """Compute the outputs of the texts one by one."""
    tok, net = made_tokenizer(), model.getModel()
    found = []
    with torch.no_grad():
        for row in df.collect():
            tokens = tok(row.text, truncation=True, max_length=20, return_tensors="pt")
            found.append(float(net(tokens["input_ids"], tokens["attention_mask"])))
    return np.array(found)


def outputs(model: Any, df: DataFrame) -> Any:
    return np.array([row.y__output for row in model.transform(df).collect()])


def test_model_trains_and_transforms_a_text_column(df: DataFrame, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = fitted(df, Regression(bert()))
    assert model.history[-1]["loss"] < model.history[0]["loss"]
    expected = expected_of(model, df)
    np.testing.assert_allclose(outputs(model, df), expected, atol=1e-5)
    model.write().overwrite().save(str(tmp_path / "model"))
    with sparkhvd.trust():
        loaded = TorchModel.load(str(tmp_path / "model"))
    np.testing.assert_allclose(outputs(loaded, df), expected, atol=1e-5)


def test_two_ranks_train_on_texts_like_one_rank(df: DataFrame) -> None:
    weights = []
    for num_proc in (1, 2):
        torch.manual_seed(0)
        options = {"num_proc": num_proc, "batch_size": 16 // num_proc, "optimizer": torch.optim.SGD}
        model = fitted(df, Regression(eval_bert()), **options)
        weights.append(model.getModel().state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=0, atol=1e-4)


def eval_bert() -> nn.Module:
    """A BERT without dropout, because dropout differs between ranks."""
    body = bert()
    for part in body.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return body


def test_model_gets_two_text_columns_as_separate_dicts(df: DataFrame) -> None:
    torch.manual_seed(0)
    of_text = tokenizer(made_tokenizer(), max_length=20)
    model = fitted(
        df,
        Towers(),
        inputs={"query": "text", "document": "other"},
        collate_fn={"text": of_text, "other": of_text},
    )
    assert outputs(model, df).shape == (ROWS,)


def test_tokens_are_padded_on_the_tokenizer_side() -> None:
    right = tokenizer(made_tokenizer(), max_length=3)
    made = right(["w0 w1", "w2 w3 w4 w5"])
    assert made["input_ids"].tolist() == [[2, 3, 0], [4, 5, 6]]
    assert made["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    left = tokenizer(made_tokenizer(padding_side="left"), max_length=3, padding="max_length")
    assert left(["w0"])["input_ids"].tolist() == [[0, 0, 2]]
    encoded = right.encode(["w0 w1", "w2"])
    assert isinstance(encoded, Ragged)
    assert right(encoded)["input_ids"].tolist() == [[2, 3], [4, 0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tokenizer(str), "is not a tokenizer of transformers"),
        (lambda: tokenizer(made_tokenizer(pad_token=None)), "it has no padding token"),
        (lambda: tokenizer(made_tokenizer(), padding="none"), "padding is 'none'"),
        (lambda: tokenizer(made_tokenizer(), max_length=0), "max_length is 0"),
        (
            lambda: tokenizer(made_tokenizer(), padding="max_length"),
            "neither max_length nor the tokenizer",
        ),
    ],
)
def test_invalid_tokenizers_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_length_groups_contain_every_row_once() -> None:
    lengths = np.random.default_rng(0).integers(0, 600, 5000)
    groups = groups_by_length(lengths)
    assert sorted(np.concatenate(groups)) == list(range(5000))
    padded = [len(rows) * lengths[rows].max() for rows in groups]
    assert max(padded) <= 8192
    assert sum(padded) < 1.05 * lengths.sum()


# -- LoRA --------------------------------------------------------------------------------------------


class CountsBytes(Callback):
    """Records the bytes of broadcasts at the beginning, and of allreduces of an epoch."""

    def on_train_begin(self, ctx: Any) -> None:
        self.begin = self.counted("broadcast")

    def on_epoch_begin(self, ctx: Any) -> None:
        self.before = self.counted("allreduce")

    def on_epoch_end(self, ctx: Any, record: Any) -> None:
        record["broadcast_bytes"] = self.begin
        record["gradient_bytes"] = self.counted("allreduce") - self.before

    def counted(self, collective: str) -> int:
        entries = hvd.metrics().counters["collectives"]
        return sum(entry["bytes"] for entry in entries if entry["collective"] == collective)


def lora(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, target_modules=["query"])
    return Regression(peft.get_peft_model(bert(256, 4), config), 256)


def full() -> nn.Module:
    return Regression(bert(256, 4), 256)


def checkpoint_bytes(store: Path, run_id: str, epoch: int = 3) -> int:
    return (store / f"runs/{run_id}/checkpoints/epoch-{epoch}.pt").stat().st_size


def test_lora_sends_and_saves_only_trained_weights(df: DataFrame, tmp_path: Path) -> None:
    options = {"callbacks": [CountsBytes()], "store": tmp_path}
    whole = fitted(df, full(), run_id="full", **options)
    model = fitted(df, lora(), run_id="lora", return_model="best", validation=0.2, **options)
    for name in ("broadcast_bytes", "gradient_bytes"):
        assert model.history[0][name] <= 0.02 * whole.history[0][name], name
    best = min(model.history, key=lambda record: record["val_loss"])["epoch"]
    found, compared = (checkpoint_bytes(tmp_path, *run) for run in (("lora", best), ("full", 3)))
    assert found <= 0.02 * compared
    # The frozen weights are unchanged, and the others belong to the best epoch.
    before, after = lora().state_dict(), model.getModel().state_dict()
    assert all(torch.equal(after[n], v) for n, v in before.items() if "base_layer" in n)
    assert not any(torch.equal(after[n], v) for n, v in before.items() if "lora_B" in n)
    expected = expected_of(model, df)
    np.testing.assert_allclose(outputs(model, df), expected, atol=1e-5)
    with sparkhvd.trust():
        again = TorchModel.from_run(tmp_path, "lora")
    np.testing.assert_allclose(outputs(again, df), expected, atol=1e-5)
    again.write().overwrite().save(str(tmp_path / "model"))
    with sparkhvd.trust():
        loaded = TorchModel.load(str(tmp_path / "model"))
    np.testing.assert_allclose(outputs(loaded, df), expected, atol=1e-5)


class FailsOnce(Callback):
    """Ends the first attempt in its third epoch."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def on_epoch_begin(self, ctx: Any) -> None:
        if ctx.epoch == 3 and ctx.rank == 0 and not Path(self.mark).exists():
            Path(self.mark).touch()
            raise ValueError("once")


def test_lora_resumes_exactly_with_its_saved_frozen_weights(df: DataFrame, tmp_path: Path) -> None:
    options = {"store": tmp_path, "callbacks": [FailsOnce(tmp_path / "mark")], "run_id": "parts"}
    with pytest.raises(sparkhvd.RankError, match="once"):
        fitted(df, lora(), **options)
    # Like a script that makes its base from random numbers each time.
    found = fitted(df, lora(seed=1), **options).getModel().state_dict()
    options = {**options, "run_id": "whole"}
    for name, value in fitted(df, lora(), **options).getModel().state_dict().items():
        assert torch.equal(found[name], value), name


# -- the recipe --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--lora", "8", "--epochs", "6")], ids=["all", "LoRA"])
def test_the_text_recipe_reaches_its_accuracy(options: tuple[str, ...]) -> None:
    result = run_script(ROOT / "examples" / "recipes" / "text.py", *options, timeout_s=280)
    assert result.returncode == 0, result.output
    found = re.search(r"accuracy (\S+), a checkpoint of (\S+) bytes", result.output)
    assert found, result.output
    assert float(found[1]) > 0.9
    assert int(found[2].replace(",", "")) < (200_000 if options else 2_000_000)


@pytest.mark.parametrize("is_called", [False, True])
def test_loaded_model_returns_hidden_states_in_a_new_process(
    tmp_path: Path, is_called: bool
) -> None:
    model = bert(layers=2)
    model.config.output_hidden_states = True
    if is_called:  # adds hooks
        model(torch.ones(2, 3, dtype=torch.int64))
    (tmp_path / "shell").write_bytes(dump_shell(model))
    torch.save(model.state_dict(), tmp_path / "weights")
    program = (
        "import pathlib, sys, torch\n"
        "from sparkhvd.training.modules.architecture import load_shell\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "model = load_shell((folder / 'shell').read_bytes(), torch.load(folder / 'weights'))\n"
        "print(len(model(torch.ones(2, 3, dtype=torch.int64)).hidden_states))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, cwd=ROOT
    )
    assert done.stdout.split() == ["3"]

"""Many kinds of models, outputs and optimizers through a whole fit. Each equals a plain loop over the same rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import sparkhvd
import sparkhvd.torch as hvd
from sparkhvd import InvalidArgumentError, TorchEstimator, TorchModel
from sparkhvd.estimator import Callback
from sparkhvd.training.rank_sync import seed_everything
from tests.harness.by_value import by_value
from tests.harness.soak import left_to_soak

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

travels_by_value = by_value(__name__)

ROWS, BATCH, EPOCHS, SEED = 24, 8, 2, 7
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(ROWS, 4)).astype("float32")
Y = (X @ np.array([1.0, -1.0, 0.5, 2.0])).astype("float32")
COLUMNS: dict[str, Any] = {
    "x": X,
    "y": Y,
    "k": (Y > 0).astype("int64"),
    "ids": GENERATOR.integers(0, 9, (ROWS, 4)),
    "length": GENERATOR.integers(1, 5, ROWS),
}


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    rows = [tuple(value[i].tolist() for value in COLUMNS.values()) for i in range(ROWS)]
    types = "x array<float>, y float, k bigint, ids array<bigint>, length bigint"
    return spark.createDataFrame(rows, types).coalesce(1)


class Autoencoder(nn.Module):
    """Returns a reconstruction, mean and log-variance, and needs no label."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 4), nn.Linear(2, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encode(x).chunk(2, -1)
        code = mean
        if self.training:
            code = mean + torch.randn_like(mean) * (log_var / 2).exp()
        return self.decode(code), mean, log_var


def elbo(model: nn.Module, batch: Any, ctx: Any) -> Tensor:
    made, mean, log_var = model(batch["x"])
    kl = -0.5 * (1 + log_var - mean**2 - log_var.exp()).mean()
    return F.mse_loss(made, batch["x"]) + kl


def first_is_mean(model: nn.Module, batch: Any, ctx: Any) -> Tensor:
    made = model(batch["x"])[0]
    return F.mse_loss(made, batch["x"].mean(1, keepdim=True).expand_as(made))


class Scores(NamedTuple):
    scores: Tensor
    rest: dict[str, list[Tensor]]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.classes = nn.Linear(4, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Scores:
        return Scores(self.value(x), {"classes": [self.classes(x)]})


class Packed(nn.Module):
    """Packs rows by their lengths. A row of zeros is invalid."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(1, 5, batch_first=True), nn.Linear(5, 1)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x.unsqueeze(-1), length, batch_first=True, enforce_sorted=False
        )
        return self.out(self.rnn(packed)[1][0][-1])  # type: ignore[no-any-return]


class Particular(nn.Module):
    """Has its own assertions, and takes 8 rows in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        assert (x < 0).any(), "only real rows"
        if self.training:
            x = x.reshape(BATCH, 4)
        result: Tensor = self.layer(x)
        return result


@dataclass
class Result:
    logits: Tensor
    loss: Tensor | None = None
    cache: Any = field(default_factory=object)


class OwnLoss(nn.Module):
    """Computes its loss if it gets labels, as models of model libraries do."""

    def __init__(self, num_ids: int = 9) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(num_ids, 5), nn.Linear(5, 2)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Result:
        logits = self.out(self.embed(input_ids).mean(1))
        if labels is None:
            return Result(logits)
        return Result(logits, F.cross_entropy(logits, labels))


class LossLast(OwnLoss):
    """Returns its loss after its outputs, or None there."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        result = super().forward(input_ids, targets)
        return result.logits, result.loss


class TrainsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise NotImplementedError("beam search")
        made: Tensor = self.layer(x)
        return made


class Wrapped(nn.Module):
    """Its forward has no named argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = OwnLoss()
        self.count = nn.Parameter(torch.zeros(1))

    def forward(self, **arguments: Tensor) -> Result:
        result: Result = self.inner(**arguments)
        return result


class NeedsLabels(OwnLoss):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Result:  # type: ignore[override]
        return super().forward(input_ids, labels)


class WithEmpty(nn.Module):
    """Returns an empty output beside its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.layer(x)
        return made, made[:, :0]


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(9, 1, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.embed(ids)
        return result


class Wide(nn.Module):
    """Has a table with sparse gradients, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.EmbeddingBag(9, 3, sparse=True), nn.Linear(3, 1)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.out(self.embed(ids))
        return result


class Averaging(torch.optim.SGD):
    """Evaluates with the mean of all weights so far, as schedule-free optimizers do."""

    is_training = False

    def train(self) -> None:
        self._swap(to_training=True)

    def eval(self) -> None:
        self._swap(to_training=False)

    def _swap(self, *, to_training: bool) -> None:
        if self.is_training == to_training:
            return
        self.is_training = to_training
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "other" in state:
                other = state["other"].clone()
                state["other"].copy_(parameter.data)
                parameter.data.copy_(other)

    def step(self, closure: Any = None) -> Any:
        assert self.is_training
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            count = state["count"] = state.get("count", 0) + 1
            other = state.setdefault("other", torch.zeros_like(parameter))
            other.add_(parameter.data - other, alpha=1 / count)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=5, line_search_fn="strong_wolfe")


def of_each_kind(parameters: Any) -> list[torch.optim.Optimizer]:
    table, *rest = parameters
    return [torch.optim.SparseAdam([table], lr=0.05), Averaging(rest, lr=0.05)]


def twice(parameters: Any) -> list[torch.optim.Optimizer]:
    parameters = list(parameters)
    return [sgd(parameters), sgd(parameters)]


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def mse(model: Any, batch: Any) -> Tensor:
    output = model(batch["x"])
    return F.mse_loss(output, batch["y"].reshape(output.shape))


@dataclass
class Kind:
    """Model with the Params of its fit, and the loss of the plain loop."""

    model: Callable[[], nn.Module]
    params: dict[str, Any]
    loss: Callable[[Any, Any], Tensor] = mse
    outputs: tuple[str, ...] = ("y__output",)
    optimizer: Callable[[Any], Any] = sgd
    inputs: tuple[str, ...] = ("x",)
    batch_size: int = BATCH


class Looks(Callback):
    def on_epoch_end(self, ctx: Any, record: Any) -> None:
        assert record["loss"] > 0


def linear() -> nn.Module:
    return nn.Linear(4, 1)


REGRESSION: dict[str, Any] = {
    "loss": nn.MSELoss(),
    "feature_cols": ["x"],
    "label_cols": ["y"],
}
KINDS = {
    "no labels, several outputs": Kind(
        Autoencoder,
        {"feature_cols": ["x"], "train_step": elbo, "outputCols": ["made", "mean", "log_var"]},
        lambda model, batch: elbo(model, batch, None),
        ("made", "mean", "log_var"),
    ),
    "more outputs than labels": Kind(
        Autoencoder,
        {"feature_cols": ["x"], "label_cols": ["y"], "train_step": elbo},
        lambda model, batch: elbo(model, batch, None),
        ("output_0", "output_1", "output_2"),
    ),
    "the features as labels": Kind(
        lambda: nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 4)),
        {**REGRESSION, "label_cols": ["x"]},
        lambda model, batch: F.mse_loss(model(batch["x"]), batch["x"]),
        ("x__output",),
    ),
    "nested outputs": Kind(
        TwoHeads,
        {
            "loss": [nn.MSELoss(), nn.CrossEntropyLoss()],
            "feature_cols": ["x"],
            "label_cols": ["y", "k"],
        },
        lambda model, batch: (
            0.5 * F.mse_loss(model(batch["x"]).scores, batch["y"].reshape(-1, 1))
            + 0.5 * F.cross_entropy(model(batch["x"]).rest["classes"][0], batch["k"])
        ),
        ("y__output", "k__output"),
    ),
    "packed sequences": Kind(
        Packed,
        {**REGRESSION, "feature_cols": ["x", "length"]},
        lambda model, batch: F.mse_loss(
            model(batch["x"], batch["length"]), batch["y"].reshape(-1, 1)
        ),
        inputs=("x", "length"),
    ),
    "own assertions, fixed batch": Kind(Particular, {**REGRESSION, "drop_last": True}),
    "own loss": Kind(
        OwnLoss,
        {"inputs": {"input_ids": "ids", "labels": "k"}},
        lambda model, batch: model(batch["ids"], batch["k"]).loss,
        ("k__output",),
        inputs=("ids",),
    ),
    "own loss behind the outputs": Kind(
        LossLast,
        {"inputs": {"input_ids": "ids", "targets": "k"}},
        lambda model, batch: model(batch["ids"], batch["k"])[1],
        ("k__output",),
        inputs=("ids",),
    ),
    "own loss of a wrapper": Kind(
        Wrapped,
        {"inputs": {"input_ids": "ids", "labels": "k"}},
        lambda model, batch: model(input_ids=batch["ids"], labels=batch["k"]).loss,
        ("k__output",),
        inputs=("ids",),
    ),
    "an output without numbers": Kind(
        WithEmpty,
        {"feature_cols": ["x"], "train_step": first_is_mean},
        lambda model, batch: first_is_mean(model, batch, None),
        ("output_0", "output_1"),
    ),
    "LBFGS": Kind(linear, REGRESSION, optimizer=lbfgs, batch_size=ROWS),
    "SparseAdam": Kind(
        Sparse,
        {**REGRESSION, "feature_cols": ["ids"]},
        lambda model, batch: F.mse_loss(model(batch["ids"]), batch["y"].reshape(-1, 1)),
        optimizer=torch.optim.SparseAdam,
        inputs=("ids",),
    ),
    "several optimizers": Kind(
        Wide,
        {**REGRESSION, "feature_cols": ["ids"], "lr_scheduler": halving},
        lambda model, batch: F.mse_loss(model(batch["ids"]), batch["y"].reshape(-1, 1)),
        optimizer=of_each_kind,
        inputs=("ids",),
    ),
    "an optimizer with modes": Kind(
        linear, REGRESSION, optimizer=lambda p: Averaging(p, lr=0.05), batch_size=BATCH
    ),
    "TorchScript, with a callback": Kind(
        lambda: torch.jit.script(nn.Linear(4, 1)), {**REGRESSION, "callbacks": [Looks()]}
    ),
    "a parametrization": Kind(
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 1)), REGRESSION
    ),
}


def plain(kind: Kind) -> nn.Module:
    """Train in plain PyTorch on the rows in their order."""
    torch.manual_seed(3)
    model = kind.model()
    made: Any = kind.optimizer(model.parameters())
    optimizers = made if isinstance(made, list) else [made]
    schedulers = [
        kind.params["lr_scheduler"](o) for o in optimizers if "lr_scheduler" in kind.params
    ]
    for epoch in range(EPOCHS):
        model.train()
        seed_everything(SEED, epoch, 0)
        for optimizer in optimizers:
            if hasattr(optimizer, "train"):
                optimizer.train()
        for batch in batches(kind.batch_size):

            def closure(batch: Any = batch) -> Tensor:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss = kind.loss(model, batch)
                loss.backward()
                return loss

            if len(optimizers) == 1:
                made.step(closure)
                continue
            closure()
            for optimizer in optimizers:
                optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    for optimizer in optimizers:
        if hasattr(optimizer, "eval"):
            optimizer.eval()
    return model.eval()


def batches(size: int) -> Iterator[dict[str, Tensor]]:
    for start in range(0, ROWS, size):
        yield {n: torch.tensor(v[start : start + size]) for n, v in COLUMNS.items()}


def outputs_of(model: nn.Module, inputs: tuple[str, ...]) -> list[Any]:
    (batch,) = batches(ROWS)
    with torch.no_grad():
        if isinstance(model, Wrapped):
            model = model.inner
        found = model(*(batch[name] for name in inputs))
    if dataclasses.is_dataclass(found):
        found = [found.logits]
    if isinstance(found, Scores):
        found = [found.scores, found.rest["classes"][0]]
    found = [found] if isinstance(found, Tensor) else [each for each in found if each is not None]
    return [output.double().numpy().reshape(ROWS, -1) for output in found]


def transformed(model: TorchModel, df: DataFrame, names: tuple[str, ...]) -> list[Any]:
    rows = model.transform(df).select(*names).collect()
    values = [[row[name] for row in rows] for name in names]
    return [
        np.array([v if isinstance(v, float) else v.toArray() for v in column]).reshape(ROWS, -1)
        for column in values
    ]


# The other cases differ only in a rank's work, which tests without Spark cover.
THROUGH_SPARK = (
    "no labels, several outputs",
    "nested outputs",
    "packed sequences",
    "own loss",
    "LBFGS",
    "TorchScript, with a callback",
    "a parametrization",
)


@pytest.mark.parametrize(
    "name",
    [
        *THROUGH_SPARK,
        *left_to_soak(
            "corpus/test_slice, training/test_module_kinds: without Spark",
            *(name for name in KINDS if name not in THROUGH_SPARK),
        ),
    ],
)
def test_a_fit_equals_a_plain_loop(df: DataFrame, tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    torch.manual_seed(3)
    fitted = TorchEstimator(
        model=kind.model(),
        optimizer=kind.optimizer,
        batch_size=kind.batch_size,
        epochs=EPOCHS,
        num_proc=1,
        shuffle=False,
        random_seed=SEED,
        verbose=0,
        **kind.params,
    ).fit(df)
    expected = outputs_of(plain(kind), kind.inputs)
    predictions = df.drop("y", "k") if name.startswith("own loss") else df
    found = transformed(fitted, predictions, kind.outputs)
    for output, value in zip(found, expected, strict=True):
        np.testing.assert_allclose(output, value, rtol=1e-5, atol=1e-6)
    fitted.write().save(str(tmp_path / "model"))
    with sparkhvd.trust():
        loaded = TorchModel.load(str(tmp_path / "model"))
    for output, value in zip(transformed(loaded, predictions, kind.outputs), found, strict=True):
        np.testing.assert_array_equal(output, value)


def test_transform_explains_why_a_training_only_module_fails(df: DataFrame) -> None:
    fit = TorchEstimator(
        model=TrainsOnly(), optimizer=sgd, epochs=1, num_proc=1, verbose=0, **REGRESSION
    )
    fitted = fit.fit(df)
    assert isinstance(fitted.getModel(), TrainsOnly)
    with pytest.raises(
        InvalidArgumentError, match="NotImplementedError: beam search.*in eval mode"
    ):
        fitted.transform(df)


def test_module_that_rejects_synthetic_rows_is_checked_with_real_rows(df: DataFrame) -> None:
    module = Particular().eval()
    model = TorchModel.from_module(
        module, feature_cols=["x"], label_cols=["y"], input_shapes=[[-1, 4]]
    )
    (found,) = transformed(model, df, ("y__output",))
    np.testing.assert_allclose(found, outputs_of(module, ("x",))[0], rtol=1e-6)
    with pytest.raises(InvalidArgumentError, match="the DataFrame is empty"):
        TorchModel.from_module(
            module, feature_cols=["x"], label_cols=["y"], input_shapes=[[-1, 4]]
        ).transform(df.limit(0))


def adversarial(ctx: Any) -> None:
    generator, critic = ctx.model
    steps = [
        hvd.DistributedOptimizer(
            torch.optim.Adam(part.parameters(), lr=0.01), part.named_parameters(prefix=name)
        )
        for name, part in (("generator", generator), ("critic", critic))
    ]
    for number, each in enumerate(steps):
        ctx.keep(f"optimizer {number}", each)
    for _ in range(ctx.start_epoch, EPOCHS):
        for batch in ctx.train_loader:
            made = generator(torch.randn(ctx.num_rows, 2))
            steps[1].zero_grad()
            loss = F.softplus(-critic(batch["x"])).mean() + F.softplus(critic(made.detach())).mean()
            loss.backward()
            steps[1].step()
            steps[0].zero_grad()
            F.softplus(-critic(made)).mean().backward()
            steps[0].step()
        ctx.log({"loss": float(loss.detach())})


class Adversaries(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self[1](x)
        return result


def test_train_fn_trains_adversarial_modules_with_two_optimizers(df: DataFrame) -> None:
    torch.manual_seed(0)
    model = Adversaries([nn.Linear(2, 4), nn.Linear(4, 1)])
    fitted = TorchEstimator(
        model=model, feature_cols=["x"], train_fn=adversarial, num_proc=2, verbose=0
    ).fit(df)
    assert len(fitted.history) == EPOCHS
    trained = fitted.getModel()
    for part, before in zip(trained, model, strict=True):
        assert not torch.equal(part.weight, before.weight)
    (found,) = transformed(fitted, df, ("output",))
    np.testing.assert_allclose(found, outputs_of(trained, ("x",))[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (
            {"model": OwnLoss(), "feature_cols": ["ids"], "label_cols": ["k"]},
            "loss is required",
        ),
        (
            {
                "model": nn.Linear(4, 2),
                "loss": lambda output, label: F.cross_entropy(output[:, :1], label),
                "feature_cols": ["x"],
                "label_cols": ["k"],
            },
            "loss raised IndexError for 'k' = 1, the largest label in the data: Target 1 is out of bounds",
        ),
        (
            {"model": OwnLoss(5), "inputs": {"input_ids": "ids", "labels": "k"}},
            "embedding 'embed' has 5 rows, so its indices must be from 0 to 4, but column 'ids', which it looks up, has values from 0 to 8 in",
        ),
        (
            {
                "model": OwnLoss(),
                "inputs": {"input_ids": "ids", "labels": "k"},
                "sample_weight_col": "y",
            },
            "sample_weight_col would have no effect: loss is not given, so the model computes it from its argument 'labels'",
        ),
        (
            {**REGRESSION, "model": Sparse(), "feature_cols": ["ids"], "gradient_clip_norm": 1.0},
            "gradient_clip_norm is given, but the gradient of parameter 'embed.weight' is sparse",
        ),
        (
            {**REGRESSION, "model": linear(), "optimizer": lbfgs, "precision": "16-mixed"},
            "precision is '16-mixed', but LBFGS evaluates the loss several times per step",
        ),
        (
            {**REGRESSION, "model": nn.Linear(4, 1, device="meta")},
            "is on the meta device and has no values. Give a function",
        ),
        (
            {"model": NeedsLabels(), "inputs": {"input_ids": "ids", "labels": "k"}},
            r"label_cols is required: .* with the default None, as in forward\(x, labels=None\)",
        ),
        (
            {
                "model": linear(),
                "feature_cols": ["x"],
                "train_step": elbo,
                "outputCols": ["a", "b"],
            },
            r"outputCols has 2 names \('a', 'b'\), but the model has 1 outputs",
        ),
        (
            {
                **REGRESSION,
                "model": Autoencoder(),
                "train_step": elbo,
                "validation": 0.25,
            },
            "forward returned 3 outputs, but label_cols has 1 columns",
        ),
        (
            {**REGRESSION, "model": linear(), "optimizer": lambda p: [lbfgs(p)]},
            r"optimizer\[0\] is LBFGS, which evaluates the loss several times per step",
        ),
        (
            {**REGRESSION, "model": linear(), "optimizer": twice},
            "cannot step together: some parameters appear in more than one parameter group",
        ),
    ],
)
def test_invalid_params_raise_before_ranks_start(
    df: DataFrame, params: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        TorchEstimator(**{"optimizer": sgd, "num_proc": 1, "verbose": 0, **params}).fit(df)

"""Kinds of modules of torch, parametrizations, and whole programs."""

from __future__ import annotations

import dataclasses
import io
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - everyone's name
from torch.nn.utils import parametrizations, parametrize, prune

from tests.corpus.case import (
    ROWS,
    TABLE,
    Case,
    Data,
    adam,
    classes,
    floats,
    labelled,
    mlp,
    rows,
    target,
    tokens,
    whole,
)

CE = nn.CrossEntropyLoss
BUFFERS = "training changes buffers, which DistributedDataParallel takes from rank 0 before each forward, the estimator before each step"
NOTHING = Data({"x": floats(4)})
SCRIPTED = (
    "torch optimizes TorchScript by what a process has called, which may change the order of sums"
)


# ----------------------------------------------------------------------------------------------------
# Parametrizations and reparametrized weights.


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6, 1))

    def forward(self, w: Tensor) -> Tensor:
        return w * self.scale


def changed(function: Any, *arguments: Any, layer: int = 0, **options: Any) -> Any:
    """Return a function that makes a network whose layer a function of torch has changed."""

    def model() -> nn.Module:
        module = mlp()
        function(module[layer], *arguments, **options)
        return module

    return model


def square() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    parametrize.register_parametrization(module[0], "weight", Symmetric())
    return module


def cached() -> nn.Module:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = parametrizations.weight_norm(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            with parametrize.cached():
                return self.body(self.body(x))[:, :1]

    return Cached()


def scaled() -> nn.Module:
    module = mlp()
    parametrize.register_parametrization(module[0], "weight", Scaled())
    return module


PARAMETRIZATIONS = [
    Case("weight_norm", changed(parametrizations.weight_norm), TABLE, resumes=True),
    Case(
        "weight_norm as a function", changed(parametrizations.weight_norm), TABLE, is_function=True
    ),
    Case("weight_norm of old", changed(nn.utils.weight_norm), TABLE),
    Case("spectral_norm", changed(parametrizations.spectral_norm), TABLE),
    Case("spectral_norm of old", changed(nn.utils.spectral_norm), TABLE),
    Case("orthogonal", changed(parametrizations.orthogonal), TABLE),
    Case(
        "orthogonal cayley",
        changed(parametrizations.orthogonal, orthogonal_map="cayley", layer=2),
        TABLE,
    ),
    Case("own parametrization", square, TABLE),
    Case("own parametrization with parameters", scaled, TABLE),
    Case("cached parametrization", cached, TABLE),
    Case("pruned", changed(prune.l1_unstructured, "weight", amount=0.3), TABLE),
    Case("pruned rows", changed(prune.ln_structured, "weight", amount=0.5, n=2, dim=0), TABLE),
]


# ----------------------------------------------------------------------------------------------------
# Kinds of modules.


def scripted() -> nn.Module:
    return torch.jit.script(mlp())


def traced() -> nn.Module:
    module: nn.Module = torch.jit.trace(mlp(), torch.ones(2, 4))
    return module


def from_file() -> nn.Module:
    buffer = io.BytesIO()
    torch.jit.save(scripted(), buffer)
    buffer.seek(0)
    module: nn.Module = torch.jit.load(buffer)
    return module


def partly_scripted() -> nn.Module:
    return nn.Sequential(torch.jit.script(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 1))


def symbolic() -> nn.Module:
    return torch.fx.symbolic_trace(mlp())


def compiled() -> nn.Module:
    module: nn.Module = torch.compile(mlp(), backend="eager")  # type: ignore[assignment]
    return module


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(1))


def from_meta() -> nn.Module:
    with torch.device("meta"):
        module = mlp()
    module.to_empty(device="cpu")
    for layer in module:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    return module


def quantized() -> nn.Module:
    import torch.ao.quantization as q

    class Stubbed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.body, self.leave = q.QuantStub(), mlp(), q.DeQuantStub()

        def forward(self, x: Tensor) -> Tensor:
            return self.leave(self.body(self.enter(x)))

    module = Stubbed().train()
    module.qconfig = q.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    return q.prepare_qat(module)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.cfloat))
        self.last = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x.to(torch.cfloat) @ self.weight).abs())


class Keeps(nn.Module):
    """Keeps tensors of its last forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)
        self.hidden: Tensor | None = None
        self.maps: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.tanh(self.first(x))
        self.maps = [self.hidden * 2]
        return self.last(self.hidden)


def called() -> nn.Module:
    module = Keeps()
    module(torch.ones(2, 4))
    return module


def hooked() -> nn.Module:
    module = mlp()
    module[0].weight.register_hook(lambda grad: grad * 0.5)
    module[1].register_forward_hook(scaled_output)
    return module


def scaled_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    del module, inputs
    return output * 0.9


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class OwnGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(self.body(x))


class Inverse(nn.Module):
    """Inverts a matrix from the row. A row of zeros is invalid."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.linalg.inv(x).flatten(1))


class Asserts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        assert bool((x.abs().sum(1) > 0).all()), "a row of zeros"
        return self.body(x)


class FixedBatch(nn.Module):
    """Keeps a state per row for batches of 8 rows or of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in (8, 16, ROWS):
            raise ValueError(f"batches have 8 rows, not {len(x)}")
        return self.body(x)


class Distribution(nn.Module):
    """Draws from a distribution that is made of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.distributions.Normal(torch.zeros(()), x[:, :1].abs()).rsample()
        return self.body(x) + (0.1 * noise if self.training else 0.0)


class PhysicsNet(nn.Module):
    """Returns the derivative of a network by its input, computed in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = self.body(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return slope[:, :1] + y


class Vectorized(nn.Module):
    """An ensemble by vmap over stacked parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 1) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda w: x @ w)(self.weight).mean(0)


KINDS = [
    Case("scripted", scripted, TABLE, tolerance=1e-5, because=SCRIPTED),
    Case("traced", traced, TABLE, tolerance=1e-5, because=SCRIPTED),
    Case("scripted from a file", from_file, TABLE, tolerance=1e-5, because=SCRIPTED),
    Case("partly scripted", partly_scripted, TABLE, tolerance=1e-5, because=SCRIPTED),
    Case("traced by fx", symbolic, TABLE),
    Case("compiled", compiled, TABLE, options={"compile": False}),
    Case("DataParallel", lambda: nn.DataParallel(mlp()), TABLE),
    Case("AveragedModel", lambda: torch.optim.swa_utils.AveragedModel(mlp()), TABLE),
    Case("lazy", lazy, TABLE),
    Case("lazy as a function", lazy, TABLE, is_function=True),
    Case("filled from meta", from_meta, TABLE),
    Case("filled from meta as a function", from_meta, TABLE, is_function=True),
    Case(
        "prepared for quantization", quantized, TABLE, apart="observers of batches", no_ddp=BUFFERS
    ),
    Case("complex parameters", Complex, TABLE, resumes=True),
    Case("bfloat16", lambda: mlp().bfloat16(), TABLE, apart="sums are rounded to 8 bits"),
    Case("float64", lambda: mlp().double(), TABLE),
    Case("keeps outputs", Keeps, TABLE),
    Case("called before", called, TABLE),
    Case("hooks", hooked, TABLE),
    Case("own gradient", OwnGradient, TABLE),
    Case(
        "inverts matrices",
        Inverse,
        Data({"x": floats(2, 2)}, {"y": target(floats(2, 2))}),
        optimizer=adam,
        twice_tolerance=1e-4,
    ),
    Case("asserts", Asserts, TABLE),
    Case("fixed batches", FixedBatch, TABLE, options={"drop_last": True}),
    Case("distributions", Distribution, TABLE, apart="random numbers"),
    Case("gradients in forward", PhysicsNet, TABLE),
    Case("vmap", Vectorized, TABLE),
]


# ----------------------------------------------------------------------------------------------------
# Programs.


class AutoEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = mlp(4, 2), mlp(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


def reconstruct(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    return F.mse_loss(model(batch["x"]), batch["x"])


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = mlp(4, 4), mlp(2, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, logarithm = self.encode(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * torch.exp(logarithm / 2) if self.training else mean
        return self.decode(z), mean, logarithm


def elbo(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    out, mean, logarithm = model(batch["x"])
    divergence = -0.5 * (1 + logarithm - mean**2 - logarithm.exp()).sum(1).mean()
    ctx.log("divergence", divergence.detach())
    return F.mse_loss(out, batch["x"]) + 0.1 * divergence


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = mlp(2, 4), mlp(4, 1)

    def forward(self, x: Tensor, fake: Tensor | None = None) -> Any:
        return self.critic(x) if fake is None else (self.critic(x), self.critic(fake))


def adversarial(ctx: Any) -> None:
    """Train generator and critic in turn, each with its own optimizer."""
    model = getattr(ctx.model, "module", ctx.model)
    parts = {"generator": model.generator, "critic": model.critic}
    steps = {}
    for name, part in parts.items():
        plain = torch.optim.Adam(part.parameters(), lr=0.01)
        steps[name] = distributed(plain, part, ctx)
        ctx.keep(name, steps[name])
    for _ in range(ctx.start_epoch, ctx.epochs):
        model.train()
        for batch in ctx.train_loader:
            x = batch["x"]
            noise = torch.randn(len(x), 2)
            steps["critic"].zero_grad()
            fake = model.generator(noise)
            real, made = model.critic(x), model.critic(fake.detach())
            ones = torch.ones_like(real)
            loss = F.binary_cross_entropy_with_logits(
                real, ones
            ) + F.binary_cross_entropy_with_logits(made, 0 * ones)
            ctx.backward(loss)
            steps["critic"].step()
            steps["generator"].zero_grad()
            cheat = F.binary_cross_entropy_with_logits(model.critic(fake), ones)
            ctx.backward(cheat)
            steps["generator"].step()
        ctx.log({"loss": float(loss.detach())})
        ctx.save_checkpoint()


def distributed(optimizer: Any, part: nn.Module, ctx: Any) -> Any:
    """Return an optimizer that averages over ranks, if there are ranks."""
    if not hasattr(ctx, "store"):  # the plain loop
        return optimizer
    import sparkhvd.torch as hvd

    return hvd.DistributedOptimizer(optimizer, part.named_parameters())


def own_loop(ctx: Any) -> None:
    for _ in range(ctx.start_epoch, ctx.epochs):
        ctx.model.train()
        for batch in ctx.train_loader:
            ctx.optimizer.zero_grad()
            loss = F.mse_loss(ctx.model(batch["x"]).squeeze(1), batch["y"])
            ctx.backward(loss)
            ctx.optimizer.step()
        ctx.log({"loss": float(loss.detach())})
        ctx.save_checkpoint()


def own_step(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    penalty = sum(p.square().sum() for p in model.parameters())
    return F.mse_loss(model(batch["x"]).squeeze(1), batch["y"]) + 1e-3 * penalty


def mixed_up(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    share = float(np.random.beta(0.4, 0.4))
    order = torch.randperm(len(batch["x"]))
    out = model(share * batch["x"] + (1 - share) * batch["x"][order])
    return share * F.cross_entropy(out, batch["c"]) + (1 - share) * F.cross_entropy(
        out, batch["c"][order]
    )


def adversarial_rows(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    x = batch["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(x), batch["c"]), x)
    return F.cross_entropy(model(batch["x"] + 0.1 * slope.sign()), batch["c"])


class Student(nn.Module):
    """A student beside a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = mlp(4, 3, 12).requires_grad_(requires_grad=False)
        self.student = mlp(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(x), self.teacher(x)


def distil(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    student, teacher = model(batch["x"])
    soft = F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="batchmean")
    return soft + F.cross_entropy(student, batch["c"])


@dataclasses.dataclass
class Result:
    logits: Tensor
    hidden: Tensor | None = None


class Named(NamedTuple):
    value: Tensor
    hidden: Tensor


class Returns(nn.Module):
    """Returns its output in some form."""

    def __init__(self, form: str, outputs: int = 1) -> None:
        super().__init__()
        self.form, self.first, self.last = form, nn.Linear(4, 6), nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        out = self.last(hidden)
        return {
            "dataclass": lambda: Result(out, hidden),
            "dict": lambda: {"y": out},
            "dict of more": lambda: {"y": out, "hidden": hidden, "loss": hidden.mean()},
            "namedtuple": lambda: Named(out, hidden),
            "nested": lambda: {"y": out, "layers": [hidden, (hidden * 2,)]},
            "list": lambda: [out],
        }[self.form]()


def any_form(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    result = model(batch["x"])
    out = (
        result["y"]
        if isinstance(result, dict)
        else result[0]
        if isinstance(result, tuple)
        else result.logits
    )
    return F.mse_loss(out.squeeze(1), batch["y"])


class OwnLoss(nn.Module):
    """Computes its loss if it gets labels, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(4, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.body(x)
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = F.cross_entropy(logits, labels)
        return found


class Recommender(nn.Module):
    """Factors of users and items."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(10, 4), nn.Embedding(12, 4)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.users(user) * self.items(item)).sum(-1)


class NeuralFactors(nn.Module):
    """Factors and a network of users and items."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ModuleList([nn.Embedding(10, 4), nn.Embedding(12, 4)])
        self.deep = nn.ModuleList([nn.Embedding(10, 4), nn.Embedding(12, 4)])
        self.body, self.last = mlp(8, 4, 8), nn.Linear(8, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        product = self.factors[0](user) * self.factors[1](item)
        deep = self.body(torch.cat([self.deep[0](user), self.deep[1](item)], 1))
        return self.last(torch.cat([product, deep], 1))


class DeepFm(nn.Module):
    """A factorization machine and a network over fields of one table of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("begins", torch.tensor([0, 10, 22]))
        self.linear, self.factors = nn.EmbeddingBag(30, 1, mode="sum"), nn.Embedding(30, 4)
        self.deep = mlp(12, 1, 8)

    def forward(self, fields: Tensor) -> Tensor:
        ids = fields + self.begins
        vectors = self.factors(ids)
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True)
        return self.linear(ids) + pairs + self.deep(vectors.flatten(1))


class Towers(nn.Module):
    """A tower of users and one of items, compared within the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
        self.items = nn.Sequential(nn.Embedding(12, 4), nn.Linear(4, 4))

    def forward(self, user: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.users(user)), F.normalize(self.items(item))


def in_batch(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    users, items = model(batch["user"], batch["item"])
    return F.cross_entropy(users @ items.T / 0.2, torch.arange(len(users)))


class NextItem(nn.Module):
    """Attention over the items of a user so far."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(20, 8, padding_idx=0), nn.Embedding(8, 8)
        self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.body(self.items(ids) + self.places.weight[:length], mask, is_causal=True)
        return hidden @ self.items.weight.T


def dlrm() -> nn.Module:
    class Dlrm(nn.Module):
        """Dot products of bags of categories and of numbers."""

        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.ModuleList([nn.EmbeddingBag(12, 4), nn.EmbeddingBag(20, 4)])
            self.bottom, self.top = mlp(4, 4), mlp(7, 1)

        def forward(self, numbers: Tensor, a: Tensor, b: Tensor) -> Tensor:
            dense = self.bottom(numbers)
            vectors = torch.stack([dense, self.bags[0](a), self.bags[1](b)], 1)
            products = vectors @ vectors.transpose(1, 2)
            rows, columns = torch.triu_indices(3, 3, 1)
            return self.top(torch.cat([dense, products[:, rows, columns]], 1))

    return Dlrm()


class WideAndDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.category, self.wide = nn.Embedding(12, 3), nn.Linear(4, 1)
        self.deep = mlp(7, 1)

    def forward(self, numbers: Tensor, category: Tensor) -> Tensor:
        together = torch.cat([numbers, self.category(category)], 1)
        return self.wide(numbers) + self.deep(together)


def next_word(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    scores = model(batch["ids"][:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), batch["ids"][:, 1:].flatten())


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.last = (
            nn.Embedding(20, 8),
            nn.GRU(8, 8, batch_first=True),
            nn.Linear(8, 20),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.body(self.embedding(ids))[0])


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(5, 4, 16)

    def forward(self, x: Tensor, moment: Tensor | None = None) -> Tensor:
        moment = torch.zeros(len(x)) if moment is None else moment
        return self.body(torch.cat([x, moment[:, None]], 1))


def denoise(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    x = batch["x"]
    moment, noise = torch.rand(len(x)), torch.randn_like(x)
    return F.mse_loss(model((1 - moment[:, None]) * x + moment[:, None] * noise, moment), noise - x)


PAIR = Data({"user": whole(10), "item": whole(12)}, {"y": target(floats(4))})
MIXED = Data({"numbers": floats(4), "category": whole(12)}, {"y": target(floats(4))})
RANDOM = "random numbers"

PROGRAMS = [
    Case("train_step", mlp, TABLE, None, step=own_step, resumes=True),
    Case("train_fn", mlp, TABLE, None, optimizer=adam, loop=own_loop),
    Case(
        "autoencoder without labels", AutoEncoder, NOTHING, None, step=reconstruct, optimizer=adam
    ),
    Case("autoencoder of one column", AutoEncoder, Data({"x": floats(4)}, {"y": floats(4)})),
    Case("VAE", Vae, NOTHING, None, step=elbo, optimizer=adam, apart=RANDOM, resumes=True),
    Case(
        "GAN",
        Gan,
        NOTHING,
        None,
        loop=adversarial,
        apart=RANDOM,
        no_ddp="a script of two optimizers calls parts of the module",
    ),
    Case("mixup", lambda: mlp(4, 3), labelled(4), None, step=mixed_up, apart=RANDOM, resumes=True),
    Case(
        "adversarial rows",
        lambda: mlp(4, 3),
        labelled(4),
        None,
        step=adversarial_rows,
        no_ddp="DistributedDataParallel does not average gradients of autograd.grad",
    ),
    Case("distillation", Student, labelled(4), None, step=distil, optimizer=adam),
    Case(
        "language model",
        Language,
        Data({"ids": whole(20, 6)}),
        None,
        step=next_word,
        optimizer=adam,
    ),
    Case("diffusion", Diffusion, NOTHING, None, step=denoise, optimizer=adam, apart=RANDOM),
    Case("matrix factors", Recommender, PAIR, optimizer=adam),
    Case("neural factors", NeuralFactors, PAIR, optimizer=adam),
    Case(
        "DeepFM",
        DeepFm,
        Data({"fields": whole(8, 3)}, {"b": whole(2).astype(np.float32)}),
        nn.BCEWithLogitsLoss,
        adam,
    ),
    Case(
        "two towers",
        Towers,
        Data(PAIR.features),
        None,
        step=in_batch,
        apart="compares the rows of a batch",
    ),
    Case(
        "items in order",
        NextItem,
        Data({"ids": whole(20, 7)}),
        None,
        step=next_word,
        optimizer=adam,
    ),
    Case(
        "DLRM",
        dlrm,
        Data(
            {"numbers": floats(4), "a": whole(12, 2), "b": whole(20, 3)},
            {"click": whole(2).astype(np.float32)},
        ),
        nn.BCEWithLogitsLoss,
        adam,
    ),
    Case("wide and deep", WideAndDeep, MIXED, optimizer=adam),
    Case(
        "model's own loss",
        OwnLoss,
        Data({"x": floats(4), "labels": classes(floats(4), 3)}, by_name=True),
        None,
        label_arguments=("labels",),
    ),
    *(
        Case(f"returns a {form}", lambda form=form: Returns(form), TABLE, None, step=any_form)
        for form in ("dataclass", "dict of more", "namedtuple", "nested")
    ),
    *(
        Case(f"returns a {form} for a loss", lambda form=form: Returns(form), TABLE)
        for form in ("dict", "list")
    ),
    Case(
        "images by name",
        lambda: Named2d(),
        Data({"pixels": floats(3, 8, 8)}, {"c": classes(floats(3, 8, 8), 3)}, by_name=True),
        CE,
    ),
    Case(
        "tokens by name",
        lambda: nn.Sequential(nn.EmbeddingBag(20, 3)),
        Data({"input": whole(20, 6)}, tokens().labels, by_name=True),
        CE,
    ),
    Case(
        "segmentation",
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)),
        Data({"x": floats(3, 8, 8)}, {"c": whole(2, 8, 8)}),
        CE,
        optimizer=adam,
    ),
    Case(
        "forecast of several steps",
        lambda: nn.Sequential(nn.Flatten(), mlp(20, 3)),
        rows(5, 4, outputs=3),
        optimizer=adam,
    ),
]


class Named2d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Conv2d(3, 4, 3), nn.Linear(144, 3)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.last(self.body(pixels).flatten(1))


CASES = [*PARAMETRIZATIONS, *KINDS, *PROGRAMS]

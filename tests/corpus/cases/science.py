"""Differential equations, Gaussian processes, flows, graphs, equivariant networks, probabilistic programs."""

from __future__ import annotations

from typing import Any

import e3nn.nn
import e3nn.o3
import geomloss
import gpytorch
import nflows.distributions
import nflows.flows
import nflows.transforms
import normflows
import pyro
import pyro.distributions
import pyro.infer
import torch
import torch_geometric.nn as graphs
import torchcde
import torchdiffeq
import torchsde
import zuko
from torch import Tensor, nn

from tests.corpus.case import ROWS, TABLE, Case, Data, adam, floats, mlp, rows, target

NOTHING = Data({"x": floats(4)})
PAIRS = "compares the rows of a batch"
RANDOM = "random numbers"


class Field(nn.Module):
    """Right side of a differential equation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(4, 4)

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        del t
        return self.body(x)


class NeuralOde(nn.Module):
    def __init__(self, method: str, *, adjoint: bool = False) -> None:
        super().__init__()
        self.field, self.last = Field(), nn.Linear(4, 1)
        self.method, self.adjoint = method, adjoint

    def forward(self, x: Tensor) -> Tensor:
        solve = torchdiffeq.odeint_adjoint if self.adjoint else torchdiffeq.odeint
        times = torch.tensor([0.0, 0.5, 1.0])
        return self.last(solve(self.field, x, times, method=self.method)[-1])


class Sde(nn.Module):
    noise_type, sde_type = "diagonal", "ito"

    def __init__(self) -> None:
        super().__init__()
        self.drift, self.noise = mlp(4, 4), mlp(4, 4)

    def f(self, t: Tensor, x: Tensor) -> Tensor:
        del t
        return self.drift(x)

    def g(self, t: Tensor, x: Tensor) -> Tensor:
        del t
        return 0.1 * self.noise(x)


class NeuralSde(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sde, self.last = Sde(), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        entropy = int(torch.randint(1000, ())) if self.training else 0
        times = torch.tensor([0.0, 0.5])
        paths = torchsde.BrownianInterval(0.0, 0.5, size=x.shape, entropy=entropy)
        return self.last(torchsde.sdeint(self.sde, x, times, bm=paths, method="euler", dt=0.1)[-1])


class Control(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(3, 12)

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        del t
        return self.body(z).view(*z.shape[:-1], 3, 4)


class NeuralCde(nn.Module):
    """A controlled differential equation over a series."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.field, self.last = nn.Linear(4, 3), Control(), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        path = torchcde.CubicSpline(
            torchcde.hermite_cubic_coefficients_with_backward_differences(x)
        )
        z = torchcde.cdeint(
            path,
            self.field,
            self.first(path.evaluate(path.interval[0])),
            path.interval,
            adjoint=False,
            method="rk4",
            options={"step_size": 1.0},
        )
        return self.last(z[:, -1])


class DeepKernel(nn.Module):
    """Variational Gaussian process after a network. Returns mean and variance."""

    def __init__(self) -> None:
        super().__init__()

        class Layer(gpytorch.models.ApproximateGP):
            def __init__(self) -> None:
                points = torch.linspace(-1, 1, 8)[:, None].repeat(1, 2)
                distribution = gpytorch.variational.CholeskyVariationalDistribution(8)
                super().__init__(
                    gpytorch.variational.VariationalStrategy(self, points, distribution)
                )
                self.mean_module = gpytorch.means.ConstantMean()
                self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

            def forward(self, x: Tensor) -> Any:
                return gpytorch.distributions.MultivariateNormal(
                    self.mean_module(x), self.covar_module(x)
                )

        self.body, self.layer = mlp(4, 2), Layer()
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        found = self.layer(self.body(x))
        if y is None:
            return found.mean, found.variance
        return -gpytorch.mlls.VariationalELBO(self.likelihood, self.layer, num_data=ROWS)(found, y)


def evidence(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    return model(batch["x"], batch["y"])


class Flow(nn.Module):
    """A flow of any library that returns logarithms of densities."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.body, zuko.flows.Flow):
            return self.body().log_prob(x)
        return self.body.log_prob(x)


def density(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    return -model(batch["x"]).mean()


def normflow() -> nn.Module:
    layers = []
    for _ in range(2):
        layers += [
            normflows.flows.AffineCouplingBlock(normflows.nets.MLP([2, 8, 4], init_zeros=True)),
            normflows.flows.Permute(4, mode="swap"),
        ]
    return Flow(normflows.NormalizingFlow(normflows.distributions.base.DiagGaussian(4), layers))


def nflow() -> nn.Module:
    transforms = nflows.transforms
    steps = [
        transforms.MaskedAffineAutoregressiveTransform(features=4, hidden_features=8),
        transforms.ReversePermutation(features=4),
    ]
    return Flow(
        nflows.flows.Flow(
            transforms.CompositeTransform(steps), nflows.distributions.StandardNormal([4])
        )
    )


class Graph(nn.Module):
    """A network over a graph of 5 nodes per row."""

    def __init__(self, layer: Any, **options: Any) -> None:
        super().__init__()
        self.layer, self.last = layer(4, 6, **options), nn.Linear(6, 1)
        ring = torch.arange(5)
        self.register_buffer("edges", torch.stack([ring, (ring + 1) % 5]))

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        shift = 5 * torch.arange(n)[:, None]
        edges = (self.edges[:, None] + shift).reshape(2, -1)
        hidden = torch.relu(self.layer(x.reshape(-1, 4), edges))
        batch = torch.arange(n).repeat_interleave(5)
        return self.last(graphs.global_mean_pool(hidden, batch))


class Equivariant(nn.Module):
    """A tensor product of points, and its invariant part."""

    def __init__(self) -> None:
        super().__init__()
        self.body = e3nn.o3.FullyConnectedTensorProduct("1x1o", "1x1o", "4x0e")
        self.last = nn.Linear(4, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.last(self.body(a, b))


class Bayesian(nn.Module):
    """A probabilistic program with an automatic guide, which registers its parameters at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        found = pyro.distributions.Normal(self.mean(x)[:, 0], self.scale.exp()).to_event(0)
        return found.mean if not self.training else found.rsample()


def pyro_step(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    return (model(batch["x"]) - batch["y"]).square().mean()


def sinkhorn(output: Tensor, label: Tensor) -> Tensor:
    return geomloss.SamplesLoss("sinkhorn", p=2, blur=0.1)(output, label)


SERIES = rows(5, 4)

CASES = [
    Case(
        "torchdiffeq dopri5",
        lambda: NeuralOde("dopri5"),
        TABLE,
        optimizer=adam,
        apart="its steps follow the whole batch",
    ),
    Case("torchdiffeq rk4", lambda: NeuralOde("rk4"), TABLE, optimizer=adam),
    Case(
        "torchdiffeq adjoint",
        lambda: NeuralOde("rk4", adjoint=True),
        TABLE,
        optimizer=adam,
        resumes=True,
    ),
    Case("torchsde", NeuralSde, TABLE, optimizer=adam, apart=RANDOM),
    Case("torchcde", NeuralCde, SERIES, optimizer=adam),
    Case(
        "gpytorch deep kernel",
        DeepKernel,
        TABLE,
        None,
        adam,
        step=evidence,
        apart="random numbers",  # of the first call, for the variational mean
    ),
    Case(
        "zuko NSF",
        lambda: Flow(zuko.flows.NSF(4, transforms=1, hidden_features=[8])),
        NOTHING,
        None,
        adam,
        step=density,
    ),
    Case(
        "zuko MAF",
        lambda: Flow(zuko.flows.MAF(4, transforms=1, hidden_features=[8])),
        NOTHING,
        None,
        adam,
        step=density,
    ),
    Case("nflows", nflow, NOTHING, None, adam, step=density),
    Case("normflows", normflow, NOTHING, None, adam, step=density),
    Case("torch_geometric GCNConv", lambda: Graph(graphs.GCNConv), SERIES, optimizer=adam),
    Case("torch_geometric GATConv", lambda: Graph(graphs.GATConv), SERIES, optimizer=adam),
    Case("torch_geometric SAGEConv", lambda: Graph(graphs.SAGEConv), SERIES, optimizer=adam),
    Case(
        "torch_geometric GINConv",
        lambda: Graph(lambda i, o: graphs.GINConv(nn.Sequential(nn.Linear(i, o)))),
        SERIES,
        optimizer=adam,
    ),
    Case(
        "e3nn",
        Equivariant,
        Data({"a": floats(3), "b": floats(3, seed=1)}, {"y": target(floats(3))}),
        optimizer=adam,
    ),
    Case("pyro distributions", Bayesian, TABLE, None, adam, step=pyro_step, apart=RANDOM),
    Case("geomloss", lambda: mlp(4, 3), rows(4, outputs=3), lambda: sinkhorn, adam, apart=PAIRS),
]

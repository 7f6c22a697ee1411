"""Large models: the driver's memory for them, and a model larger than the JVM's heap (3 GiB under `make soak`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.harness.soak import amount, soak
from tests.harness.spark import run_here, run_on

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

# Slightly too large for the program, and in `make soak` three times the heap, which is 1 GiB.
MIB = amount(80, 3 << 10)

BODY = """
    import resource
    import torch
    from torch import nn
    from sparkhvd import Store, TorchEstimator, TorchModel

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    def said(what):
        global began
        seconds = time.monotonic() - began
        print(f"{{what}}: {{seconds:.1f}} s, driver's peak {{peak() / 2**30:.1f}} GiB", flush=True)
        began = time.monotonic()

    torch.manual_seed(0)
    side = int(({mib} * 2**18) ** 0.5) + 1
    net = nn.Sequential(nn.Linear(2, side), nn.Linear(side, side), nn.Linear(side, 1))
    # Frozen, so that gradients need no memory; they travel all the same.
    net[0].requires_grad_(False)
    net[1].requires_grad_(False)
    size = sum(p.nbytes for p in net.parameters())
    assert size >= {mib} << 20
    df = spark.createDataFrame([([i / 10, 1 - i / 10], i % 2 + 0.5) for i in range(8)], "x array<double>, y double")
    store = Store.create({store!r})
    began, before = time.monotonic(), peak()
    model = TorchEstimator(
        model=net, optimizer=torch.optim.SGD([net[2].weight, net[2].bias], lr=1e-5), loss=nn.MSELoss(),
        feature_cols=["x"], label_cols=["y"], batch_size=8, num_proc=1, verbose=0, store=store, max_retries=0,
    ).fit(df)
    del net
    store.clean(runs=True)
    said(f"fit {{size / 2**20:.0f}} MiB")
    # Besides the user's module there is the result, and never a third copy.
    assert {mib} < 1024 or peak() - before < 1.3 * size, (peak(), before)
    first = model.transform(df).collect()
    said("transform")
    model.save({path!r})
    said("save")
    with torch.no_grad():
        x = torch.tensor([[i / 10, 1 - i / 10] for i in range(8)])
        expected = model.getModel()(x)[:, 0].tolist()
    del model
    for path in store.list("models"):
        store.delete(path)
    loaded = TorchModel.load({path!r}, trust=True)  # with its store
    said("load")
    again = loaded.transform(df).collect()
    said("transform")
    for before, after, value in zip(first, again, expected, strict=True):
        assert abs(before.y__output - value) <= 1e-4 * (1 + abs(value)), (before, value)
        assert abs(after.y__output - value) <= 1e-4 * (1 + abs(value)), (after, value)
    print("large weights in the store:", len(store.list("models")))
"""


@soak("training/test_weights")
@pytest.mark.timeout(900)
def test_model_larger_than_the_driver_heap_is_fitted_and_saved(tmp_path: Path) -> None:
    body = BODY.format(mib=MIB, store=str(tmp_path / "store"), path=str(tmp_path / "saved"))
    out = run_on("local[2]", body, tmp_path, conf={"spark.driver.memory": "1g"}, timeout_s=850)
    print(out)
    assert "large weights in the store: 1" in out


# Adam's state is twice the model, and only ranks hold it. Copies of the model on the driver are counted, not the file's pages.
COPIES = """
    import re
    import threading
    import torch
    from torch import nn
    from sparkhvd import Store, TorchEstimator

    def held():
        text = open("/proc/self/status").read()
        return sum(int(re.search(rf"{{name}}:\\s+(\\d+)", text)[1]) << 10 for name in ("RssAnon", "RssShmem"))

    class Peak:
        def __enter__(self):
            self.before, self.bytes, self.over = held(), 0, threading.Event()
            self.thread = threading.Thread(target=self.watch)
            self.thread.start()
            return self

        def watch(self):
            while not self.over.wait(0.005):
                self.bytes = max(self.bytes, held() - self.before)

        def __exit__(self, *_):
            self.over.set()
            self.thread.join()

    df = spark.createDataFrame([(i / 8, i % 2 + 0.5) for i in range(8)], "x double, y double")
    df.count()
    net = nn.Sequential(nn.Linear(1, 8192), nn.Linear(8192, 4096, bias=False), nn.Linear(4096, 1))
    size = sum(p.nbytes for p in net.parameters())
    estimator = TorchEstimator(
        model=net, optimizer=torch.optim.Adam(net.parameters(), lr=1e-6), loss=nn.MSELoss(), feature_cols=["x"],
        label_cols=["y"], batch_size=8, num_proc=1, verbose=0, store=Store.create({store!r}), max_retries=0,
    )
    with Peak() as peak:
        model = estimator.fit(df)
    print(f"fit {{peak.bytes / size:.2f}}")
    with Peak() as peak:
        model.save({path!r})
    print(f"save {{peak.bytes / size:.2f}}")
"""


@soak("training/test_weights")
@pytest.mark.timeout(200)
def test_the_driver_holds_two_copies_of_a_model_and_no_optimizer_state(
    spark: SparkSession, tmp_path: Path
) -> None:
    body = COPIES.format(store=str(tmp_path / "store"), path=str(tmp_path / "saved"))
    out = run_here(spark, body, tmp_path)
    times = {
        name: float(copies) for name, copies in re.findall(r"^(fit|save) ([\d.]+)$", out, re.M)
    }
    # The trained module, beside the user's module, which existed before. 128 MiB are half of the other memory of a fit.
    assert times["fit"] < 1.5
    assert times["save"] < 0.5

"""Killed fits with `incremental=True`, and histories of tables in separate processes."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sparkhvd.data.parquet.manifest import KnownFooters
from sparkhvd.data.store.store import Store
from tests.harness import tables
from tests.harness.soak import amount, soak

pytestmark = pytest.mark.processes

deltalake = pytest.importorskip("deltalake")

READ = """
import sys
from sparkhvd.data.parquet.manifest import KnownFooters
from sparkhvd.data.store.store import Store
from tests.harness.tables import rows_of

folder, place = sys.argv[1:]
store = Store(place)
print("ready", flush=True)
while True:
    rows_of(folder, ["id", "x"], known=lambda *data: KnownFooters(store, *data))
"""

HISTORY = """
import sys
from pathlib import Path
from tests.harness.tables import random_history

print(random_history(int(sys.argv[1]), Path(sys.argv[2]), 6).num_checked)
"""


@pytest.fixture(scope="module", autouse=True)
def threads(tmp_path_factory: pytest.TempPathFactory) -> None:
    tables.start_threads(tmp_path_factory.mktemp("threads"))


def test_next_fit_uses_footers_of_a_killed_fit(tmp_path: Path) -> None:
    folder, store = tmp_path / "t", Store.create(tmp_path / "store")
    chance = random.Random(5)

    def append(part: int) -> None:
        ids = np.arange(50 * part, 50 * part + 50)
        deltalake.write_deltalake(folder, pa.table({"id": ids, "x": ids * 0.5}), mode="append")

    for part in range(10):
        append(part)
    command = [sys.executable, "-c", READ, str(folder), store.url]
    for round_ in range(amount(2, 40)):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "ready\n"
            for part in range(2):
                append(10 + 2 * round_ + part)
                time.sleep(0.2 * chance.random())
            reader.kill()
        reads: list[KnownFooters] = []

        def known(
            dataset: object, schema: object, reads: list[KnownFooters] = reads
        ) -> KnownFooters:
            reads.append(KnownFooters(store, dataset, schema))  # type: ignore[arg-type]
            return reads[-1]

        found = tables.rows_of(folder, ["id", "x"], known=known)
        count = 50 * (12 + 2 * round_)
        assert [row[0] for row in sorted(found)] == [float(i) for i in range(count)]
        assert reads[0].num_read + reads[0].num_known == 12 + 2 * round_
        assert tables.rows_of(folder, ["id", "x"], known=known) == found
        assert reads[1].num_read == 0


@soak("data/test_table_formats")
@pytest.mark.parametrize("seed", range(10_000, 10_200))
def test_random_table_history_is_read_right_in_a_separate_process(
    tmp_path: Path, seed: int
) -> None:
    command = [sys.executable, "-c", HISTORY, str(seed), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split()[-1]) >= 10

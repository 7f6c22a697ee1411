"""Rate of iperf3 between two hosts of `tests.harness.netns`, for comparison with our rate."""

from __future__ import annotations

import json
import shutil
import subprocess
import time

from tests.harness.netns import Host

TIME_S = 1


def why_not() -> str | None:
    """Explain why iperf3 cannot run here, or return None if it can."""
    return None if shutil.which("iperf3") else "iperf3 is not installed (apt-get install iperf3)"


class Iperf:
    """Bytes per second and direction, as the receivers count.

    Args:
        server: where it listens.
        client: begins each measurement.
        both_ways: both directions are busy at the same time, and the slower one counts.
    """

    def __init__(self, server: Host, client: Host, *, both_ways: bool) -> None:
        self._client = client
        self._words = ["iperf3", "--client", server.address, "--json", "--time", str(TIME_S)]
        # The first tenths of a second find the rate.
        self._words += ["--omit", "1"]
        self._received = ["sum_received"]
        if both_ways:
            self._words.append("--bidir")
            self._received.append("sum_received_bidir_reverse")
        self._server = subprocess.Popen(
            server.command("iperf3", "--server", "--bind", server.address),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(0.5)  # it says nothing when it listens

    def measure(self) -> float:
        """Measure the rate of one direction, in bytes per second."""
        ends = json.loads(self._client.run(*self._words))["end"]
        return min(ends[name]["bits_per_second"] / 8 for name in self._received)

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()

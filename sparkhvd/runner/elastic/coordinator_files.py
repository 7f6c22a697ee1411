"""Files of an attempt in the store, where the coordinator is in a task: how tasks find it, and how it and the client hear of each other.

Each file begins with a proof that its writer knows the attempt's key and meant this file; what has none is an error, and is not read any further.
"""

from __future__ import annotations

import hmac
import json
import time

from sparkhvd.errors import StoreError
from sparkhvd.runner.elastic.attempt_result import AttemptResult
from sparkhvd.runner.preflight import SharedFiles
from sparkhvd.runner.preflight.shared_files import describe_shared

__all__ = ["LOOK_S", "CoordinatorFiles"]

# How often the coordinator looks whether the client wants an end.
LOOK_S = 1.0
_DIGEST = "sha256"
_PROOF_BYTES = 32
_ADDRESS, _INTERRUPT, _RESULT = "coordinator", "interrupt", "result"
_POLL_S = 0.25
# How long the file of another host may be seen late.
_LATE_S = 3.0


class CoordinatorFiles:
    """Files of an attempt.

    Args:
        files: that client and tasks share.
        run_dir: folder of the run there.
        attempt: 0 for the first launch.
        job_id: of the attempt.
        key: of the attempt, in hex.
    """

    def __init__(
        self, files: SharedFiles, run_dir: str, attempt: int, job_id: str, key: str
    ) -> None:
        self._files = files
        self._folder = f"{run_dir}/attempts/{attempt}/elastic-{job_id}"
        self._key = hmac.digest(bytes.fromhex(key), b"sparkhvd elastic coordinator", _DIGEST)

    # --- Of the coordinator. ---

    def publish(self, address: tuple[str, int]) -> None:
        """Tell the tasks where the coordinator is.

        Raises:
            Exception: the store refuses it.
        """
        self._write(_ADDRESS, json.dumps(address).encode())

    def is_interrupted(self) -> bool:
        """Return True once the client wants the ranks to end."""
        return self._read(_INTERRUPT) is not None

    def report(self, result: AttemptResult) -> None:
        """Tell the client how the attempt has ended."""
        self._write(_RESULT, result.to_bytes())

    # --- Of other tasks. ---

    def address(self) -> tuple[str, int] | None:
        """Return where the coordinator is, or was; None if there was none."""
        if (content := self._read(_ADDRESS)) is None:
            return None
        host, port = json.loads(content)
        return str(host), int(port)

    def await_address(self, limit_s: float) -> tuple[str, int] | None:
        """Return where the coordinator is as soon as there is one; None if there is none for so long."""
        until = time.monotonic() + limit_s
        while (found := self.address()) is None and time.monotonic() < until:
            time.sleep(_POLL_S)
        return found

    def is_over(self) -> bool:
        """Return True if the attempt has ended."""
        return self._files.exists(self._path(_RESULT))

    # --- Of the client. ---

    def interrupt(self) -> None:
        """Let the ranks end."""
        self._write(_INTERRUPT, b"")

    def result(self) -> AttemptResult | None:
        """Return how the attempt has ended; None if its coordinator could not tell."""
        until = time.monotonic() + _LATE_S
        while (content := self._read(_RESULT)) is None and time.monotonic() < until:
            time.sleep(_POLL_S)
        return None if content is None else AttemptResult.from_bytes(content)

    # --- Files. ---

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _proof(self, path: str, data: bytes) -> bytes:
        made = hmac.new(self._key, f"{path}\n".encode(), _DIGEST)
        made.update(data)
        return made.digest()

    def _write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        self._files.write_bytes(path, self._proof(path, data) + data)

    def _read(self, name: str) -> bytes | None:
        """Read a file; None if there is none.

        Raises:
            StoreError: nobody of this attempt has written it.
        """
        path = self._path(name)
        if not self._files.exists(path):
            return None
        content = self._files.read_bytes(path)
        proof, data = content[:_PROOF_BYTES], content[_PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._proof(path, data)):
            raise StoreError(
                f"{path} in {describe_shared(self._files)} was not written by this job: its proof is wrong. Look who else writes there, and "
                "start the job again."
            )
        return data

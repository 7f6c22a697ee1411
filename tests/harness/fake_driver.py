"""A stand-in for libcuda.so.1 that only counts GPUs and returns their UUIDs, for hosts without GPUs.

The variable FAKE_GPUS lists the GPUs of the host, each by a number that becomes the last byte of its UUID. Like the real
driver it shows the GPUs that CUDA_VISIBLE_DEVICES names by index, up to the first that does not exist.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = r"""
#include <stdlib.h>
#include <string.h>

static int gpus[64], count = -1;

static int numbers(const char* text, int* out) {
  int n = 0;
  while (text && *text && n < 64) {
    out[n++] = atoi(text);
    text = strchr(text, ',');
    if (text) ++text;
  }
  return n;
}

int cuInit(unsigned flags) {
  int all[64], chosen[64], i;
  int num = numbers(getenv("FAKE_GPUS"), all);
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  (void)flags;
  count = 0;
  if (!visible) {
    for (; count < num; ++count) gpus[count] = all[count];
  } else {
    int named = numbers(visible, chosen);
    for (i = 0; i < named && chosen[i] < num; ++i) gpus[count++] = all[chosen[i]];
  }
  return count ? 0 : 100;
}
int cuGetErrorString(int status, const char** text) {
  (void)status;
  *text = "no CUDA-capable device is detected";
  return 0;
}
int cuDeviceGetCount(int* out) { *out = count; return count < 0 ? 3 : 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return ordinal < count ? 0 : 101; }
int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
  memset(uuid, 0, 16);
  uuid[15] = (unsigned char)gpus[device];
  return 0;
}
"""


def fake_driver(folder: Path, source_text: str = _SOURCE, name: str = "fake_driver") -> str:
    """Compile it, or another one, into a folder, and return its path, for `Settings.cuda_library`."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in of CUDA's driver")
    source, library = folder / f"{name}.c", folder / f"lib{name}.so"
    source.write_text(source_text)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60
    )
    return str(library)


def uuid_of(number: int) -> str:
    """Return the UUID of a GPU in FAKE_GPUS."""
    return f"GPU-00000000-0000-0000-0000-{number:012x}"

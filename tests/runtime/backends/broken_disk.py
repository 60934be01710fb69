"""An engine with weights in a file, on a disk that stops: run in a process of its own.

    LD_PRELOAD=shim.so BROKEN_DISK=FILE BROKEN_NAME=TEXT python broken_disk.py ENGINE BUDGET KINDS

The shim (`SHIM`) lets reads past the page cache, of files with this text in their path, fail where
FILE holds an `e`, end as at a file's end where it holds a `z`, never return where it holds an `h`,
and take 5 ms longer where it holds an `s`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char state(void) {
  char found = 0;
  int file = open(getenv("BROKEN_DISK"), O_RDONLY);
  if (file < 0) return 0;
  if (read(file, &found, 1) != 1) found = 0;
  close(file);
  return found;
}

static int is_broken(int file) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t size = readlink(link, path, sizeof path - 1);
  path[size < 0 ? 0 : size] = 0;
  return strstr(path, getenv("BROKEN_NAME")) != NULL;
}

ssize_t pread(int file, void *data, size_t count, off_t offset) {
  static ssize_t (*real)(int, void *, size_t, off_t);
  if (!real) real = dlsym(RTLD_NEXT, "pread");
  if ((fcntl(file, F_GETFL) & O_DIRECT) && is_broken(file)) {
    char found = state();
    if (found == 'e') { errno = EIO; return -1; }
    if (found == 'z') return 0;
    if (found == 'h') for (;;) pause();
    if (found == 's') usleep(5000);
  }
  return real(file, data, count, offset);
}

ssize_t pread64(int file, void *data, size_t count, off_t offset) {
  return pread(file, data, count, offset);
}
"""


def build_shim(directory: Path) -> Path:
    """The compiled shim, for LD_PRELOAD."""
    source, shim = directory / "shim.c", directory / "shim.so"
    source.write_text(SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    return shim


def main(engine_dir: str, budget: str, kinds: str) -> None:
    """Print what became of requests before, while and after the disk is broken."""
    from specc.runtime.engine import Engine
    from specc.runtime.llm import LLM
    from specc.sampling.params import SamplingParams

    engine = Engine.load(engine_dir, offload_weights=int(budget), oversubscribes=True)
    switch = Path(os.environ["BROKEN_DISK"])

    def tokens() -> list[int]:
        llm = LLM(engine, plan="tree-3-2-1")
        params = SamplingParams(max_tokens=24, temperature=0)
        return list(llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids)

    # rank 0's own program, where others run the target, too
    target: Any = getattr(engine.target, "program", engine.target)
    report: dict[str, object] = {"direct": target.stream.is_direct()}
    wanted = tokens()
    for kind in kinds:
        switch.write_text(kind)
        begin = time.monotonic()
        try:
            tokens()
            report[kind] = "no error"
        except Exception as error:
            report[kind] = f"{type(error).__name__}: {error}"
        report[f"{kind}_s"] = time.monotonic() - begin
        switch.write_text("")
        if kind == "e" and not engine.is_lost:
            report["after"] = tokens() == wanted
    report["lost"] = engine.is_lost
    engine.close()
    print(json.dumps(report), flush=True)
    # a read that never returns is no reason to stay
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])

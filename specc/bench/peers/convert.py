"""Converted models, kept in specc's cache by what they were made of.

    <cache>/peers/<peer>-<key>/    what the peer's converter wrote

The key is over the files of the checkpoint, the form of weights and the versions of peer and
converters: a checkpoint that changes is converted anew, wherever it lies. Removing the folder costs
time alone.

Converters run in a process of their own, `python -m specc.bench.peers.convert`: they import torch
and print at will.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from specc.bench.peers.installed import versions_of
from specc.bench.peers.names import PEERS
from specc.bench.peers.peer import Form, NotAvailableError
from specc.bench.peers.resident import environment
from specc.system.child_processes import die_with_parent, run_child
from specc.system.file_cache import FileCache
from specc.system.files import hash_file

# of what converters of this package write
_VERSION = 1
_REFUSED = 3


def converted(peer: str, checkpoint: Path, form: Form, threads: int) -> Path:
    """Directory of a checkpoint as a peer reads it; converted where the cache has none.

    Args:
        checkpoint: directory, or a file that is the whole model.
        threads: that the converter may use.
    Raises:
        NotAvailableError: the converter refuses the checkpoint, or fails.
        CompilerError: the cache cannot be written.
    """
    cache = FileCache()
    place = cache.root / "peers" / f"{peer}-{conversion_key(peer, checkpoint, form)}"
    if place.is_dir():
        return place
    with cache.scratch() as scratch:
        output = scratch / "model"
        output.mkdir()
        _run(peer, checkpoint, form, output, threads)
        try:
            place.parent.mkdir(exist_ok=True)
            output.rename(place)
        except OSError as error:
            # another process was faster
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise cache.error(place, error) from error
    return place


def conversion_key(peer: str, checkpoint: Path, form: Form) -> str:
    """Hash of all that decides what a converter writes."""
    found = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.iterdir())
    made_of = {
        "converter": _VERSION,
        "form": asdict(form),
        "versions": versions_of([peer]),
        "files": {file.name: hash_file(file) for file in found if file.is_file()},
    }
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:32]


def _run(peer: str, checkpoint: Path, form: Form, output: Path, threads: int) -> None:
    arguments = [PEERS[peer].module, str(checkpoint.absolute()), str(output)]
    arguments += [form.dtype, form.integers or ""]
    done = run_child(
        [sys.executable, "-P", "-m", "specc.bench.peers.convert", *arguments], environment(threads)
    )
    if done.returncode == 0:
        return
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"code {done.returncode}"
    if done.returncode == _REFUSED:
        raise NotAvailableError(last)
    raise NotAvailableError(f"its converter failed on {checkpoint} ({last})")


def main(arguments: list[str]) -> None:
    die_with_parent()
    module, checkpoint, output, dtype, integers = arguments
    form = Form(dtype, integers or None)
    try:
        importlib.import_module(module).PEER.convert(Path(checkpoint), form, Path(output))
    except NotAvailableError as error:
        print(f"\n{error}", file=sys.stderr)
        raise SystemExit(_REFUSED) from None


if __name__ == "__main__":
    main(sys.argv[1:])

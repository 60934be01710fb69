"""Run an engine of two ranks on two hosts: here, two network namespaces of one Linux machine.

The ranks share each layer (`-tp 2`), or are two stages of some layers each (`-pp 2`):

    specc compile --target examples/pair/target --draft examples/pair/draft -tp 2 -o out/two-ranks
    sudo python examples/two_hosts.py out/two-ranks "def fibonacci(n):" --max-tokens 32

Each namespace has an interface, an address and ports of its own, and nothing else in common: what
the ranks say to each other goes over TCP, from 10.117.0.1 to 10.117.0.2. On two real hosts the
commands are those that this prints, without `ip netns exec NAME`. Namespaces need root.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PORT = 29500


def hosts() -> list[tuple[str, str, str]]:
    """Namespace, interface and address of each host; their names are those of this process."""
    mark = os.getpid()
    return [(f"specc-{mark}-{i}", f"sp{mark}-{i}"[:15], f"10.117.0.{i + 1}") for i in (0, 1)]


@contextlib.contextmanager
def network(pair: list[tuple[str, str, str]]) -> Iterator[None]:
    """Two namespaces with a cable between them; nothing is left of it.

    Raises:
        SystemExit: the system does not let this user make them.
    """
    (_, first, _), (_, second, _) = pair
    try:
        try:
            for name, _, _ in pair:
                ip("netns", "add", name)
            ip("link", "add", first, "type", "veth", "peer", "name", second)
            for name, interface, address in pair:
                ip("link", "set", interface, "netns", name)
                ip("-n", name, "address", "add", f"{address}/24", "dev", interface)
                ip("-n", name, "link", "set", interface, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            raise SystemExit(f"no network namespaces here (they need root): {said}") from error
        yield
    finally:
        for name, _, _ in pair:
            # with a namespace, its interfaces go
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def command(node: int, address: str, rest: list[str]) -> list[str]:
    """What starts the ranks of one host: on each the same but for `--node-rank`."""
    launch = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"]
    launch += ["--master-addr", address, "--master-port", str(PORT)]
    return [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "specc", "run", *rest]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path, help="engine directory, cut for two ranks")
    parser.add_argument("--seconds", type=float, default=300, help="for all of it")
    args, rest = parser.parse_known_args()
    # so that nothing is left in that case, either
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    pair = hosts()
    started: list[subprocess.Popen[bytes]] = []
    with network(pair):
        try:
            for node, (name, _, _) in enumerate(pair):
                line = command(node, pair[0][2], [str(args.engine.resolve()), *rest])
                print(f"{name}: {shlex.join(['torchrun', *line[3:]])}", file=sys.stderr)
                started.append(subprocess.Popen(["ip", "netns", "exec", name, *line]))
            # rank 0 prints what was generated; the other ends when it does
            return max(process.wait(args.seconds) for process in started)
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait()


if __name__ == "__main__":
    sys.exit(main())

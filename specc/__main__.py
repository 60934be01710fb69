"""`python -m specc`, as launchers start it: `torchrun --nproc-per-node 2 -m specc run engine/`."""

from __future__ import annotations

from specc.cli.main import main

if __name__ == "__main__":
    main()

"""Low-rank adapters of a target: files that PEFT writes, and how a request names one."""

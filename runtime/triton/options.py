"""What a model's config.pbtxt says about the engine, and the devices of each of its instances.

Nothing here imports torch: which devices it sees is settled before it is loaded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specc.errors import ConfigError
from specc.runtime.engine_args import AsyncEngineArgs

_DO = "correct the model's config.pbtxt, or write it again with specc triton"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ON_FAULT = {"refuse": False, "stop": True}
# parameters that belong to Triton's Python backend
_OF_TRITON = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS")


@dataclass(frozen=True)
class TritonOptions:
    """Parameters of a model, one instance's view of them.

    Args:
        args: how the engine is opened and run.
        drain_s: seconds that unloading waits for open requests.
        stops_server: a broken engine stops the whole server, for whoever starts it again.
        devices: what CUDA_VISIBLE_DEVICES has to be; None leaves it alone.
    """

    args: AsyncEngineArgs
    drain_s: float = 10.0
    stops_server: bool = False
    devices: str | None = None
    labels: Mapping[str, str] | None = None

    @classmethod
    def from_args(
        cls, args: Mapping[str, str], environ: Mapping[str, str] | None = None
    ) -> TritonOptions:
        """Read what Triton passes to `initialize`.

        Args:
            args: model_config, model_repository, model_version, model_instance_…
            environ: None is that of the process.
        Raises:
            ConfigError: a parameter is unknown or has a value of another type; the model is not
                decoupled; an instance has no devices.
        """
        config = json.loads(args["model_config"])
        if not config.get("model_transaction_policy", {}).get("decoupled", False):
            raise ConfigError(
                "a model that is not decoupled",
                "model_transaction_policy { decoupled: true }: a request has many responses",
                _DO,
            )
        given = {
            name: value["string_value"]
            for name, value in config.get("parameters", {}).items()
            if name not in _OF_TRITON
        }
        unknown = sorted(set(given) - set(_PARAMETERS))
        if unknown:
            raise ConfigError(
                f"parameter {', '.join(unknown)}", f"some of {', '.join(_PARAMETERS)}", _DO
            )
        version = Path(args["model_repository"]) / args["model_version"]
        return cls(
            args=_engine_args(version / given.get("engine", "engine"), given),
            drain_s=_seconds("drain_s", given.get("drain_s", str(cls.drain_s))),
            stops_server=_choice("on_fault", given.get("on_fault", "refuse"), _ON_FAULT),
            devices=_devices(
                given.get("gpu_device_ids"), args, os.environ if environ is None else environ
            ),
            labels={
                "model": args["model_name"],
                "version": args["model_version"],
                "instance": args["model_instance_name"],
            },
        )

    def place(self, environ: MutableMapping[str, str]) -> None:
        """Show torch no other devices than those of this instance; before torch is imported."""
        if self.devices is not None:
            environ[_VISIBLE] = self.devices


def _devices(groups: str | None, args: Mapping[str, str], environ: Mapping[str, str]) -> str | None:
    kind = args["model_instance_kind"]
    if groups is not None:
        listed = [group.strip() for group in groups.split(";")]
        instance = _instance_number(args["model_instance_name"])
        if instance >= len(listed) or not all(
            re.fullmatch(r"\d+(\s*,\s*\d+)*", group) for group in listed
        ):
            raise ConfigError(
                f"gpu_device_ids {groups!r} for instance {instance}",
                'devices of each instance, such as "0,1;2,3" for two',
                _DO,
            )
        wanted = [int(device) for device in listed[instance].split(",")]
    elif kind == "GPU":
        wanted = [int(args["model_instance_device_id"])]
    elif kind == "CPU":
        return ""
    else:
        return None
    # a process that sees some devices only counts among those
    seen = environ.get(_VISIBLE)
    if seen is None:
        return ",".join(map(str, wanted))
    visible = [device for device in seen.split(",") if device.strip()]
    if max(wanted) >= len(visible):
        raise ConfigError(
            f"device {max(wanted)}, and {_VISIBLE}={seen}",
            f"one of the {len(visible)} devices that the server sees, counted from 0",
            _DO,
        )
    return ",".join(visible[device].strip() for device in wanted)


def _instance_number(name: str) -> int:
    """Triton calls the instances of a model `model_0_0`, `model_0_1`; a single one `model_0`."""
    found = re.search(r"_(\d+)$", name)
    return int(found[1]) if found else 0


def _integer(name: str, text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise ConfigError(f"parameter {name} {text!r}", "an integer, 1 or more", _DO)
    return int(text)


def _seconds(name: str, text: str) -> float:
    if not re.fullmatch(r"\d{1,6}(\.\d+)?", text):
        raise ConfigError(f"parameter {name} {text!r}", "seconds, 0 or more", _DO)
    return float(text)


def _choice(name: str, text: str, values: Mapping[str, bool]) -> bool:
    if text not in values:
        raise ConfigError(f"parameter {name} {text!r}", " or ".join(values), _DO)
    return values[text]


def _text(name: str, text: str) -> str:
    return text


# fields of `AsyncEngineArgs` that a model may have, and how each is read
_READERS: Mapping[str, Callable[[str, str], Any]] = {
    "plan": _text,
    "policy": _text,
    "backend": _text,
    "max_num_seqs": _integer,
    "max_waiting": _integer,
    "num_threads": _integer,
    "mmap": partial(_choice, values={"true": True, "false": False}),
    "check_weights": partial(_choice, values={"true": True, "false": False}),
    "rank_timeout_s": _seconds,
    "oversubscribes": partial(_choice, values={"true": True, "false": False}),
    "verify": partial(_choice, values={"true": True, "false": False}),
    "generation_config": _text,
    "override_generation_config": _text,
}
_PARAMETERS = ("engine", *_READERS, "gpu_device_ids", "drain_s", "on_fault")


def _engine_args(engine: Path, given: Mapping[str, str]) -> AsyncEngineArgs:
    read = {name: _READERS[name](name, text) for name, text in given.items() if name in _READERS}
    return AsyncEngineArgs(engine=engine, **read)

"""A model of the Triton Inference Server: its options, and its config.pbtxt."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from specc.close_name import advice
from specc.errors import ConfigError
from specc.option import check_ranges, option
from specc.triton.tensors import INPUTS, OUTPUTS, TritonTensor

BACKEND = "specc"
KINDS = ("auto", "cpu", "gpu", "model")
LAYOUTS = ("model", "backend")
# how the engine gets into the repository
FILES = ("copy", "link", "reference")


@dataclass(frozen=True)
class TritonConfig:
    """A model of a repository.

    Args:
        name: of the model.
        layout: `model` writes a model.py beside the engine; `backend` leaves that to the backend
            `specc`, and writes none.
        files: `copy` or hard `link` the engine's files; or a `reference` to where it is.
        instances: copies of the engine that the server loads.
        kind: of each instance, `cpu`, `gpu`, `model` (specc picks devices), or `auto`.
        gpus: devices of each instance, such as `0,1;2,3`; then one instance for each group.
        parameters: further ones of config.pbtxt; see `docs/guide/triton-server.md`.
    Raises:
        ConfigError: values that Triton, or specc, does not take.
    """

    name: str = option("specc", "Name of the model.")
    layout: str = option(
        "model",
        "model: a model.py beside the engine; backend: the backend specc serves all models, each a"
        " config.pbtxt and an engine.",
    )
    files: str = "copy"
    instances: int = option(1, "How many times to load the engine.", least=1, most=64)
    kind: str = option("auto", "Kind of the instances, in Triton's words: auto, cpu, gpu or model.")
    gpus: str | None = option(None, 'Devices of each instance: "0,1;2,3" is two of two devices.')
    parameters: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_ranges(self)
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", self.name):
            raise ConfigError(
                f"--name {self.name!r}",
                "letters, digits, and _ . - between them",
                "choose another name",
            )
        for name, value, allowed in (
            ("--layout", self.layout, LAYOUTS),
            ("--kind", self.kind, KINDS),
            ("how the engine gets there:", self.files, FILES),
        ):
            if value not in allowed:
                do = advice(value, allowed, "pass one of them")
                raise ConfigError(f"{name} {value}", f"one of {', '.join(allowed)}", do)
        if self.gpus is not None:
            self._check_gpus(self.gpus)

    def _check_gpus(self, gpus: str) -> None:
        if not re.fullmatch(r"\d+(,\d+)*(;\d+(,\d+)*)*", gpus):
            raise ConfigError(
                f"--gpus {gpus!r}",
                'device numbers of each instance: "0" for one, "0;1" for two instances',
                "correct it",
            )
        if self.kind not in ("auto", "model"):
            raise ConfigError(f"--gpus with --kind {self.kind}", "--kind model", "leave --kind out")
        if self.instances not in (1, gpus.count(";") + 1):
            raise ConfigError(
                f"--instances {self.instances} and --gpus {gpus!r}",
                "as many groups as instances",
                "leave --instances out: each group is one",
            )

    def to_pbtxt(self, engine: str) -> str:
        """The text of config.pbtxt; `engine` is a path, relative to the version's directory."""
        kind, count = self.kind, self.instances
        parameters = {"engine": engine} | dict(self.parameters)
        if self.gpus is not None:
            kind, count = "model", self.gpus.count(";") + 1
            parameters["gpu_device_ids"] = self.gpus
        backend = BACKEND if self.layout == "backend" else "python"
        lines = [
            "# written by specc triton; docs/guide/triton-server.md says what can be changed",
            f"name: {_quoted(self.name)}",
            f"backend: {_quoted(backend)}",
            "# specc batches by itself, continuously",
            "max_batch_size: 0",
            "model_transaction_policy { decoupled: true }",
            "input [",
            ",\n".join(_tensor_text(tensor, is_input=True) for tensor in INPUTS),
            "]",
            "output [",
            ",\n".join(_tensor_text(tensor, is_input=False) for tensor in OUTPUTS),
            "]",
            f"instance_group [ {{ count: {count} kind: KIND_{kind.upper()} }} ]",
        ]
        for key, value in parameters.items():
            lines.append(
                f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}"
            )
        return "\n".join(lines) + "\n"


def _tensor_text(tensor: TritonTensor, is_input: bool) -> str:
    dims = ", ".join(map(str, tensor.dims))
    optional = " optional: true" if is_input else ""
    name = _quoted(tensor.name)
    return f"  {{ name: {name} data_type: {tensor.data_type} dims: [ {dims} ]{optional} }}"


def _quoted(text: str) -> str:
    """A string of protobuf's text format: what is not plain ASCII as octal bytes."""
    plain: Collection[int] = {*range(0x20, 0x7F)} - {*b"\"\\'"}
    return '"' + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in text.encode()) + '"'

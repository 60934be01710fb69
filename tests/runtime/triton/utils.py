"""`triton_python_backend_utils` for one process: values in, values out, and its rules kept.

What the server does with them is tested with the real one; this is for engines that fail.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonModelException(Exception):
    pass


class TritonError(Exception):
    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = (
        "internal",
        "invalid",
        "unavailable",
        "cancelled",
    )

    def __init__(self, message: str, code: str = INTERNAL) -> None:
        super().__init__(message)
        self.code = code


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        assert isinstance(array, np.ndarray)
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] = (), error: TritonError | None = None) -> None:
        self.values = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class Sender:
    """Keeps responses; nothing may be asked of it after the final one."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.is_gone = False
        self.has_ended = threading.Event()
        self.wrong_calls = 0

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self.has_ended.is_set():
            self.wrong_calls += 1
        if response is not None:
            self.responses.append(response)
        if flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            self.has_ended.set()

    def is_cancelled(self) -> bool:
        self.wrong_calls += self.has_ended.is_set()
        return self.is_gone

    @property
    def error(self) -> TritonError | None:
        return self.responses[-1].error


class Request:
    def __init__(self, outputs: list[str], **values: np.ndarray) -> None:
        self.sender = Sender()
        self._outputs = outputs
        self._tensors = [Tensor(name, value) for name, value in values.items()]

    def get_response_sender(self) -> Sender:
        return self.sender

    def inputs(self) -> list[Tensor]:
        return self._tensors

    def parameters(self) -> str:
        return json.dumps({"id": "1"})

    def requested_output_names(self) -> list[str]:
        return self._outputs


class Metric:
    def __init__(self, kind: str) -> None:
        self.kind, self.value = kind, 0.0

    def increment(self, by: float) -> None:
        assert self.kind == MetricFamily.COUNTER
        assert by >= 0
        self.value += by

    def set(self, value: float) -> None:
        assert self.kind == MetricFamily.GAUGE
        self.value = value


class MetricFamily:
    COUNTER, GAUGE = "counter", "gauge"
    values: dict[str, Metric] = {}  # noqa: RUF012 - one page for all, as the server's

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name, self.kind = name, kind

    def Metric(self, labels: dict[str, Any]) -> Metric:
        rest = [f"{k}={v}" for k, v in labels.items() if k in ("position", "plan")]
        metric = self.values[" ".join([self.name, *rest])] = Metric(self.kind)
        return metric


class Logger:
    lines: list[str] = []  # noqa: RUF012

    @classmethod
    def log_error(cls, text: str) -> None:
        cls.lines.append(text)

    log_warn = log_info = log_error

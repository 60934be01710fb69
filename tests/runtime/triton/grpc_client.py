"""A client of Triton's gRPC, for tests: every request on a stream of its own."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.runtime.triton.server import TritonServer, import_client


@dataclass
class Stream:
    """Responses of one request on a gRPC stream, in order."""

    responses: list[dict[str, Any]] = field(default_factory=list)
    error: Any = None

    @property
    def text(self) -> str:
        return b"".join(r["text_output"] for r in self.responses).decode()

    @property
    def token_ids(self) -> list[int]:
        return [token for r in self.responses for token in r.get("output_ids", [])]


class GrpcClient:
    """A bidirectional stream of its own for every request."""

    def __init__(self, server: TritonServer) -> None:
        self.grpc = import_client()
        self._address = f"127.0.0.1:{server.grpc}"
        self._clients: list[Any] = []

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def start(self, model: str = "specc", outputs: tuple[str, ...] = (), **values: Any):
        """Begin a request; returns its client and where responses arrive."""
        arrived: queue.Queue[Any] = queue.Queue()
        client = self.grpc.InferenceServerClient(self._address)
        self._clients.append(client)
        client.start_stream(lambda result, error: arrived.put((result, error)))
        client.async_stream_infer(
            model,
            [self.tensor(name, value) for name, value in values.items()],
            outputs=[self.grpc.InferRequestedOutput(name) for name in outputs] or None,
            enable_empty_final_response=True,
        )
        return client, arrived

    def ask(self, model: str = "specc", outputs: tuple[str, ...] = (), **values: Any) -> Stream:
        """A whole request; checks that exactly the last response is marked so."""
        client, arrived = self.start(model, outputs, **values)
        stream = Stream()
        is_final = False
        while not is_final:
            result, error = arrived.get(timeout=60)
            if error is not None:
                stream.error = error
                break
            response = result.get_response()
            is_final = response.parameters["triton_final_response"].bool_param
            stream.responses.append(
                {o.name: result.as_numpy(o.name).reshape(-1).tolist() for o in response.outputs}
            )
        stream.responses = [
            {
                name: values if name == "output_ids" else values[0]
                for name, values in response.items()
            }
            for response in stream.responses
        ]
        client.stop_stream()
        assert arrived.empty()
        return stream

    def tensor(self, name: str, value: Any) -> Any:
        values = value if isinstance(value, list) else [value]
        kinds = {bool: (np.bool_, "BOOL"), float: (np.float32, "FP32"), int: (np.int32, "INT32")}
        kinds |= {str: (np.object_, "BYTES"), bytes: (np.object_, "BYTES")}
        dtype, kind = (np.uint64, "UINT64") if name == "seed" else kinds[type(values[0])]
        array = np.array([values], dtype=dtype)
        tensor = self.grpc.InferInput(name, list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        return tensor

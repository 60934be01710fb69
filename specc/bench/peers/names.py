"""Which peers there are, and which packages they need; loads none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specc.close_name import advice
from specc.errors import ConfigError

TRANSFORMERS = "transformers"
PLAIN = "plain"
ASSISTED = "assisted"
LOOKUP = "lookup"
MODES = (PLAIN, ASSISTED, LOOKUP)


@dataclass(frozen=True)
class PeerFacts:
    """What is known of a peer before any of it is imported.

    Args:
        module: has a `PEER`, see `peer.py`.
        model: what its converter writes, within a directory; empty is the directory itself, None
            where it reads checkpoints as they are.
        packages: name to import → distribution that brings it.
        converters: the same, of what only conversion needs; a change of their versions converts
            anew.
        extra: of specc, that installs them.
        reads: end of the names of files that it reads without conversion.
    """

    module: str
    model: str | None
    packages: Mapping[str, str]
    converters: Mapping[str, str]
    extra: str
    reads: str | None = None


_TORCH = {"torch": "torch", "transformers": "transformers"}
PEERS: dict[str, PeerFacts] = {
    TRANSFORMERS: PeerFacts(
        "specc.bench.peers.transformers_generate",
        None,
        {"transformers": "transformers"},
        {},
        "compile",
    ),
    "onnxruntime-genai": PeerFacts(
        "specc.bench.peers.onnxruntime_genai",
        "",
        {"onnxruntime_genai": "onnxruntime-genai"},
        {**_TORCH, "onnx_ir": "onnx-ir"},
        "peers",
    ),
    "openvino-genai": PeerFacts(
        "specc.bench.peers.openvino_genai",
        "",
        {"openvino_genai": "openvino-genai"},
        {
            **_TORCH,
            "openvino": "openvino",
            "openvino_tokenizers": "openvino-tokenizers",
            "nncf": "nncf",
        },
        "peers",
    ),
    "llama.cpp": PeerFacts(
        "specc.bench.peers.llama_cpp",
        "model.gguf",
        {"llama_cpp": "llama-cpp-python"},
        {"gguf": "gguf"},
        "peers",
        ".gguf",
    ),
}


def run_of(peer: str, mode: str) -> str:
    """Name of a run in reports, such as `openvino-genai-lookup`."""
    return peer if mode == PLAIN else f"{peer}-{mode}"


def check_name(name: str) -> None:
    """Raises ConfigError: there is no such peer."""
    if name not in PEERS:
        raise ConfigError(
            f"--against {name}", ", ".join(PEERS), advice(name, PEERS, "choose one of them")
        )

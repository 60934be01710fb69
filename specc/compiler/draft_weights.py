"""`specc draft-weights`: a checkpoint's weights as an engine holds those of a draft.

The engine's own program of the draft says what its file holds of each parameter, and in which form;
a checkpoint's tensors go through the same specs as in a compilation (`ModelSource.weight_specs`,
`write_weights`). Nothing is traced: everything that a trace would make of the checkpoint but its
weights has to be what the engine has, and is compared: configuration, token ids, buffers.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from specc.artifact.backends import facts_of
from specc.artifact.directory import open_engine
from specc.artifact.draft_file import DraftForm, draft_entry, read_new_weights
from specc.artifact.manifest import Manifest
from specc.artifact.model_entry import ModelEntry
from specc.artifact.nonfinite import refuse
from specc.artifact.safetensors_io import SafetensorsReader
from specc.artifact.weights import write_weights
from specc.compiler.candidate import Candidate
from specc.compiler.stored_models import read_stored
from specc.compiler.tokenizer import TokenMap
from specc.compiler.vocabulary import Vocabulary, match
from specc.drafters.registry import facts_of as facts_of_kind
from specc.errors import ConfigError
from specc.passes.drafters.head_source import head_source, share_equal
from specc.passes.drafters.registry import drafter_of_files
from specc.passes.frontend import hf_model
from specc.passes.frontend.buffer_values import buffer_values
from specc.passes.frontend.model_source import ModelSource
from specc.passes.frontend.read_program import weight_of
from specc.passes.program import ROWS, Program, Weight
from specc.refuse_running import refuse_running
from specc.speculation.vocabulary_map import INPUTS, LACKING, OUTPUTS
from specc.system.files import output_error

# of a configuration, what says nothing about the graph of a model
_UNREAD = frozenset(
    ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache",
     "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "_commit_hash",
     "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop",
     "attn_pdrop", "id2label", "label2id", "problem_type", "chunk_size_feed_forward",
     "output_attentions", "output_hidden_states", "return_dict", "auto_map")
)  # fmt: skip
_AGAIN = "compile an engine of this checkpoint"


@dataclass
class _Draft:
    """A checkpoint, opened as the draft that an engine has.

    Args:
        program: weights as the engine's program has them; it has no graph.
        copies: see `CompiledModel`.
        tables: see `CompiledModel`.
    """

    source: ModelSource
    program: Program
    copies: dict[str, Weight] = field(default_factory=dict)
    tables: dict[str, Tensor] = field(default_factory=dict)


def write_draft_weights(
    checkpoint: str | Path,
    engine: str | Path,
    output: str | Path,
    draft: str | None = None,
    target: str | Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DraftForm:
    """Write a file that `LLM.reload_draft` takes.

    Args:
        checkpoint: of the draft, as `specc compile --draft` has it; of an MTP module that of its
            target.
        engine: directory.
        output: file to write; one that is there is replaced as a whole.
        draft: `draft_0`, …; None is the only one.
        target: checkpoint of the target, which a draft that reads hidden states is compared with;
            None is where the engine was compiled from.
        progress: called with (bytes done, bytes in all).
    Returns:
        what the file holds.
    Raises:
        ConfigError: the engine has no such draft; or the checkpoint is another model, or has a
            tensor of its own where the engine's draft reads its target's.
        WeightError: a tensor is absent, of another shape, or not finite.
        OutputError: the file cannot be written.
        SpeccError: the checkpoint or the engine cannot be read.
    """
    engine, output = Path(engine), Path(output)
    manifest = open_engine(engine, backend="eager", available_memory=sys.maxsize)
    refuse_running(manifest, facts_of(manifest.backend), "reload_draft")
    entry = draft_entry(manifest, draft)
    with SafetensorsReader(engine / manifest.weights_file(entry), reads_float8=True) as own:
        held = {key: (own.dtype(key), own.shape(key)) for key in own.keys()}  # noqa: SIM118
        form = DraftForm.of(engine, manifest, entry.name, held)
        stored = read_stored(engine / entry.program_file)
        constants = {
            x["name"]: _tensor(own, x["key"]) for x in stored["inputs"] if x["kind"] == "constant"
        }
        fixed = {key: _tensor(own, key) for key, x in form.tensors.items() if x.is_fixed}
    found = _open(str(checkpoint), engine, manifest, entry, stored, target)
    _check_config(found.source, engine, manifest, entry)
    _check_tokens(found.source, engine, manifest, constants)
    _check_buffers(found.source, constants)
    _check_shared(found)
    specs = found.source.weight_specs(found.program, found.copies.values(), found.tables)
    kept = {spec.key: spec for spec in specs if spec.key in form.tensors}
    for key, stated in form.tensors.items():
        spec = kept.get(key)
        if spec is None or (spec.stored_dtype, spec.stored_shape) != (stated.dtype, stated.shape):
            raise _another(checkpoint, f"has no {key} of the form that the engine has", "one")
    with _replacing(output) as partial:
        reader = found.source.reader
        write_weights(kept.values(), reader, partial, None, progress, refuse, form.metadata)
        # as a server will: whatever it refuses is met here
        unchanged = fixed | {key: torch.empty(0) for key in form.tensors if key not in fixed}
        read_new_weights(partial, form, unchanged)
    return form


def _open(
    checkpoint: str,
    engine: Path,
    manifest: Manifest,
    entry: ModelEntry,
    stored: Mapping[str, Any],
    target: str | Path | None,
) -> _Draft:
    dtype = getattr(torch, entry.dtype)
    program = Program(entry.name, fx.GraphModule(nn.Module(), fx.Graph()), {}, {})
    for item in stored["inputs"]:
        if item["kind"] == "weight":
            program.weights[item["name"]] = weight_of(item)
        if "of_target" in item:
            program.of_target[item["name"]] = item["of_target"]
    # neither those in the target's file nor copies beside a draft are written
    program.is_lent = True
    if entry.head is None:
        found = ModelSource.load(entry.name, checkpoint, dtype)
        return _Draft(found, program)
    # plans call heads of a family alike
    kind = facts_of_kind(entry.head.kind)
    # where it is in its target's files, these are the checkpoint
    place = checkpoint if kind.is_of_target else str(target or manifest.models[0].checkpoint)
    first = Candidate.open("target", place)
    own = Candidate.open_draft(entry.name, kind.kind if kind.is_of_target else checkpoint, first)
    if own.head is None or own.head.kind != kind.kind:
        raise _another(checkpoint, f"is no {kind.called}", f"a {kind.called}")
    whole = ModelSource.load("target", place, getattr(torch, manifest.models[0].dtype))
    source = head_source(own.head, whole, dtype, entry.name)
    share_equal(source, whole)
    assert source.head is not None
    beside, tables = drafter_of_files(source.head).step_weights(source.head, dtype)
    there = {x.key for x in program.weights.values() if x.layout == ROWS}
    copies = {key: x for key, x in beside.items() if key not in there}
    return _Draft(source, program, copies, tables)


def _check_config(source: ModelSource, engine: Path, manifest: Manifest, entry: ModelEntry) -> None:
    """Raises ConfigError: a configuration that makes another graph."""
    file = f"{entry.dir}/config.json"
    if file not in manifest.files or source.directory is None:
        raise ConfigError(
            f"{engine}, whose {entry.name} was a module in memory",
            "a draft that was compiled from a directory",
            "save the module, and compile the engine with its directory",
        )
    if source.head is None:
        before, now = (
            hf_model.load_config(path).to_dict() for path in (engine / entry.dir, source.directory)
        )
    else:
        before, now = (
            read_stored(path) for path in (engine / file, source.directory / "config.json")
        )
    keys = sorted((before.keys() | now.keys()) - _UNREAD)
    for key in keys:
        if before.get(key) != now.get(key):
            raise _another(
                source.label,
                f"has {key} {now.get(key)!r:.60} in config.json",
                f"{before.get(key)!r:.60}, as the draft of {engine}",
            )


def _check_tokens(
    source: ModelSource, engine: Path, manifest: Manifest, constants: Mapping[str, Tensor]
) -> None:
    """Raises ConfigError: a draft that means other tokens by its ids."""
    name = manifest.tokenizer.file
    if source.head is not None or name is None or source.directory is None:
        # a head has the ids of its target
        return
    own, needed = source.directory / "tokenizer.json", f"the tokens of the draft of {engine}"
    if INPUTS not in constants:
        if own.is_file():
            theirs = TokenMap.from_file(engine / name)
            if theirs.first_difference(TokenMap.from_file(own)) is not None:
                raise _another(source.label, "has other tokens", needed)
        return
    if not own.is_file():
        raise _another(source.label, "has no tokenizer.json, and ids of its own", needed)
    config = hf_model.load_config(engine / manifest.models[0].dir)
    found, _ = match(Vocabulary.read(engine / name, config), Vocabulary.read(own, source.config))
    sizes = len(constants[INPUTS]), int(source.config.vocab_size)
    ids, known = found.outputs(*sizes)
    tables = {INPUTS: found.inputs(*sizes), LACKING: ~known}
    tables |= {OUTPUTS + (f"_{rank}" if rank else ""): row for rank, row in enumerate(ids)}
    if not all(key in constants and torch.equal(x, constants[key]) for key, x in tables.items()):
        raise _another(source.label, "has other tokens", needed)


def _check_buffers(source: ModelSource, constants: Mapping[str, Tensor]) -> None:
    """Raises ConfigError: a table of the module that is not what the engine's graph reads."""
    paths = {
        f"b_{path.replace('.', '_')}": path
        for path, _ in source.module.named_buffers()
        # frequencies follow from the configuration, and may be other ones in a graph
        if not path.endswith("inv_freq")
    }
    paths = {name: path for name, path in paths.items() if name in constants}
    values = buffer_values(source.module, set(paths.values()))
    for name, path in paths.items():
        if not torch.equal(values[path], constants[name]):
            raise _another(source.label, f"has another {path}", "that of the engine's draft")


def _check_shared(draft: _Draft) -> None:
    """Raises ConfigError: a tensor of its own where the engine's draft reads its target's."""
    head = draft.source.head
    for name in draft.program.of_target:
        (parameter,) = draft.program.weights[name].parameters
        if head is None or parameter not in head.shared:
            raise ConfigError(
                f"{draft.source.label} has a {parameter} of its own",
                "the target's, which the draft of this engine reads in its place: a file of new"
                " weights never changes the target",
                f"train the draft with {parameter} frozen, or {_AGAIN}",
            )


@contextlib.contextmanager
def _replacing(output: Path) -> Iterator[Path]:
    """A file beside another one, which takes its place at the end: nobody reads half of it."""
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    try:
        yield partial
        os.replace(partial, output)
    except OSError as error:
        raise output_error(output, error) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _tensor(reader: SafetensorsReader, key: str) -> Tensor:
    data = b"".join(bytes(chunk) for chunk in reader.read_chunks(key))
    values = torch.frombuffer(bytearray(data), dtype=reader.dtype(key)) if data else None
    empty = torch.empty(reader.shape(key), dtype=reader.dtype(key))
    return empty if values is None else values.view(reader.shape(key))


def _another(checkpoint: str | Path, found: str, needed: str) -> ConfigError:
    return ConfigError(
        f"{checkpoint} {found}",
        needed,
        f"pass a checkpoint of the same model with other weights, or {_AGAIN}",
    )

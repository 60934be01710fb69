"""Is a directory a draft head, and does it fit its target? Headers and one map are read, no weight.

Sources: SafeAILab/EAGLE eagle/model/cnets.py; vllm-project/speculators models/eagle3;
deepseek-ai/DeepSpec deepspec/modeling/eagle3; vllm-project/vllm worker/gpu/spec_decode/eagle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specc.artifact.safetensors_io import INDEX_FILE, SINGLE_FILE, SafetensorsReader, TensorReader
from specc.errors import HeadError
from specc.passes.drafters.head_spec import HeadSpec, HeadSwitches, TargetFacts
from specc.passes.drafters.registry import drafters_of_files
from specc.system.json_file import read_json

_DO = "pass the head of this target, or download it again"
# what files say, and else what their own trainers take
AS_TRAINED = HeadSwitches()
_PICKLED = ("*.bin", "*.pt", "*.pth")


def recognise(
    directory: Path, target: TargetFacts, switches: HeadSwitches = AS_TRAINED
) -> HeadSpec | None:
    """What head, block drafter or set of Medusa heads a directory holds.

    Args:
        switches: what to take in place of what the files say.
    Returns:
        the head; None where this is an ordinary model, or no model at all.
    Raises:
        HeadError: another target's head, one with tensors too many or too few, a kind of draft
            that specc does not run, or weights that are pickled alone.
        WeightError: a checkpoint that cannot be read.
        NotCausalLMError, UnsupportedRotaryError: see `read_head_config`.
    """
    file, name = directory / "config.json", str(directory)
    if not file.is_file():
        return None
    raw = read_json(file, HeadError, "the configuration of a model", "correct config.json")
    if not isinstance(raw, dict):
        return None
    weights = directory
    if not (directory / SINGLE_FILE).is_file() and not (directory / INDEX_FILE).is_file():
        kind = next((kind for kind in drafters_of_files() if kind.says(raw, name)), None)
        if kind is None:
            return None
        if not kind.file or not (directory / kind.file).is_file():
            raise _no_tensors(directory)
        weights = directory / kind.file
    with SafetensorsReader(weights) as reader:
        return fit_head(reader, raw, directory, weights, target, switches)


def fit_head(
    reader: TensorReader,
    raw: dict[str, Any],
    directory: Path,
    weights: Path,
    target: TargetFacts,
    switches: HeadSwitches = AS_TRAINED,
) -> HeadSpec | None:
    """What head a configuration and names of tensors are of; results and errors as of `recognise`.

    Args:
        reader: of tensors, of which shapes are read, and the values of maps of ids.
        raw: contents of config.json.
        directory: of a draft; what errors call it.
        weights: directory or file that `reader` reads.
        switches: what to take in place of what the files say.
    """
    given = (reader, raw, directory, weights, target, switches)
    found = (kind.fit(*given) for kind in drafters_of_files())
    return next((spec for spec in found if spec is not None), None)


def _no_tensors(directory: Path) -> HeadError:
    pickled = [item.name for pattern in _PICKLED for item in sorted(directory.glob(pattern))]
    what = f"its weights are pickled ({pickled[0]})" if pickled else "it has no weights"
    do = "convert them with safetensors.torch.save_file where you trust them"
    return HeadError(
        f"{directory}: a draft head; {what}",
        SINGLE_FILE,
        do if pickled else "download the head again",
    )

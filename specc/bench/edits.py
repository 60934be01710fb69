"""Edits of a file: what its text as the prediction of the edited one saves, beside lookups.

A model that edits well is large, and how much it changes is its own choice. Here the choice of the
target is replaced after each pass, as dice replace it (`dice.py`): it writes the edited file, token
for token. Passes, drafts and acceptance are those of any request; time that this takes is left out.
The prompt holds the file, as that of an agent does, so lookups find it there.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specc.bench.engine import measurement_of
from specc.bench.rounds import OFF, Measurement
from specc.errors import RequestError
from specc.runtime.backends.step_io import StepValues
from specc.runtime.drafters.host_drafts import hosts_of
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.requests.predicted import predicted_ids
from specc.runtime.requests.request_maker import RequestMaker
from specc.sampling.generation_config import NONE
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan

# share of the lines that an edit changes
SHARES = (0.01, 0.1, 0.5)
WRONG = "wrong"
PREDICTION = "prediction"
_ASK = "\n\n# The same file, edited:\n\n"
_WORD = re.compile(r"[A-Za-z_]{3,}")
_CERTAIN = float("inf")


@dataclass(frozen=True)
class Edit:
    """One output.

    Args:
        name: `1 %`, …, or `wrong`.
        prompt: token ids, which hold the file.
        output: what the target writes.
        predicted: token ids of the prediction.
    """

    name: str
    prompt: list[int]
    output: list[int]
    predicted: list[int]


def make_edits(engine: Engine, text: str, other: str, shares: Sequence[float]) -> list[Edit]:
    """Edits of a file, the same ones every time, and one with another text as its prediction.

    Outputs begin with the target's own first token, which comes with the prompt and cannot be
    replaced; predictions do, too, but for the wrong one, which begins with another.

    Args:
        engine: that has a tokenizer.
        text: of the file; lines at its end are left out where prompt and output do not fit.
        other: text that has nothing to do with it.
        shares: of lines that are changed.
    Raises:
        RequestError: the engine has no tokenizer, or no plan for predictions; no line of the file
            fits.
    """
    maker = RequestMaker(engine, None)
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise RequestError(
            "--edits, and an engine without a tokenizer", "an engine that reads text",
            "compile it with --tokenizer",
        )  # fmt: skip
    predicted_ids(engine, "")
    room = min(engine.max_seq_len, engine.position_limit)
    lines = _fitting(text, lambda x: len(tokenizer.encode(x, add_special_tokens=False)), room)
    original = "".join(lines)
    prompt = maker.tokenize(original + _ASK)
    greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm = LLM(engine, plan=OFF, generation_config=NONE)
    (first,) = llm.generate([prompt], greedy)[0].outputs[0].token_ids
    file = predicted_ids(engine, original)
    edits = []
    for share in shares:
        output = [first, *predicted_ids(engine, edit_lines(lines, share))]
        edits.append(Edit(f"{share:.0%}", prompt, output, [first, *file]))
    # only as much of it as of the file is passed
    wrong = tokenizer.encode(other, add_special_tokens=False).ids
    start = next((i for i, token in enumerate(wrong) if token != first), len(wrong))
    middle = edits[len(edits) // 2]
    return [*edits, Edit(WRONG, prompt, middle.output, wrong[start : start + len(file)])]


def edit_lines(lines: Sequence[str], share: float, seed: int = 0) -> str:
    """A text of which some lines are changed: a name in it, replaced, left out, or one before it.

    Args:
        lines: with their ends.
        share: of those that are changed, of lines with a word; at least one is.
    """
    dice = random.Random(f"{seed} {share}")
    able = [i for i, line in enumerate(lines) if _WORD.search(line)]
    chosen = set(dice.sample(able, min(len(able), max(1, round(share * len(lines))))))
    found = []
    for i, line in enumerate(lines):
        kind = dice.choice(("name", "replace", "insert", "delete")) if i in chosen else ""
        if kind in ("replace", "insert"):
            found.append(_renamed(lines[dice.choice(able)], dice, 2))
        if kind == "name":
            found.append(_renamed(line, dice, 1))
        elif kind in ("", "insert"):
            found.append(line)
    return "".join(found)


def _renamed(line: str, dice: random.Random, count: int) -> str:
    """With other names in the place of some of its words."""
    words = sorted(set(_WORD.findall(line)))
    for word in dice.sample(words, min(count, len(words))):
        line = line.replace(word, "".join(dice.sample(word, len(word))) + "_2")
    return line


def _fitting(text: str, count: Callable[[str], int], room: int) -> list[str]:
    """Its first lines, such that the prompt and outputs of this length and a bit more fit."""
    lines = text.splitlines(keepends=True)
    while lines:
        length = count("".join(lines))
        if 2 * length + length // 8 + 64 <= room:
            return lines
        keep = int(len(lines) * (room - 64) / 2.125 / length)
        lines = lines[: min(keep, len(lines) - 1)]
    raise RequestError(
        f"--edits with a file that does not fit into {room} tokens twice",
        "a file of which some lines do",
        "compile with a larger --max-seq-len",
    )


class ForcedOutput:
    """Has the target write a text, between verification and acceptance of each step.

    Set as `before_accept` of a step program, for batches of one request.

    Args:
        output: token ids.
        num_prompt: tokens before them.
    """

    def __init__(self, output: Sequence[int], num_prompt: int, plan: SpecPlan) -> None:
        self.seconds = 0.0
        self._output, self._num_prompt, self._plan = output, num_prompt, plan

    def __call__(self, values: StepValues) -> None:
        begin = time.perf_counter()
        (length,) = values["cache_len"].tolist()
        is_data = self._plan.speculates and not self._plan.is_static
        parents = values["parents"][0].tolist() if is_data else self._plan.shape.parents
        wanted = [
            self._output[place] if place < len(self._output) else None
            for place in self._places(parents, length - self._num_prompt)
        ]
        if self._plan.tile is None:
            logits = values["logits"]
            for node, token in enumerate(wanted):
                if token is not None:
                    logits[node, token] = _CERTAIN
        else:
            winners = values["winners"]
            own = zip(winners[0].tolist(), wanted, strict=True)
            values["winners"] = winners.new_tensor([[x if y is None else y for x, y in own]])
        self.seconds += time.perf_counter() - begin

    def _places(self, parents: Sequence[int], root: int) -> list[int]:
        """Of each node, which token of the output follows it.

        Args:
            parents: of nodes; of a dead one, -1.
            root: which token of the output the root is.
        """
        places: list[int] = []
        for node, parent in enumerate(parents):
            places.append(root + 1 if node == 0 or parent < 0 else places[parent] + 1)
        return places


class EditContender:
    """Writes the output of an edit with an engine.

    Args:
        plan: of steps in which no prediction proposes.
        without: name of the run that is the same without the prediction; None is such a run.
    """

    def __init__(
        self, engine: Engine, edit: Edit, name: str, plan: str, without: str | None = None
    ) -> None:
        self.name, self.plan, self.without = name, plan, without
        self._engine, self._edit = engine, edit
        self._prediction = None if without is None else edit.predicted

    def run(self) -> Measurement:
        edit = self._edit
        llm = LLM(
            self._engine,
            plan=self.plan,
            shares_prefixes=False,
            shares_outputs=False,
            generation_config=NONE,
        )
        count = len(edit.output)
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        hooks = []
        try:
            for step in self._engine.steps.values():
                step.before_accept = ForcedOutput(edit.output, len(edit.prompt), step.plan)
                hooks.append(step.before_accept)
            begin = time.perf_counter()
            (output,) = llm.generate([edit.prompt], params, prediction=[self._prediction])
            elapsed_s = time.perf_counter() - begin
        finally:
            for step in self._engine.steps.values():
                step.before_accept = None
        excluded_s = sum(hook.seconds for hook in hooks)
        found = [output.outputs[0].token_ids]
        return measurement_of(llm.get_metrics(), found, elapsed_s - excluded_s, excluded_s)


def engine_contenders(engine: Engine, edit: Edit) -> list[EditContender]:
    """With and without the prediction, beside no draft and beside those of the host's plan."""
    host = hosts_of(engine.plans.values())[-1]
    draft = " and ".join(host.drafts)
    return [
        EditContender(engine, edit, OFF, OFF),
        EditContender(engine, edit, PREDICTION, OFF, OFF),
        EditContender(engine, edit, draft, host.name),
        EditContender(engine, edit, f"{draft} and {PREDICTION}", host.name, draft),
    ]


class ForcedLogits:
    """The same of a model of transformers: a processor of logits."""

    def __init__(self, output: Sequence[int], num_prompt: int) -> None:
        self._output, self._num_prompt = output, num_prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = input_ids.shape[1] - self._num_prompt
        if place < len(self._output):
            scores = scores.clone()
            scores[:, self._output[place]] = _CERTAIN
        return scores


def load_checkpoint(source: str, dtype: torch.dtype) -> Any:
    """A checkpoint in transformers.

    Raises:
        OSError, ValueError: it has none there that it reads.
    """
    import transformers

    from specc.bench.baseline import quieten

    quieten()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, local_files_only=True
    )
    return model.eval()


def transformers_contenders(model: Any, edit: Edit, depth: int) -> list[Any]:
    """Plain generation and prompt lookup of transformers.

    Args:
        model: of transformers, loaded.
        depth: tokens that are looked up.
    """
    from specc.bench.baseline import PLAIN, TransformersContender

    forced = ForcedLogits(edit.output, len(edit.prompt))
    given = model, [[edit.prompt]], len(edit.output)
    return [
        TransformersContender(PLAIN, *given, processors=[forced]),
        TransformersContender(
            f"{PLAIN}-lookup",
            *given,
            options={"prompt_lookup_num_tokens": depth},
            processors=[forced],
        ),
    ]

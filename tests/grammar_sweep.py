"""Every plan puts out what plain decoding does: 200 grammars with dead ends, patterns, recursion.

    python -m tests.grammar_sweep --results out/grammar_sweep.json

Models are tables over a part of the demo pair's tokenizer: the logits of a token and a place. So
every plan has the same logits to the last bit. Grammars are drawn from a seed.
"""

from __future__ import annotations

import json
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import llguidance
import torch
import typer
from tokenizers import Tokenizer
from torch import Tensor

from specc.errors import RequestError
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.outputs.request_output import CompletionOutput
from specc.sampling.params import SamplingParams
from specc.sampling.structured import StructuredOutputsParams
from specc.speculation.plans import MERGE, OFF, DynamicTree, SpecPlan
from specc.system.machine import describe_machine
from tests.runtime.conftest import build_engine

TOKENIZER = Path(__file__).parents[1] / "examples" / "pair" / "target" / "tokenizer.json"
NUM_GRAMMARS, MAX_TOKENS, POSITIONS, VOCAB, EOS = 200, 32, 96, 320, 0
PLANS = (
    OFF,
    SpecPlan.from_widths((1, 1, 1, 1)),
    SpecPlan.from_widths((3, 2, 1)),
    SpecPlan.from_dynamic(DynamicTree(8, 3, 3)),
    SpecPlan.from_widths((1, 1, 1), ("lookup-2",)),
    SpecPlan.from_widths((2, 1), ("draft_0", "lookup-2"), MERGE),
)
# whose outputs are those of plain decoding with the same seed; and those that are not
COUPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    *({"temperature": 1.0, "seed": seed} for seed in range(4)),
    *({"temperature": 1.5, "seed": seed, "top_k": 50} for seed in range(4)),
    *({"temperature": 1.0, "seed": seed, "rule": "delta"} for seed in range(4)),
)
OTHERS = tuple(
    {"temperature": 1.2, "seed": seed, "rule": rule} for rule in ("mss", "swor") for seed in (0,)
)
PROMPTS = ("def f(x):\n", "JSON: ", 'x = {"a": 1, "b": ', "The answer is ", "class A:\n    ")
_TEXTS = ("[a-c]{1,4}", "^[A-Z][a-z]{2,5}$", "^(ab|ba){1,3}$", "^[0-9]{3}-[a-f]{2,4}$", "x+y?z{2}")
_FORMATS = ("date", "time", "ipv4", "uuid", "email")


def draw_grammars(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Options of `StructuredOutputsParams`, kind after kind."""
    dice = random.Random(seed)
    kinds = (_overlap, _overlap, _schema, _schema, _recursive, _merged, _regex, _rules, _choice)
    for number in range(count):
        yield kinds[number % len(kinds)](dice)


def _json(dice: random.Random, schema: Any) -> dict[str, Any]:
    white = dice.choice([{}, {"disable_any_whitespace": True}, {"whitespace_pattern": " ?"}])
    return {"json": schema} | white


def _value(dice: random.Random, depth: int) -> dict[str, Any]:
    least = dice.randint(-50, 50)
    simple = [
        {"type": "boolean"},
        {"type": "null"},
        {"enum": dice.sample(["x", "xy", "yx", 7, True, None], 3)},
        {"type": "integer", "minimum": least, "maximum": least + dice.randint(0, 400)},
        {"type": "integer", "multipleOf": dice.randint(2, 9), "minimum": 0, "maximum": 99},
        {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25},
        {"type": "string", "maxLength": dice.randint(0, 6)},
        {"type": "string", "pattern": dice.choice(_TEXTS)},
        {"type": "string", "format": dice.choice(_FORMATS)},
    ]
    if depth == 0 or dice.random() < 0.6:
        return dice.choice(simple)
    if dice.random() < 0.5:
        return {"type": "array", "items": _value(dice, depth - 1), "maxItems": dice.randint(1, 3)}
    return _object(dice, depth - 1)


def _object(dice: random.Random, depth: int) -> dict[str, Any]:
    names = dice.sample(["a", "b", "ok", "score", "id", "name"], dice.randint(1, 3))
    required = [name for name in names if dice.random() < 0.7]
    properties = {name: _value(dice, depth) for name in names}
    return {"type": "object", "properties": properties, "required": required}


def _schema(dice: random.Random) -> dict[str, Any]:
    return _json(dice, _object(dice, 2))


def _overlap(dice: random.Random) -> dict[str, Any]:
    """Properties that a pattern names, too: after their comma, nothing may come."""
    found = _object(dice, 1)
    for name in dice.sample([*found["properties"]], dice.randint(1, len(found["properties"]))):
        pattern = dice.choice([f"^{name}$", f"^({name})$", f"^{name[0]}{name[1:]}$"])
        own = found["properties"][name] if dice.random() < 0.5 else {}
        found.setdefault("patternProperties", {})[pattern] = own
    found["additionalProperties"] = False
    if dice.random() < 0.4:
        found = {"type": "array", "items": found, "minItems": 1, "maxItems": 2}
    elif dice.random() < 0.3:
        found = {"type": "object", "properties": {"in": found, "n": {}}, "required": ["in"]}
    return _json(dice, found)


def _recursive(dice: random.Random) -> dict[str, Any]:
    node = _object(dice, 0)
    most = dice.randint(1, 2)
    node["properties"]["kids"] = {
        "type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": most,
    }  # fmt: skip
    if dice.random() < 0.5:
        node["patternProperties"] = {"^kids$": {}}
        node["additionalProperties"] = False
    return _json(dice, {"$ref": "#/$defs/node", "$defs": {"node": node}})


def _merged(dice: random.Random) -> dict[str, Any]:
    one, other = _object(dice, 0), {"properties": {"z": _value(dice, 0)}, "required": ["z"]}
    if dice.random() < 0.5:
        return _json(dice, {"$defs": {"base": one}, "allOf": [{"$ref": "#/$defs/base"}, other]})
    return _json(dice, one | {"anyOf": [other, {"properties": {"y": _value(dice, 0)}}]})


def _regex(dice: random.Random) -> dict[str, Any]:
    parts = ["[a-z]{1,5}", "[0-9]+", "(ab|a|b){2,4}", "-?", "( |\\n)", "[^a]{1,3}", "x{3}", "\\w+,"]
    return {"regex": "".join(dice.choice(parts) for _ in range(dice.randint(2, 5)))}


def _rules(dice: random.Random) -> dict[str, Any]:
    """Rules that call themselves, and branches that begin with the same lexeme."""
    first, last = dice.sample("abcdef", 2), dice.sample("123456", 2)
    branches = " | ".join(f'"{begin}" WORD "{end}"' for begin, end in zip(first, last, strict=True))
    word = dice.choice(["[a-z]{1,3}", "[xyz]", "[a-z]+[0-9]?"])
    many = dice.choice(["start: item", 'start: item ("," item){0,3}', "start: item+"])
    inner = dice.choice(["", ' | "(" item ")"', ' | "[" item ("," item)? "]"'])
    return {"grammar": f"{many}\nitem: {branches}{inner}\nWORD: /{word}/\n"}


def _choice(dice: random.Random) -> dict[str, Any]:
    words = ["yes", "yesterday", "no", "nothing", "not", "def", "define", "a b", "a", "0", "10"]
    return {"choice": dice.sample(words, dice.randint(2, 6))}


def small_tokenizer() -> Tokenizer:
    """The first tokens of the demo pair's: bytes, and some of several. Draws cost by tokens."""
    whole = json.loads(TOKENIZER.read_text())
    model = whole["model"]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < VOCAB}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    return Tokenizer.from_str(json.dumps(whole))


def table_engine(batch: int = 256) -> Engine:
    """An engine whose logits follow from a token and its place; drafts have them with noise."""
    tokenizer = small_tokenizer()
    size, generator = tokenizer.get_vocab_size(), torch.Generator().manual_seed(1)
    engine = build_engine(
        plans=PLANS, max_num_seqs=batch, max_seq_len=POSITIONS, draft_positions=POSITIONS,
        block_size=16, prefill_chunk=256,
    )  # fmt: skip
    own = torch.randn(size, size, generator=generator) * 2.5
    turn = torch.randn(16, size, generator=generator)
    noise = torch.randn(size, size, generator=generator) * 1.5

    def forward(table: Tensor) -> Any:
        def of(tokens: Tensor, positions: Tensor, *others: Tensor, **more: Tensor) -> Tensor:
            rows = others[5] if len(others) > 5 else more["logit_rows"]
            return table[tokens[rows]] + turn[positions[rows] % len(turn)]

        return of

    engine.target.forward = forward(own)
    for draft in engine.drafts:
        draft.forward = forward(own + noise)
    engine.tokenizer, engine.vocab_size = tokenizer, size
    engine.eos_token_ids = frozenset([EOS])
    return engine


def compiled(engine: Engine, seed: int, count: int) -> list[StructuredOutputsParams]:
    """Grammars that the library can compile."""
    found: list[StructuredOutputsParams] = []
    for options in draw_grammars(seed, 9 * count):
        params = StructuredOutputsParams(**options)
        try:
            engine.grammars.start(params)
        except RequestError:
            continue
        found.append(params)
        if len(found) == count:
            return found
    raise AssertionError(f"{len(found)} of {count} grammars")


class Sweep:
    """Outputs of the same requests with several plans.

    Args:
        options: of `SamplingParams`, each with each grammar.
    """

    def __init__(
        self,
        engine: Engine,
        grammars: Sequence[StructuredOutputsParams],
        options: Sequence[Mapping[str, Any]],
    ) -> None:
        self._engine = engine
        self.params = [
            SamplingParams(max_tokens=MAX_TOKENS, structured_outputs=grammar, **one)
            for grammar in grammars
            for one in options
        ]

    def run(self, plan: str) -> list[CompletionOutput]:
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(self.params))]
        return [o.outputs[0] for o in LLM(self._engine, plan).generate(prompts, self.params)]

    def broken(self, outputs: Sequence[CompletionOutput]) -> list[int]:
        """Outputs that their grammar does not allow, or that ended though it could go on."""
        return [
            number
            for number, (output, params) in enumerate(zip(outputs, self.params, strict=True))
            if not self._is_allowed(output, params)
        ]

    def _is_allowed(self, output: CompletionOutput, params: SamplingParams) -> bool:
        assert params.structured_outputs is not None
        state = self._engine.grammars.start(params.structured_outputs)
        if not all(state.advance(token) for token in output.token_ids):
            return False
        if output.finish_reason == "error":
            return state.mask() is None and state.error == output.stop_reason
        return output.finish_reason == "length" or state.is_over


def compare(
    engine: Engine, grammars: Sequence[StructuredOutputsParams], plans: Sequence[str], seeds: int
) -> dict[str, Any]:
    """Outputs of each plan against those of plain decoding.

    Args:
        seeds: of each setting, at most 4.
    """
    some = [one for one in COUPLED if one.get("seed", 0) < seeds]
    others = [one for one in OTHERS if one["seed"] < seeds]
    sweep, rows = Sweep(engine, grammars, some), dict[str, Any]()
    begin_s = time.perf_counter()
    plain = sweep.run("off")
    ends = Counter(str(output.finish_reason) for output in plain)
    rows["off"] = {"outputs": len(plain), "ends": dict(ends), "broken": len(sweep.broken(plain))}
    for plan in plans:
        outputs = sweep.run(plan)
        differ = [i for i, (a, b) in enumerate(zip(outputs, plain, strict=True)) if a != b]
        rows[plan] = {
            "outputs": len(outputs), "differ": len(differ), "broken": len(sweep.broken(outputs)),
            "first": [_shown(sweep.params[i], outputs[i], plain[i]) for i in differ[:3]],
        }  # fmt: skip
        if "mss" in {rule.name.lower() for rule in engine.plans[plan].rules}:
            drawn = Sweep(engine, grammars, others)
            outputs = drawn.run(plan)
            rows[f"{plan}, mss and swor"] = {
                "outputs": len(outputs), "broken": len(drawn.broken(outputs)),
                "ends": dict(Counter(str(output.finish_reason) for output in outputs)),
            }  # fmt: skip
        print(plan, rows[plan], f"{time.perf_counter() - begin_s:.0f} s", flush=True)
    return rows


def _shown(params: SamplingParams, one: CompletionOutput, other: CompletionOutput) -> list[str]:
    assert params.structured_outputs is not None
    return [params.structured_outputs.text, f"{one.text!r}, {one.stop_reason}", repr(other.text)]


def main(results: Path | None = None, num_grammars: int = NUM_GRAMMARS, seeds: int = 4) -> None:
    """Compare all plans under drawn grammars."""
    torch.set_num_threads(1)
    engine = table_engine()
    begin_s = time.perf_counter()
    grammars = compiled(engine, 0, num_grammars)
    rows = compare(engine, grammars, [plan.name for plan in PLANS[1:]], seeds)
    found = {
        "command": shlex.join(["python", "-m", "tests.grammar_sweep", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
        "versions": {"torch": torch.__version__, "llguidance": llguidance.__version__},
        "grammars": dict(Counter(grammar.kind for grammar in grammars)),
        "outputs": sum(row["outputs"] for row in rows.values()),
        "seconds": round(time.perf_counter() - begin_s),
        "plans": rows,
    }
    print(json.dumps(found, indent=1))
    if results is not None:
        results.write_text(json.dumps(found, indent=1) + "\n")
    if any(row.get("differ", 0) or row["broken"] for row in rows.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

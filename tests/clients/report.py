"""What client scripts share; they run in an environment that has nothing of specc."""

import json
import sys
import traceback

# what the server's model says, `actor.py`
ANSWER = "It is 21 degrees in Bonn, é 🙂."
THINKING = "I know that."
WORD, NUMBER = "Bonn", 21
MODEL = "tiny"
ASK, ASK_AND_THINK = "How warm is it?", "Please think: how warm is it?"
URL = sys.argv[1] if len(sys.argv) > 1 else ""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
WEATHER = {"city": WORD, "degrees": NUMBER}


def run(**features):
    """Call what tries each feature, and print what came of it; an empty text is success."""
    found = {}
    for name, attempt in features.items():
        try:
            attempt()
            found[name] = ""
        except BaseException as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = str(error).strip() or f"line {place.lineno} of {place.name}"
            found[name] = f"{type(error).__name__}: {text}"[:400]
            traceback.print_exc()
    print(json.dumps(found))


def same(found, wanted):
    if found != wanted:
        raise AssertionError(f"{found!r} in place of {wanted!r}")
